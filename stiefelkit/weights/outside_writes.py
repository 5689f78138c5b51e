"""Frames and charts that somebody else has written to, as averages of weights do: noticed, and projected or refused."""

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from stiefelkit._torch import held_buffers, is_transformed, unwrapped, write_count
from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.errors import NotAFrameError, OptionError, RankError, warn_caller
from stiefelkit.functional import nearest_frame
from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.metrics import frame_tolerance, orthogonality_error, rounding_limit
from stiefelkit.tensors import coarser, is_sharded, working_dtype
from stiefelkit.weights.optimizer_hooks import is_left_between_landings, was_moved

_PROJECTED_FROM = 32  # rounding limits from which a frame is projected: what optimizers leave in precision "fast" is 30
_SAMPLE = 1024  # entries of a frame that are added up to see whether it is still the one that was looked at


Held = dict[str, Tensor | None] | dict[str, Tensor] | dict[str, nn.Parameter]


class TensorSlot(NamedTuple):
    """The dictionary of a module that holds a tensor, and its key; for a frame whether it is stored as [Re, Im]."""

    held: "Held"
    key: str
    packed: bool | None = None


class Read(weakref.ref[Tensor]):
    """A weight that was read, until it is gone: an alias, which has its count of writes, that count, and the name."""

    __slots__ = ("alias", "count", "name")


reads: dict[int, Read] = {}
"""The weights that were read and are still there, by id: as members of a set, weak references would compare tensors."""


def look_back(read: Read) -> None:
    """Forgets a weight that was read and is gone; warns if it was written to, which changes no later read."""
    del reads[id(read)]
    if write_count(read.alias) != read.count:
        warn_of_write(read.name)


def warn_of_write(name: str) -> None:
    """Warns that a tensor was written to that was read as a weight."""
    warn_caller(
        f"{name} is computed at each read, got a write into what one read returned, which no other read sees; assign "
        "a frame (sk.assign_) or draw one (sk.reset_)."
    )


