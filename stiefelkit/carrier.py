"""What carries the coordinates of a parametrized weight: `CoordinateList`."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stiefelkit import guard, registry
from stiefelkit.errors import CheckpointError, ImageError, NonFiniteError, UnfilledError
from stiefelkit.functional import nearest_frame
from stiefelkit.metrics import orthogonality_error
from stiefelkit.param import OrthogonalParam, coarser, frame_tolerance, keep_precision

__all__ = ["CoordinateList"]

_FORMAT = 1
_EXTRA = "_extra_state"


class CoordinateList(parametrize.ParametrizationList):
    """Holds the coordinates of one weight, by name, and the map that turns them into it.

    It is `module.parametrizations.<name>` after `sk.orthogonal`. Coordinates are the parameters `original0`,
    `original1`, ... in state dicts, and attributes by their own names (`.skew`), as the chart is (`.signs`). State
    dicts also hold one small uint8 tensor that names the map, so that a checkpoint of another map is refused before
    anything is written.

    Args:
        param: the map.
        coordinates: one tensor per coordinate, in the order of `param.coordinates`.
        requires_grad: whether the coordinates train.

    Attributes:
        scheme: the init that `sk.reset_` repeats, None for the map's default.
        weight: the weight's name in messages, "Linear.weight".
        gradient: the kind of dL/dW that an optimizer of frames has asked the module for, "exact" or "reference".
        gradients: the kinds that the module can give: its class's `frame_gradients`, else "exact" alone.
    """

    gradient: str = "exact"
    gradients: tuple[str, ...] = ("exact",)

    def __init__(self, param: OrthogonalParam, coordinates: Sequence[Tensor], requires_grad: bool = True):
        nn.ModuleList.__init__(self, [param])
        self.unsafe = True
        self.is_tensor = False
        self.ntensors = len(coordinates)
        for i, c in enumerate(coordinates):
            self.register_parameter(f"original{i}", nn.Parameter(c.contiguous(), requires_grad))
        self._originals = tuple(f"original{i}" for i in range(self.ntensors))
        self.scheme: str | None = None
        self.weight = "the weight"
        self._emptied: tuple[int, ...] | None = None
        if param.manifolds:
            guard.watch(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a copied or unpickled list, and has its frames watched as those of the original are."""
        super().__setstate__(state)
        if self.param.manifolds:
            guard.watch(self)

    @property
    def param(self) -> OrthogonalParam:
        """The map."""
        return self[0]  # type: ignore[return-value]

    @property
    def coordinates(self) -> dict[str, nn.Parameter]:
        """Name to parameter of each coordinate."""
        return dict(zip(self.param.coordinates, self._values(), strict=True))

    def replace(self, name: str, parameter: nn.Parameter) -> None:
        """Puts another parameter in the place of a coordinate, under the same key of state dicts."""
        unfilled = self._is_unfilled()
        self._parameters[self._originals[list(self.param.coordinates).index(name)]] = parameter
        self._emptied = tuple(c._version for c in self._values()) if unfilled else None

    def _values(self) -> list[nn.Parameter]:
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
        """Evaluates the weight, in row-major order, or applies it to x.

        Args:
            x: if given, the result is x @ W.mT, as `torch.nn.functional.linear` has it, without forming W where the map
                can do without; for a weight with this one parametrization only.

        Raises:
            UnfilledError: the coordinates hold no values yet, or are sharded and not gathered.
        """
        values = self._values()
        self._check_filled()
        if any([hasattr(c, "full_tensor") for c in values]):
            raise UnfilledError(
                f"{self.param.title} needs gathered coordinates outside forward, got sharded ones; call the module's "
                "unshard() first and reshard() after, or use sk.drift."
            )
        if x is not None:
            return self.param.linear(x, *values)
        first, *others = self._modules.values()
        w = first(*values)  # type: ignore[misc]
        for member in others:
            w = member(w)  # type: ignore[misc]
        return w.contiguous()

    def evaluate_whole(self) -> Tensor:
        """Evaluates the map on gathered coordinates: the whole weight on every rank, also under FSDP2."""
        return self.param(*self.gathered())

    def gathered(self) -> list[Tensor]:
        """The coordinates, whole on every rank."""
        self._check_filled()
        return [getattr(c, "full_tensor", lambda c=c: c)() for c in self._values()]

    @torch.no_grad()
    def right_inverse(self, value: Tensor) -> None:
        """Sets the coordinates so that the weight is `value`: checked first, copied, never aliased."""
        values: Any = value
        for member in reversed(self):
            if not hasattr(member, "right_inverse"):
                raise ImageError(
                    f"Assigning needs a right_inverse in every parametrization, got {type(member).__name__}."
                )
            values = member.right_inverse(values)  # type: ignore[operator]
        self.fill_(values)

    @torch.no_grad()
    def fill_(self, values: Sequence[Tensor]) -> None:
        """Copies values into the coordinates; sharded ones keep their placement."""
        for c, value in zip(self.coordinates.values(), values, strict=True):
            if hasattr(c, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value.to(c), c.device_mesh, c.placements, src_data_rank=None)  # type: ignore[attr-defined]
            c.copy_(value)
        self._emptied = None

    def describe(self) -> dict[str, Any]:
        """What a checkpoint says of this weight: the map, its version, field, shape, options and coordinates."""
        return {
            "format": _FORMAT,
            "map": _describe_map(self.param),
            "field": "complex" if self.param.is_complex else "real",
            "shape": list(self.param.shape),
            "options": self.param.options(),
            "coordinates": list(self.param.coordinates),
        }

    def get_extra_state(self) -> Tensor:
        """Returns `describe()` as JSON in a uint8 tensor."""
        return torch.tensor(list(json.dumps(self.describe()).encode()), dtype=torch.uint8, device="cpu")

    def set_extra_state(self, state: Any) -> None:
        """Does nothing: `_load_from_state_dict` has checked the state already."""

    def check(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Raises CheckpointError or NonFiniteError unless the entries under a prefix fit this weight.

        Args:
            state_dict: a whole state dict.
            prefix: where this weight's entries begin, "layer.parametrizations.weight.".
        """
        if not any(key.startswith(prefix) for key in state_dict):
            return
        host, _, name = prefix.removesuffix(".").rpartition("parametrizations.")
        weight = host + name
        if prefix + _EXTRA not in state_dict:
            raise CheckpointError(
                f"{weight} needs a checkpoint that names its map (key {prefix + _EXTRA}), got one without; "
                "load into torch's own parametrization, assign the weight with sk.assign_, and save again."
            )
        theirs, ours = _read_description(state_dict[prefix + _EXTRA], weight), self.describe()
        same = {key: theirs.get(key) == mine for key, mine in ours.items()}
        same["map"] = _is_same_map(theirs.get("map"), ours["map"])
        for key, fits in same.items():
            if not fits:
                raise CheckpointError(
                    f"{weight} needs a checkpoint with {key} {_in_words(ours[key])}, got {_in_words(theirs.get(key))}; "
                    "to change it, load into the old kind of weight and assign that to the new one with sk.assign_."
                )
        wanted = {f"{prefix}original{i}": (name, c) for i, (name, c) in enumerate(self.coordinates.items())}
        wanted |= {f"{prefix}0.{name}": (name, choice) for name, choice in self.param.named_buffers()}
        if not any(key in state_dict for key in wanted):
            return  # a shared module saved under another of its names
        for key, (name, tensor) in wanted.items():
            value = _check_entry(state_dict, key, f"{weight} ({name})", tensor)
            if name in self.param.manifolds:
                _check_frame(value, f"{weight} ({name})")
        names = {id(choice): name for name, choice in self.param.chart.items()}
        chart = {names[id(c)]: state_dict[f"{prefix}0.{name}"] for name, c in self.param.named_buffers()}
        reason = None if any(value.is_meta for value in chart.values()) else self.param.check_chart(chart)
        if reason is not None:
            raise CheckpointError(f"{weight} needs {reason}, got a checkpoint with others.")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.check(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if all(f"{prefix}original{i}" in state_dict for i in range(self.ntensors)):
            self._emptied = None
        wanted = self.param.coordinate_dtypes
        for i, (name, c) in enumerate(self.coordinates.items()):
            if c.dtype != wanted[name]:  # load_state_dict(assign=True) takes the tensors as they are
                c.data = c.data.to(wanted[name])
            if f"{prefix}original{i}" in state_dict:
                self._refine_(name, state_dict[f"{prefix}original{i}"].dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CoordinateList":
        """Moves and casts: the weight's dtype follows the user, coordinates stay in float32 or better."""
        was_meta = any(c.is_meta for c in self.coordinates.values())
        before = {name: c.dtype for name, c in self.coordinates.items()}
        if recurse:
            for child in self.children():
                child._apply(fn)
        super()._apply(keep_precision(fn, self.param.dtype), recurse=False)
        # torch's to_empty calls fn = empty_like: only what fn does to values known to nobody tells it from a move.
        known = torch.rand(64, device="cpu").bfloat16().float()
        probe = fn(known.clone())
        kept = not probe.is_meta and torch.equal(probe.detach().cpu().real.float(), known)
        if was_meta or not kept:
            self._emptied = tuple(c._version for c in self.coordinates.values())
        for name, dtype in before.items():
            self._refine_(name, dtype)
        return self

    @torch.no_grad()
    def _refine_(self, name: str, before: torch.dtype) -> None:
        """Takes the nearest frame for one that was cast up: to the finer dtype it is none."""
        c = self.coordinates[name]
        if name not in self.param.manifolds or coarser(c.dtype, before) == c.dtype:
            return
        if not self._is_unfilled() and not hasattr(c, "device_mesh"):
            c.copy_(nearest_frame(c.detach()))

    def _is_unfilled(self) -> bool:
        # Values may also arrive by functional_call or by copying into each parameter.
        values = self._values()
        stale = self._emptied and any(c._version == v for c, v in zip(values, self._emptied, strict=True))
        return bool(stale) or any([c.is_meta for c in values])

    def _check_filled(self) -> None:
        if self._is_unfilled():
            raise UnfilledError(
                f"{self.param.title} needs filled coordinates, got a weight that was moved to or from the meta "
                "device or through to_empty; call load_state_dict or sk.reset_ first."
            )


def _describe_map(param: OrthogonalParam) -> dict[str, Any]:
    """Name in the registry, class and version of a map and of those inside it."""
    cls = type(param)
    return {
        "name": registry.parametrizations.name_of(cls),
        "class": f"{cls.__module__}:{cls.__qualname__}",
        "version": param.version,
        "inner": [_describe_map(child) for child in param.children() if isinstance(child, OrthogonalParam)],
    }


def _is_same_map(theirs: Any, ours: dict[str, Any]) -> bool:
    """Whether two descriptions mean one map: classes may move as long as the registered name stays, and conversely."""
    if not isinstance(theirs, dict) or theirs.get("version") != ours["version"]:
        return False
    named = ours["name"] is not None and theirs.get("name") == ours["name"]
    inner = theirs.get("inner", [])
    return (
        (named or theirs.get("class") == ours["class"])
        and len(inner) == len(ours["inner"])
        and all(_is_same_map(a, b) for a, b in zip(inner, ours["inner"], strict=True))
    )


def _in_words(value: Any) -> str:
    """A map as "householder, version 1", anything else as Python writes it."""
    if not (isinstance(value, dict) and "class" in value):
        return repr(value)
    own = f"{value.get('name') or value['class']}, version {value.get('version')}"
    inner = [_in_words(each) for each in value.get("inner", [])]
    return f"{own} ({'; '.join(inner)})" if inner else own


def _read_description(state: Any, weight: str) -> dict[str, Any]:
    try:
        return dict(json.loads(bytes(state.tolist()).decode()))
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{weight} needs a checkpoint that names its map, got an unreadable entry.") from error


def _check_entry(state_dict: dict[str, Any], key: str, what: str, ours: Tensor) -> Tensor:
    value = state_dict.get(key)
    if not isinstance(value, Tensor):
        raise CheckpointError(f"{what} needs a tensor under the key {key}, got {type(value).__name__}.")
    if tuple(value.shape) != tuple(ours.shape):
        raise CheckpointError(f"{what} needs shape {tuple(ours.shape)}, got {tuple(value.shape)}.")
    single, double = (torch.complex64, torch.complex128) if ours.is_complex() else (torch.float32, torch.float64)
    if (ours.is_floating_point() or ours.is_complex()) and value.dtype not in (single, double):
        raise CheckpointError(f"{what} needs {single} or {double}, got a checkpoint cast to {value.dtype}.")
    local = value.to_local() if hasattr(value, "to_local") else value  # type: ignore[operator]
    if not local.is_meta and not torch.isfinite(local).all():
        raise NonFiniteError(f"{what} needs finite coordinates, got a checkpoint with NaN or infinity.")
    return value


def _check_frame(value: Tensor, what: str) -> None:
    whole = getattr(value, "full_tensor", lambda: value)()
    if whole.is_meta:
        return
    error, permitted = orthogonality_error(whole).max().item(), frame_tolerance(whole.shape[-1], whole.dtype)
    if not error <= permitted:
        raise CheckpointError(
            f"{what} needs orthonormal columns, ||W^H W - I||_F <= {permitted:.2g}, got a checkpoint with {error:.2g}; "
            "sk.functional.nearest_frame gives the nearest, to be assigned with sk.assign_."
        )
