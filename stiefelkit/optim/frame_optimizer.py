"""What the optimizers of frames share: groups, checks, batches, the remainder, the polish, and sharded frames."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit._torch import write_count
from stiefelkit.errors import CheckpointError, NonFiniteError, NotAFrameError, OptimizerError
from stiefelkit.functional import Tangent, cayley_increment, nearest_frame, norms_of
from stiefelkit.functional._polish import rounded_defect
from stiefelkit.functional._product import FullPrecision
from stiefelkit.guard import frames, watch_frame
from stiefelkit.metrics import defect as defect_of
from stiefelkit.metrics import rounding_limit, working_dtype
from stiefelkit.optim.bucket import Bucket, buckets
from stiefelkit.optim.checks import check_common, check_members, check_rate, check_spelling, check_torch_settings
from stiefelkit.optim.rounding import HOPELESS, due, growth, left_behind, urgent, wear, wear_of_rounding
from stiefelkit.optim.states import check_entries, check_states
from stiefelkit.optim.steps import as_factor, length_of
from stiefelkit.sharding import is_sharded

__all__ = ["FrameOptimizer"]

PRECISIONS = ("exact", "fast")
_LONGEST = 2.0
"""Length of an increment over sqrt(p) from which it is worked out in float64."""
_TURNS = 3
"""Polishes that take any defect which is not lost to the rounding limit."""
_LOST = 0.1
"""||W^H W - I||_F over sqrt(p) from which a frame has been changed by something else than its optimizer."""


class FrameOptimizer(torch.optim.Optimizer):
    """Moves the frames in groups that name a manifold along it; a torch optimizer moves all other groups.

    A step adds an increment to W. In precision "exact" a float32 or complex64 frame has a remainder `lo` of the same
    dtype in the optimizer's state, and W + lo is what moves; increments are rounded as they are small. What their
    rounding leaves of W^H W - I is worked out in float64 whenever an error model (`stiefelkit.optim.rounding`) says
    that it may have come to 0.6 rounding limits, and is taken away with the next increment. So ||W^H W - I||_F stays
    within 2 rounding limits for ever. "fast" has no remainder, does this at 5 limits, after 16 steps at most, and stays
    within 30. float64 and complex128 frames have no remainder; "exact" polishes them every 8 steps at least, and both
    keep them within 20 limits. To each of these bounds comes one eps below 16 columns.

    Frames of one shape, dtype and group are moved as one batch. Sharded frames (FSDP2) are gathered, moved on each
    rank and scattered. A gradient with NaN or infinity raises before anything is written.

    A subclass names the torch optimizer of the plain groups and says how a frame moves.

    Args:
        params: groups, as `sk.optim.parameter_groups` gives them: those of frames have "manifold".
        own: defaults of the groups, beside those of the plain optimizer.
    """

    moves_frames: ClassVar[bool] = True
    """Tells the guard that frames are in good hands."""
    plain: ClassVar[type[torch.optim.Optimizer]]
    """Moves the groups without a manifold."""

    def __init__(self, params: Iterable[Any], own: dict[str, Any]):
        defaults = {**self.plain([torch.zeros(1)]).defaults, "manifold": None, "precision": "exact", **own}  # type: ignore[call-arg]
        self._versions = {}
        super().__init__(params, defaults)
        if not self._of_frames():
            warnings.warn(
                f"{type(self).__name__} holds no frame and moves everything freely, as torch.optim."
                f"{self.plain.__name__} does; sk.optim.frames([w]) makes a group of frames, "
                "sk.optim.parameter_groups(model, lr=...) those of a model.",
                stacklevel=3,
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after its manifold, its settings and its frames were checked.

        Raises:
            OptionError: a setting is out of range, or nearly spelled like another.
            ShapeError: a parameter of a manifold is no tall or square matrix.
            NotAFrameError: a parameter of a manifold is no frame.
            OptimizerError: a group without a manifold holds a frame of some module, or one with gradient="reference" a
                frame whose gradient cannot be halved.
        """
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), Tensor | set):
            param_group = {**param_group, "params": list(param_group["params"])}
        if isinstance(param_group, dict):
            full = {**self.defaults, **param_group}
            check_spelling(type(self).__name__, set(param_group), [*self.defaults, "params", "name", "param_names"])
            self._check_group(full)
            given = full["params"] if isinstance(full["params"], list) else [full["params"]]
            members = [p[1] if isinstance(p, tuple) else p for p in given]
            check_members(type(self).__name__, full["manifold"], members)
            self._check_readers(full, members)
        super().add_param_group(param_group)
        self._ask_readers(self.param_groups[-1])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, after all of it was checked; what is refused changes nothing.

        Raises:
            CheckpointError: a group names another manifold, or none, as that of another kind of optimizer; or a state
                is missing, or of another type, shape or field than this optimizer gives it.
            NonFiniteError: a state holds NaN or infinity.
            OptionError: a setting is out of range.
        """
        if not isinstance(state_dict, Mapping):
            raise CheckpointError(f"{type(self).__name__} needs a state dict, got {type(state_dict).__name__}.")
        # As the last of the hooks, since those before it may mend what they are given.
        check = self.register_load_state_dict_pre_hook(lambda _, given: self._check_state_dict(given))
        try:
            super().load_state_dict(state_dict)
        finally:
            check.remove()

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises what `load_state_dict` lists; writes nothing."""
        check_states(self, state_dict)
        for i, (own, theirs) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=True)):
            if theirs.get("manifold") != own["manifold"]:
                raise CheckpointError(
                    f"{type(self).__name__} needs a state dict whose group {i} has the manifold {own['manifold']!r}, "
                    f"got {theirs.get('manifold')!r}."
                )
            full = {**self.defaults, **own, **theirs}
            self._check_group(full)
            check_entries(self, i, full, theirs["params"], state_dict["state"])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what copies, and what loads a state dict; what is refused changes nothing."""
        known, defaults = frames(), state["defaults"] if "defaults" in state else self.defaults
        for group in state["param_groups"]:
            for key, value in defaults.items():
                group.setdefault(key, value)
            check_members(type(self).__name__, group["manifold"], group["params"])
            # A copied optimizer may come before the module that holds its frames.
            self._check_readers(group, [p for p in group["params"] if id(p) in known])
        super().__setstate__(state)
        self._versions: dict[int, int] = {}
        for group in self.param_groups:
            self._ask_readers(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Does one step.

        Args:
            closure: computes the loss and the gradients again; called once.

        Returns:
            What the closure returns.

        Raises:
            OptionError: a learning rate is negative or not finite.
            NonFiniteError: the gradient of a frame holds NaN or infinity, or its norm overflows; nothing is changed. Or
                the step is so long that nothing finite comes of it; then that frame is not changed.
            NotAFrameError: a frame was changed from outside and is none any more.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [(group, bucket) for group in self._of_frames() for bucket in buckets(group["params"], self.state)]
        for group in self.param_groups:
            check_rate(type(self).__name__, group["lr"])
        if len(found) > 1:  # a single one is checked on the way
            self._check_gradients([bucket for _, bucket in found])
        for group, bucket in found:
            with FullPrecision(bucket.params[0].device):
                self._move(group, bucket)
        self._step_plain()
        return loss

    @abstractmethod
    def _direction(self, group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor) -> tuple[Tangent, list[float]]:
        """Where frames go: a tangent vector, and how far against it each matrix of the batch; stages what it keeps.

        Args:
            group: the settings.
            bucket: where the state is.
            w: frames, shape (*, n, p).
            g: gradients, of the objective that is minimised.
        """

    def _increment(
        self, group: dict[str, Any], w: Tensor, direction: Tangent, steps: list[float], defect: Tensor | None
    ) -> tuple[Tensor, float]:
        """What is added to W, and its length, the largest of the batch.

        Args:
            group: the settings.
            w: frames, shape (*, n, p).
            direction: as `_direction` gives it.
            steps: as `_direction` gives them.
            defect: to be taken away as well, if given.
        """
        increment = cayley_increment(w, direction, as_factor(steps, w), defect=defect, tolerance=group.get("tolerance"))
        return increment, length_of(direction, steps)

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises OptionError unless the settings are in range."""
        check_common(type(self).__name__, group, PRECISIONS)
        if group["manifold"] is None:
            check_torch_settings(type(self).__name__, self.plain, group)

    def _check_readers(self, group: dict[str, Any], params: list[Any]) -> None:
        """Raises unless what reads the frames can give the gradient that the group asks for."""
        if group["manifold"] is None or group.get("gradient", "exact") == "exact":
            return
        known = frames()
        for p in params:
            carrier = known[id(p)].carrier if id(p) in known else None
            can = carrier is not None and group["gradient"] in carrier.gradients and len(carrier.coordinates) == 1
            if not (can and p.is_complex()):
                got = "one that no module holds" if carrier is None else f"that of {carrier.weight} ({p.dtype})"
                raise OptimizerError(
                    f'{type(self).__name__} with gradient="{group["gradient"]}" needs complex frames that are the '
                    f'recurrent weight of an sk.nn.OrthogonalRNN or OrthogonalRNNCell, got {got}; use gradient="exact".'
                )

    def _ask_readers(self, group: dict[str, Any]) -> None:
        """Tells what reads the frames which gradient to give; those that nobody reads are watched from now on."""
        if group["manifold"] is None:
            return
        known = frames()
        for p in group["params"]:
            if id(p) not in known:
                watch_frame(p, group["manifold"])
            elif known[id(p)].carrier is not None:
                known[id(p)].carrier.gradient = group.get("gradient", "exact")

    def _of_frames(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["manifold"] is not None]

    def _check_gradients(self, found: list[Bucket]) -> None:
        for device in {bucket.params[0].device for bucket in found}:
            here = [bucket for bucket in found if bucket.params[0].device == device]
            shares = torch.stack([share for bucket in here for share in bucket.shares_of_overflow()])
            if not (shares.max().item() < 1 and math.isfinite(shares.sum().item())):
                raise NonFiniteError(self._where(here))

    def _where(self, found: list[Bucket]) -> str:
        known = frames()
        bad, overflows, sharded = [], [], False
        for bucket in found:
            for p, grad, share in zip(
                bucket.params, bucket.local_gradients(), bucket.shares_of_overflow(), strict=True
            ):
                carrier = known[id(p)].carrier if id(p) in known else None
                name = f"a frame of shape {tuple(p.shape)}" if carrier is None else carrier.weight
                sharded = sharded or is_sharded(p)
                if not torch.isfinite(grad).all():
                    bad.append(name)
                elif not share < 1:
                    overflows.append(name)
        start = f"{type(self).__name__} needs finite gradients, got"
        if bad or (sharded and not overflows):
            where = ", ".join(bad) or "a frame on another rank"
            return f"{start} NaN or infinity in that of {where}; nothing was changed."
        return (
            f"{start} one so large that its norm or its mean square overflows, of {', '.join(overflows) or 'a frame'}; "
            "nothing was changed."
        )

    def _move(self, group: dict[str, Any], bucket: Bucket) -> None:
        name = type(self).__name__
        w, g = bucket.frames(), bucket.gradients()
        if group["maximize"]:
            g = -g
        exact = group["precision"] == "exact"
        with_remainder = exact and w.dtype != working_dtype(w.dtype)
        if self._were_changed(bucket):
            bucket.forget()
        bucket.refresh(with_remainder)
        try:
            direction, steps = self._direction(group, bucket, w, g)
            finite = math.isfinite(sum(direction.rotation_norms) + sum(direction.rest_norms) + sum(steps))
        except OverflowError:
            finite = False
        if not finite:
            raise NonFiniteError(self._where([bucket]))
        if float(group["lr"]) == 0:
            # torch.distributed.checkpoint makes such a step, for the state; it must not so much as polish.
            bucket.commit()
            bucket.wear = bucket.wear
            return
        root = math.sqrt(w.shape[-1])
        worn = wear(direction, steps)
        if length_of(direction, steps) > _LONGEST * root or worn > HOPELESS:
            self._leap(bucket, w, direction, steps)
            self._remember(bucket)
            return
        defect, before = None, bucket.wear * growth(direction, steps)
        if before >= due(w, group["precision"]):
            defect, norm = self._defect(bucket, w)
            if not norm <= _LOST * root:
                raise NotAFrameError(
                    f"{name} needs frames, got one with ||W^H W - I||_F = {norm:.2g}: it was changed from outside; "
                    "assign a frame with sk.assign_."
                )
            limit = rounding_limit(w.shape[-1], w.dtype)
            before = self._left(bucket, norm) + norm / limit * left_behind(direction, steps)
        increment, length = self._increment(group, w, direction, steps, defect)
        bucket.commit()
        bucket.add(increment)
        least = 0.0 if with_remainder else wear_of_rounding(w, group["precision"])
        bucket.wear = before + max(worn, least)
        self._settle(group, bucket, length)
        self._remember(bucket)

    def _leap(self, bucket: Bucket, w: Tensor, direction: Tangent, steps: list[float]) -> None:
        """A step so long that it is no small increment: in float64, to the nearest frame."""
        wide, lo = working_dtype(w.dtype), bucket.remainders()
        exact = nearest_frame(w.to(wide) if lo is None else w.to(wide) + lo)
        rest = None if direction.rest is None else direction.rest.to(wide)
        if rest is not None:
            rest = rest - exact @ (exact.mH @ rest)
        tangent = Tangent(direction.rotation.to(wide), rest, direction.rotation_norms, direction.rest_norms)
        moved = exact + cayley_increment(exact, tangent, as_factor(steps, exact))
        if not torch.isfinite(moved).all():
            raise NonFiniteError(
                f"{type(self).__name__} needs shorter steps, got one of length {length_of(direction, steps):.2g}, of "
                "which nothing finite comes; lower the learning rate. The frame was not changed."
            )
        nearest = nearest_frame(moved)
        bucket.commit()
        bucket.assign(nearest)
        bucket.wear = 0.0

    def _were_changed(self, bucket: Bucket) -> bool:
        """Whether a frame was written to by somebody else since the last step, as far as is known."""
        return any((now := write_count(p)) != self._versions.get(id(p), now) for p in bucket.params)

    def _remember(self, bucket: Bucket) -> None:
        # FSDP2 writes to the tensors of sharded parameters without changing their values.
        self._versions.update({id(p): write_count(p) for p in bucket.params if not is_sharded(p)})

    def _settle(self, group: dict[str, Any], bucket: Bucket, length: float) -> None:
        """What is to be done after an increment of some length: what cannot wait for the next is polished at once."""
        if bucket.wear > urgent(bucket.params[0], group["precision"]):
            for _ in range(_TURNS):
                self._polish(bucket)
                if bucket.wear == 0:
                    return

    def _polish(self, bucket: Bucket, coarse: bool = False) -> float:
        """Takes W^H W - I away, worked out in the dtype of W if coarse, and returns how large it was."""
        w = bucket.frames()
        defect, norm = self._defect(bucket, w, coarse)
        bucket.add((w @ defect).mul_(-0.5))
        bucket.wear = self._left(bucket, norm)
        return norm

    def _defect(self, bucket: Bucket, w: Tensor, coarse: bool = False) -> tuple[Tensor, float]:
        defect = defect_of(w) if coarse else rounded_defect(w, bucket.remainders())
        return defect, max(norms_of(defect)[0])

    def _left(self, bucket: Bucket, norm: float) -> float:
        """The wear after a polish: 3/4 of the square of a defect remains."""
        p = bucket.params[0]
        return 0.0 if norm * norm <= 0.3 * rounding_limit(p.shape[-1], p.dtype) else math.inf

    def _step_plain(self) -> None:
        rest = [group for group in self.param_groups if group["manifold"] is None]
        if not rest:
            return
        inner = self.__dict__.get("_inner")
        if inner is None:
            inner = self._inner = self.plain([torch.zeros(1)])  # type: ignore[call-arg]
        # Loading a state dict replaces both.
        inner.param_groups, inner.state = rest, self.state
        inner.step()
