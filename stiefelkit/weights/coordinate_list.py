"""The module that holds the coordinates of a parametrized weight: `CoordinateList`."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize

from stiefelkit import _torch
from stiefelkit.contract.param import OrthogonalParam, Position, coordinate_dtypes, load_chart_
from stiefelkit.errors import DtypeError, ImageError, OptionError, UnfilledError
from stiefelkit.scan.structures import Factored
from stiefelkit.tensors import (
    as_on_the_first,
    coarser,
    full_tensor,
    is_sharded,
    keep_precision,
    keeps_values,
    placed_like,
)
from stiefelkit.weights import checkpoint, optimizer_hooks
from stiefelkit.weights.checkpoint import EXTRA
from stiefelkit.weights.outside_writes import Notes, check_given, frame_tensors, to_nearest_

__all__ = ["CoordinateList"]

_DTYPE_OF = operator.attrgetter("dtype")
_Stamp = tuple[tuple[int, int], list[int], list[torch.dtype], list[int]]


class Slot(Protocol):
    """The place of a weight in a group of weights that are mapped at once, see `stiefelkit.weights.grouped`."""

    is_whole: bool
    applies_alone: bool

    def read(self, member: "CoordinateList", /) -> Tensor | None:
        """Returns the weight; None to evaluate it alone."""
        ...


class CoordinateList(parametrize.ParametrizationList):
    """Holds the coordinates of one weight, by name, and the map that turns them into it.

    It is `module.parametrizations.<name>` after `sk.orthogonal`. Coordinates are the parameters `original0`,
    `original1`, ... in state dicts, and attributes by their own names (`.skew`), as the chart is (`.signs`). State
    dicts also hold one small uint8 tensor that names the map; a checkpoint of another one is refused.

    Args:
        param: the map.
        coordinates: one tensor per coordinate, in the order of `param.coordinates`; or the device of new ones, which
            are to be filled.
        requires_grad: whether the coordinates train.

    Attributes:
        scheme: the init that `sk.reset_` repeats, None for the map's default.
        weight: the weight's name in messages, "Linear.weight".
        stand_in: what the module reads in the weight's place while `reset_parameters` draws.
        fills: how often all coordinates were set: by assigning, drawing, rebasing.
        changes: counts what may change which weights belong together: new ones, casts, other parameters in their place.
    """

    _parameters: dict[str, nn.Parameter]  # type: ignore[assignment]
    _modules: dict[str, nn.Module]  # type: ignore[assignment]
    _slot: Slot | None = None
    fills: int = 0
    stand_in: Tensor | None = None
    changes: ClassVar[int] = 0
    _stamp: _Stamp | None = None
    _checked: tuple[object, str] = (None, "")

    def __init__(
        self, param: OrthogonalParam, coordinates: Sequence[Tensor] | torch.device, requires_grad: bool = True
    ):
        nn.Module.__init__(self)
        self._modules["0"] = param
        for part in param.modules():
            part.is_attached = True  # type: ignore[assignment]
        self.unsafe, self.is_tensor = True, False
        shapes, self._key_of = param.coordinates, {}
        self._wanted = coordinate_dtypes(param, shapes)
        for i, (name, shape) in enumerate(shapes.items()):
            if isinstance(coordinates, torch.device):
                c = torch.empty(shape, device=coordinates, dtype=self._wanted[name])
            else:
                c = coordinates[i].contiguous()
            self._key_of[name] = key = f"original{i}"
            self._parameters[key] = nn.Parameter(c, requires_grad)
        self._originals = tuple(self._key_of.values())
        self.ntensors = len(self._originals)
        self._buffers[EXTRA] = None
        self._stamp = None
        self.scheme: str | None = None
        self.weight = "the weight"
        self._emptied: list[tuple[nn.Parameter, int | None]] | None = None
        self._names = frozenset({*self._key_of, *param.chart} - self.__dict__.keys() - _OWN)
        self._notes = Notes(param, self._parameters, self._key_of)
        optimizer_hooks.watch(self, (self._notes.are_of_frames, self._notes.manifolds))
        if not isinstance(coordinates, torch.device) or coordinates.type == "meta":
            self.note_written()

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([*self.children()])

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yields this list once where a weight is tied, though duplicates be asked for.

        torch.func.functional_call would write under each name, and put back last what was not there first.
        """
        memo = set() if memo is None else memo
        if self not in memo:
            yield from super().named_modules(memo, prefix, remove_duplicate)
            memo.add(self)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for a copy, which will have other parameters."""
        self.project_external_writes(by_value=True)
        of_tensors = {"_emptied": [] if self._is_unfilled() else None, "_notes": None, "_stamp": None, "_slot": None}
        return self.__dict__ | of_tensors

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copied or unpickled list, and has its frames watched as those of the original are."""
        super().__setstate__(state)
        self._buffers.setdefault(EXTRA, None)
        if self._emptied is not None:
            self._remember_emptied()
        self._notes = Notes(self.param, self._parameters, self._key_of)
        optimizer_hooks.watch(self, (self._notes.are_of_frames, self._notes.manifolds))
        self.leave_group()
        self.note_written()

    def leave_group(self) -> None:
        """Gives up the place in a group, since the weight may be of another kind now."""
        self._slot = None
        CoordinateList.changes += 1

    @property
    def param(self) -> OrthogonalParam:
        """The map."""
        return self._modules["0"]  # type: ignore[return-value]

    @property
    def coordinates(self) -> dict[str, nn.Parameter]:
        """Name to parameter of each coordinate."""
        held = self._parameters
        # Some tools put them elsewhere than among parameters.
        values = map(held.__getitem__, self._originals) if len(held) == self.ntensors else self._values()
        return dict(zip(self._key_of, values, strict=True))

    def replace(self, name: str, parameter: nn.Parameter) -> None:
        """Puts another parameter in the place of a coordinate, under the same key of state dicts."""
        unfilled, self._emptied = self._is_unfilled(), None
        self._parameters[self._key_of[name]] = parameter
        if unfilled:
            self._remember_emptied()
        self.note_written()
        self.leave_group()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Takes coordinates; raises OptionError for what pruning and norms by hooks put into the place of one."""
        originals = self.__dict__.get("_originals")
        if originals is None or name in originals:
            super().register_parameter(name, param)
            if originals is not None:  # another one, which is checked before the next read
                self._buffers[EXTRA] = self.get_extra_state()
                self.leave_group()
            return
        if name in (*self._key_of, *self.param.chart):
            raise self._refused(f"another tensor for {name}; copy_ into it, or sk.assign_ the weight")
        raise self._refused(f"{name}, as of pruning and norms by hooks; sk.bake makes a plain weight, which takes them")

    def __delattr__(self, name: str) -> None:
        """Removes what is no coordinate; torch removes those that it parametrizes, which is refused."""
        if name in self.__dict__.get("_originals", ()):
            raise self._refused(f"{name} taken away; sk.bake makes a plain weight, which may be parametrized")
        super().__delattr__(name)

    def _refused(self, got: str) -> OptionError:
        return OptionError(f"{self.weight} needs coordinates that are parameters of its own, got {got}.")

    def note_written(self) -> None:
        """Records frames and chart as they are now; `project_external_writes` looks at later writes."""
        if self._notes.held is not self._parameters:  # those of another list, whose `__dict__` was copied
            return self.__setstate__({"_stamp": None})
        self._notes.take(self._wanted)

    def project_external_writes(self, by_value: bool | None = None) -> None:
        """Takes frames that were written to from outside, as averages of weights do, to their nearest.

        What optimizers, assignments and checkpoints write may stay, if it would load; what functional_call brings is
        the caller's. Of writes through `.data` no count tells: values are looked at, all (`by_value`) or few (None).
        """
        if not (_torch.is_traced() or _torch.dispatch_modes()):
            check_given(self.param, self.coordinates, self.weight)
        if torch.compiler.is_compiling() or _torch.is_transformed() or (self._emptied and self._is_unfilled()):
            return
        if self._notes.held is not self._parameters:
            self.note_written()
        if self._buffers.get(EXTRA) is not None:
            self._check_taken()
        if not self._names.isdisjoint(self.__dict__):
            raise self._refused(
                f"an attribute {min(self._names & self.__dict__.keys())} that hides one; del it, and copy_ into the "
                "coordinate or sk.assign_ the weight"
            )
        notes = self._notes
        if notes.were_cast():
            self._settle()
        written = notes.written()
        looks = by_value or (by_value is None and self.is_at_rest())
        if written or (looks and not _torch.is_intercepted() and (by_value or notes.may_be_wrong())):
            is_strange = notes.project_(self.param, self.coordinates, written, self.weight, bool(by_value))
            self.note_written()
            notes.may_be_wrong()  # remembers what was looked at here
            if is_strange and not by_value and self.training and torch.is_grad_enabled():
                notes.warn_of_strange(self.weight)

    def is_at_rest(self) -> bool:
        """Returns whether a read is outside training: in eval mode, without gradients, or of a frame never stepped."""
        trains = self.training and torch.is_grad_enabled()
        return not (trains and (self._notes.were_trained or not self.param.manifolds))

    def _values(self) -> list[nn.Parameter]:
        # By getattr, which torch.fx traces.
        return [getattr(self, name) for name in self._originals]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # "_modules" is missing while unpickling.
            param = self.__dict__.get("_modules", {}).get("0")
            if param is not None and name in param.coordinates:
                return self.coordinates[name]
            if param is not None and name in param.chart:
                return param.chart[name]
            raise

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Evaluates the weight, in row-major order; of an x returns x @ W.mT, without forming W where the map can."""
        if x is None and not _torch.is_intercepted() and self._stamp and self.training and torch.is_grad_enabled():
            # Where all that a read asks about is as the last one found it, W is the map's alone.
            held, watched = self._parameters.values(), [*map(dict.get, *self._notes.places)]
            seen = (len(self.__dict__), len(self._modules)), [*map(id, held), *map(id, watched)]
            is_own = self._slot is self._emptied is self._buffers[EXTRA] is None and self._stamp[:2] == seen
            if is_own and self._stamp[2:] == ([*map(_DTYPE_OF, held)], [*map(_torch.write_count, watched)]):
                return self._modules["0"](*map(self._parameters.get, self._originals)).contiguous()
        if _torch.is_exported():
            raise OptionError(
                f"torch.onnx.export needs plain weights, got {self.weight} of a {self.param.title}; export "
                "sk.bake(copy.deepcopy(model))."
            )
        slot = self._slot
        if slot is None or (x is not None and slot.applies_alone):
            return self._evaluate(x)
        w = slot.read(self)
        if w is None or not slot.is_whole:
            with saved_plainly():  # as groups do, so that a checkpoint finds the same when it computes anew
                w = self._evaluate() if w is None else self._finished(w)
        return w if x is None else F.linear(x, w)

    def _evaluate(self, x: Tensor | None = None) -> Any:
        values = self._values()
        first: object = values[0] if values else None
        if isinstance(first, torch.fx.Proxy) and isinstance(first.tracer, torch.fx.Tracer):
            # One node of torch.fx.symbolic_trace, as torch's own lists are.
            path = first.tracer.path_of_module(self)
            return first.tracer.create_proxy("call_module", path, () if x is None else (x,), {})
        self._make_ready(values)
        return self.param.linear(x, *values) if x is not None else self._finished(self.param(*values))

    def _stamp_(self) -> None:
        """Notes what was found for the next read, where that is of the map alone and looks at no value."""
        held, watched = self._parameters.values(), [*map(dict.get, *self._notes.places)]
        is_plain = len(self._modules) == 1 and len(self._parameters) == self.ntensors
        if not is_plain or self.is_at_rest() or any(t is None or t.is_inference() for t in [*held, *watched]):
            return
        sizes, ids = (len(self.__dict__), 1), [*map(id, held), *map(id, watched)]
        self._stamp = sizes, ids, [*map(_DTYPE_OF, held)], [*map(_torch.write_count, watched)]

    def _finished(self, w: Tensor) -> Tensor:
        """Returns what stands on top of the map makes of its weight."""
        for parametrization in list(self)[1:]:  # torch 2.11 traces no star of a module list
            w = parametrization(w)
        return w.contiguous()

    def factored(self) -> Factored | None:
        """Returns the weight in factors, for a recurrence; None if it has none, or must be formed."""
        param, values = self.param, self._values()
        structure = param.structure
        is_traced = _torch.is_exported() or any(isinstance(value, torch.fx.Proxy) for value in values)
        if structure is None or is_traced or len(self) > 1 or param.dtype.itemsize < 4:
            return None
        self._make_ready(values)
        return Factored(structure, param.factors(*values))

    def _make_ready(self, values: Sequence[Tensor]) -> None:
        """Projects what was written to; raises UnfilledError unless the coordinates can be read."""
        self.project_external_writes()
        self._check_filled()
        if is_sharded(*values):
            raise UnfilledError(
                f"{self.param.title} needs gathered coordinates outside forward, got sharded ones; call the module's "
                "unshard() first and reshard() after, or use sk.drift."
            )
        if not _torch.is_intercepted():
            self._stamp_()

    def gathered(self) -> list[Tensor]:
        """Returns the coordinates, whole on every rank, also under FSDP2: `param` of these is the whole weight."""
        self._check_filled()
        return [full_tensor(c) for c in self._values()]

    @torch.no_grad()
    def right_inverse(self, value: Tensor) -> None:
        """Sets the coordinates so that the weight is `value`: checked first, copied, never aliased."""
        self.check_assignable()
        for on_top in [*self][:0:-1]:
            inverse = getattr(on_top, "right_inverse", None)
            if inverse is None:
                wanted = "a right_inverse in every parametrization to be assigned"
                raise ImageError(f"{self.weight} needs {wanted}, got {type(on_top).__name__}.")
            value = inverse(value)
        if not self.param.traits.invertible and isinstance(value, Tensor) and value.dtype == self.param.dtype:
            if tuple(value.shape) == self.param.shape and torch.equal(value, self().to(value.device)):
                return  # a map without a right inverse keeps what it gives
        self.take_position(self.param.solve(value))

    def take_position(self, position: Position) -> None:
        """Copies coordinates and a chart."""
        coordinates, chart = position
        load_chart_(self.param, chart)
        self.fill_(coordinates)

    def check_assignable(self) -> None:
        """Raises OptionError on the meta device."""
        if any([c.is_meta for c in self.coordinates.values()]):
            raise OptionError(f"{self.weight} needs a real device, got meta; call module.to_empty(device=...).")

    @torch.no_grad()
    def fill_(self, values: Sequence[Tensor]) -> None:
        """Copies values into the coordinates; sharded ones keep their placement."""
        for c, value in zip(self.coordinates.values(), values, strict=True):
            c.copy_(placed_like(value.to(c), c))
        self._emptied = None
        self.fills += 1
        self.note_written()

    def draw_(self, init: str | None = None, generator: torch.Generator | None = None) -> None:
        """Draws the weight by a scheme, its own if None; ranks that share coordinates get the first one's draw."""
        self.check_assignable()
        param, like = self.param, self._values()[0]
        # torch's default is that of the CPU, and draws there whatever the default device.
        source = torch.default_generator if generator is None else generator
        drawn, chart = param.initial(init or self.scheme or param.schemes[0], source)
        chart = {key: as_on_the_first(choice, like) for key, choice in chart.items()}
        self.take_position((tuple(as_on_the_first(c, like) for c in drawn), chart))

    def get_extra_state(self) -> Tensor:
        """Returns what a checkpoint says of this weight: `checkpoint.describe` as JSON in a uint8 tensor."""
        return torch.tensor(checkpoint.written(checkpoint.describe(self.param)), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: object) -> None:
        """Takes what a loader that goes key by key hands over; it is checked, as the rest, before the next read."""
        if not isinstance(state, Tensor):
            checkpoint.read_description(state, self.weight)  # raises
        else:
            self._buffers[EXTRA] = state

    _extra_state = property(
        get_extra_state, doc="For loaders that ask for a buffer; `project_external_writes` finds theirs among these."
    )

    def _check_taken(self) -> None:
        """Checks what a loader has put here key by key, once all is here, as `load_state_dict` does beforehand."""
        chart = {f"0.{key}": choice for key, choice in self.param.named_buffers()}
        state = {**self._parameters, **chart, EXTRA: self._buffers[EXTRA]}
        is_own = all(isinstance(p, nn.Parameter) for p in self._parameters.values())  # functional_call's are not
        if is_own and not any(t is None or t.is_meta for t in state.values()):
            self.check(state, "")
            self._buffers[EXTRA] = None
            self._settle()

    def check(self, state_dict: Mapping[str, Any], prefix: str, assign: bool = False, load: object = None) -> bool:
        """Raises what `checkpoint.check_state` does of the entries under a prefix, "layer.parametrizations.weight.".

        Returns whether they are the description of the map and nothing more. `load` is an object that stands for the
        load at work, within which they are checked once.
        """
        if load is not None and self._checked[0] is load and self._checked[1] == prefix:
            return False
        is_empty = checkpoint.check_state(self.param, self.coordinates, state_dict, prefix, self.weight, assign)
        self._checked = load, prefix
        return is_empty

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.check(state_dict, prefix, bool(args[0].get("assign_to_params_buffers")), args[2])
        super()._load_from_state_dict(state_dict, prefix, *args)
        self._checked, self._buffers[EXTRA] = (None, ""), None
        if all(f"{prefix}original{i}" in state_dict for i in range(self.ntensors)):
            self._emptied = None
        keys = self._key_of.items()
        self._settle({n: state_dict[prefix + key].dtype for n, key in keys if prefix + key in state_dict})

    def _settle(self, loaded: Mapping[str, torch.dtype] | None = None) -> None:
        """Casts what was loaded to the dtypes of coordinates, and takes frames that were coarser to their nearest.

        `loaded` has the dtypes in which coordinates came; None says that all came in those that they have.
        """
        wanted = self._wanted
        for name, c in self.coordinates.items():
            before = c.dtype if loaded is None else loaded.get(name)
            if c.is_complex() and not wanted[name].is_complex:
                if torch.view_as_real(c.detach())[..., 1].any():
                    raise DtypeError(f"{self.weight} needs real coordinates, got complex numbers in {name}.")
                c.data = c.data.real
            if c.dtype != wanted[name]:  # load_state_dict(assign=True) takes the tensors as they are
                c.data = c.data.to(wanted[name])
            if before is not None and name in self.param.manifolds:
                self._refine_(c, False, before)
        self.note_written()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self.project_external_writes(by_value=True)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CoordinateList":
        """Moves and casts: the weight's dtype follows the user, coordinates stay in float32 or better."""
        was_meta = any(c.is_meta for c in self.coordinates.values())
        before = [t.dtype for t, _ in frame_tensors(self.param, self.coordinates)]
        if recurse:
            for child in self.children():
                child._apply(fn)
        self._wanted = coordinate_dtypes(self.param)
        super()._apply(keep_precision(fn, self.param.dtype), recurse=False)
        if was_meta or not keeps_values(fn):
            self._remember_emptied()
        for (t, packed), dtype in zip(frame_tensors(self.param, self.coordinates), before, strict=True):
            self._refine_(t, packed, dtype)
        self.note_written()
        self.leave_group()
        return self

    def _refine_(self, frame: Tensor, packed: bool, before: torch.dtype) -> None:
        """Takes the nearest frame for one that was cast up: to the finer dtype it is none."""
        if coarser(frame.dtype, before) != frame.dtype and not self._is_unfilled() and not is_sharded(frame):
            to_nearest_(frame, packed)

    def _remember_emptied(self) -> None:
        self._buffers[EXTRA] = None
        self._emptied = [(c, None if c.is_inference() else _torch.write_count(c)) for c in self.parameters()]

    def _is_unfilled(self) -> bool:
        # Values may also arrive by copying into each parameter, or in tensors of functional_call, which are others.
        if self._emptied:
            present = {id(c) for c in self.parameters()}
            if any(id(c) in present and (n is None or n == _torch.write_count(c)) for c, n in self._emptied):
                return True
        if not any([c.is_meta for c in (*self._values(), *self.param.buffers())]):
            return False
        # accelerate brings a chart that it has offloaded when the map is called.
        parts = [part for part in self.param.modules() if "_hf_hook" not in vars(part)]
        chart = [choice for part in parts for choice in part.buffers(recurse=False)]
        return any([c.is_meta for c in (*self._values(), *chart)])

    def _check_filled(self) -> None:
        if self._is_unfilled():
            raise UnfilledError(
                f"{self.param.title} needs filled coordinates, got a weight that was moved to or from the meta "
                "device or through to_empty; call load_state_dict or sk.reset_ first."
            )


_OWN = frozenset(dir(CoordinateList))  # names that coordinates cannot be reached by


def saved_plainly() -> AbstractContextManager[object]:
    """Returns a context in which tensors are saved as they are, whatever outer hooks of checkpoints do."""
    is_hooked = not torch.compiler.is_compiling() and _torch.has_saved_tensor_hooks()
    return saved_tensors_hooks(lambda x: x, lambda x: x) if is_hooked else nullcontext()