class _Note:
    """A tensor as it was: where it is held, how often it had been written to, and something of its values.

    The count is None in inference mode. Integers are kept as they are, of frames a sum of some entries.
    """

    total: float | None = None

    def __init__(self, slot: TensorSlot, t: Tensor):
        is_integer = slot.packed is None and not (t.is_floating_point() or t.is_complex())
        self.slot, self.id = slot, id(t)
        self.count: int | None = None if t.is_inference() else write_count(t)
        self.integers = t.detach().clone() if is_integer else None

    def may_be_wrong(self, t: Tensor) -> bool:
        """Returns whether the values are others than when last asked, and may be no frames, or other integers.

        A mean of frames has W^H W <= I. The norm of its defect is at most the trace, which is |p - ||W||_F^2|.
        """
        packed = self.slot.packed
        if self.integers is not None:
            return t.dtype != self.integers.dtype or not torch.equal(t, self.integers.to(t.device))
        if packed is None:
            return False
        n, p = t.shape[-3:-1] if packed else t.shape[-2:]
        stride = max(1, t.numel() // _SAMPLE)
        while math.gcd(stride, 2 * p if packed else p) > 1:  # so that entries of every column are among the sample
            stride += 1
        total = t.detach().reshape(-1)[::stride].sum().item()
        if total == self.total:
            return False
        self.total, t = total, t.detach()
        w = torch.view_as_real(t) if t.is_complex() else t
        columns = t.numel() / (2 * n if packed else n)
        trace = torch.linalg.vector_norm(w, dtype=torch.float64).square().item() - columns
        return abs(trace) > frame_tolerance(p, t.dtype)

    def restore_(self, t: Tensor) -> None:
        """Takes back integers that a mean with themselves has rounded down: a k + (1 - a) k may be k - 1, from 2 on."""
        if self.integers is None or t.dtype != self.integers.dtype:
            return
        kept = self.integers.to(t.device)
        if not torch.equal(t, kept) and bool(((t == kept) | ((t == kept - 1) & (kept > 1))).all()):
            with torch.inference_mode(t.is_inference()), torch.no_grad():
                t.copy_(kept)


class Notes:
    """Remembers frames and chart of a map, how often each had been written to, and something of their values.

    Writes through `.data` are not counted. No tensor is held, which would keep it in memory, nor a weak reference to
    it, with which torch cannot swap tensors. `held` is the dictionary of coordinates, `keys` has the key of each name.
    """

    were_trained = False  # true once an optimizer of frames has moved any of them
    strange = 0
    """The number of reads in training that found a frame off its manifold, before an optimizer of frames moved it."""

    def __init__(self, param: OrthogonalParam, held: Held, keys: Mapping[str, str]):
        self._noted: list[_Note] = []
        self._dtypes: list[tuple[str, int, torch.dtype]] = []
        self.held, self._keys = held, keys
        self._all = chart_slots(param)
        self.manifolds = param.manifolds
        for name in self.manifolds:
            self._all.append(TensorSlot(held, keys[name], False))
        self.places: tuple[list[Held], list[str]] = ([], [])  # the dictionaries that hold what is noted, and its keys
        self.are_of_frames = any([slot.packed is not None for slot in self._all])
        """True if any of them must stay a frame."""

    def take(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Notes all as it is now, and the dtype that each coordinate should have; forgets what was before."""
        self._noted, self.places, self._dtypes = [], ([], []), []
        for name, dtype in dtypes.items():
            c = self.held.get(self._keys[name])
            if c is not None:
                self._dtypes.append((self._keys[name], id(c), dtype))
        for slot in self._all:
            held, key, _ = slot
            t = held.get(key)
            if t is not None and not (t.is_meta or is_sharded(t)):
                self._noted.append(_Note(slot, t))
                self.places[0].append(held)
                self.places[1].append(key)

    def were_cast(self) -> bool:
        """Returns whether `.data` is coarser, or complex, as torch's vectors of parameters are where one of them is."""
        for key, noted, dtype in self._dtypes:
            c = self.held.get(key)
            if c is not None and c.dtype is not dtype and id(c) == noted and coarser(c.dtype, dtype) is c.dtype:
                return True
        return False

    def _present(self) -> list[tuple[_Note, Tensor]]:
        # Others in their place, as functional_call puts there, do not count.
        pairs = [(note, note.slot.held.get(note.slot.key)) for note in self._noted]
        return [(note, t) for note, t in pairs if t is not None and id(t) == note.id]

    def written(self) -> list[Tensor]:
        """Returns those that were written to since, but for those that an optimizer moved, which are noted anew."""
        strange = []
        for note, t in self._present():
            if note.count is None or write_count(t) == note.count:
                continue
            if was_moved(t):
                note.count, self.were_trained = write_count(t), True
            else:
                strange.append(t)
        return strange

    def may_be_wrong(self) -> bool:
        """Returns whether the values of one may be, though no count of writes says so; by few reads, on a CPU only."""
        return any([note.may_be_wrong(t) for note, t in self._present() if may_sync_host(t)])

    def warn_of_strange(self, weight: str) -> None:
        """Warns at the third frame off its manifold: once may be a draw, each time is an optimizer without hooks."""
        self.strange += 1
        if self.strange == 3:
            warn_caller(
                f"{weight} needs an optimizer that moves frames, got values that are none three times in training, and "
                "takes their nearest; unless an average writes them, use sk.optim.MultiplicativeCayley("
                "sk.optim.parameter_groups(model, lr=...)) by itself, or a flat map, such as cayley."
            )

    @torch.no_grad()
    def project_(
        self,
        param: OrthogonalParam,
        coordinates: Mapping[str, Tensor],
        written: Sequence[Tensor],
        weight: str,
        by_value: bool,
    ) -> bool:
        """Takes frames that are frames no more to their nearest, and integers that were rounded to what they were.

        Returns whether a frame was one that trains, and that no optimizer of frames has moved yet.

        Those that are known to have been written to are projected from 32 rounding limits on, others, which optimizers
        and checkpoints may have left as they are, from where a checkpoint of them would be refused. `by_value`, they
        are projected between landings, too.
        """
        chart = param.chart
        # A chart that is one was loaded, perhaps over memory that nothing had filled when it was noted.
        is_wrong = not any(t.is_meta for t in chart.values()) and param.check_chart(chart) is not None
        if is_wrong:
            for note, t in self._present():
                note.restore_(t)
        keys, is_strange = {id(t) for t in written}, False
        for t, packed in frame_tensors(param, coordinates):
            lands_later = not (written or by_value) and is_left_between_landings(t)
            if t.is_meta or is_sharded(t) or lands_later:
                continue
            w = _as_frames(t, packed)
            p, dtype = w.shape[-1], w.dtype
            own = _PROJECTED_FROM * rounding_limit(p, dtype) + torch.finfo(dtype).eps
            if orthogonality_error(w).max().item() > (own if id(t) in keys else frame_tolerance(p, dtype)):
                is_strange |= t.requires_grad and not self.were_trained
                try:
                    to_nearest_(t, packed)
                except RankError as cause:
                    raise RankError(
                        f"{weight} needs linearly independent columns to be taken to its nearest frame, got others, "
                        "written from outside; sk.reset_ draws a frame."
                    ) from cause
        reason = param.check_chart(chart) if is_wrong else None
        if reason is not None:
            raise NotAFrameError(
                f"{weight} needs {reason}, got others, written from outside; average weights by sk.optim.multi_avg_fn."
            )
        return is_strange


def check_given(param: OrthogonalParam, coordinates: Mapping[str, Tensor], weight: str) -> None:
    """Raises an error for what somebody else has put in the place of coordinates for a call, which is never projected.

    On devices other than the CPU no frame is read.
    """
    for name in param.manifolds:
        c = coordinates[name]
        if not (c.grad_fn is not None or is_transformed()) or not may_sync_host(c):
            continue
        error = unwrapped(orthogonality_error(c.detach())).max().item()
        if error > frame_tolerance(c.shape[-1], c.dtype):
            raise NotAFrameError(
                f"{weight} needs a frame in {name}, got a tensor {error:.2g} away from one, as a plain gradient "
                "step makes it; sk.manifolds.Stiefel().retr and optimizers given sk.optim.frames step along the "
                "manifold, a flat map, such as cayley, takes any step."
            )
    for part in param.modules():
        for key in part.frame_buffers if isinstance(part, OrthogonalParam) else ():
            frame = getattr(part, key, None)  # some tools put it elsewhere than among buffers
            if frame is not None and unwrapped(frame).requires_grad:
                raise OptionError(
                    f"{weight} needs a chart that does not train, got {key} with requires_grad, which would leave its "
                    "manifold; hand over buffers detached, and only parameters to an optimizer."
                )


def to_nearest_(t: Tensor, packed: bool) -> None:
    """Takes frames, [Re, Im] last if they are `packed`, to the nearest; raises RankError if there are none."""
    w = _as_frames(t, packed)
    nearest = nearest_frame(w.to(working_dtype(w.dtype)))
    with torch.inference_mode(t.is_inference()), torch.no_grad():
        t.copy_(torch.view_as_real(nearest) if packed else nearest)


def _as_frames(t: Tensor, packed: bool) -> Tensor:
    t = t.detach()
    return torch.view_as_complex(t.contiguous()) if packed else t  # channels_last takes [Re, Im] apart


def chart_slots(param: OrthogonalParam) -> list[TensorSlot]:
    """Returns where the chart of a map is held, and which parts of it must stay frames."""
    slots: list[TensorSlot] = []
    for part in param.modules():
        frames = part.frame_buffers if isinstance(part, OrthogonalParam) else ()
        for key, t in held_buffers(part).items():
            if t is not None:
                packed = part.dtype.is_complex if key in frames else None
                slots.append(TensorSlot(held_buffers(part), key, packed))  # type: ignore[union-attr]
    return slots


def frame_tensors(param: OrthogonalParam, coordinates: Mapping[str, Tensor]) -> list[tuple[Tensor, bool]]:
    """Returns coordinates and buffers that must stay frames, and whether each is stored as [Re, Im]."""
    bound = param.manifolds
    found = [(c, False) for name, c in coordinates.items() if name in bound] if bound else []
    for held, key, packed in chart_slots(param):
        if packed is not None and (t := held.get(key)) is not None:
            found.append((t, packed))
    return found
