"""What the optimizers of frames share: groups, checks, batches, the remainder, the polish, and sharded frames."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.errors import NonFiniteError, NotAFrameError, OptimizerError, OptionError, ShapeError, did_you_mean
from stiefelkit.functional import Tangent, norms_of
from stiefelkit.functional._polish import rounded_defect
from stiefelkit.functional._product import FullPrecision
from stiefelkit.guard import MANIFOLDS, frames
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.optim.bucket import Bucket, buckets
from stiefelkit.param import FRAME_TOLERANCE

__all__ = ["FrameOptimizer"]

PRECISIONS = ("exact", "fast")
_CADENCE, _FAST_CADENCE = 0.15, 1.0
"""Length of the increments since the last polish, over sqrt(p), that brings the next one."""
_URGENT = 4 / 3
"""Share of that from which the polish does not wait for the next increment."""
_ROUNDS, _FAST_ROUNDS = 8, 16
"""Steps after which it comes at the latest, if there is no remainder."""
_LOST = 0.1
"""||W^H W - I||_F over sqrt(p) from which a frame has been changed by something else than its optimizer."""


class FrameOptimizer(torch.optim.Optimizer):
    """Moves the frames in groups that name a manifold along it; a torch optimizer moves all other groups.

    A step adds an increment to W. In precision "exact" a float32 or complex64 frame has a remainder `lo` of the same
    dtype in the optimizer's state, and W + lo is what moves; increments are rounded as they are small. What their
    rounding leaves of W^H W - I is worked out in float64 whenever their lengths add up to 0.15 sqrt(p) and is taken
    away with the next increment. So ||W^H W - I||_F stays within 2 rounding limits for ever. "fast" has no remainder,
    does this at 1.0 sqrt(p), after 16 steps at most, and stays within 30 limits. float64 and complex128 frames have no
    remainder; "exact" polishes them every 8 steps at least, which keeps them within 20 limits.

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
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group after its manifold, its settings and its frames were checked.

        Raises:
            OptionError: a setting is out of range.
            ShapeError: a parameter of a manifold is no tall or square matrix.
            NotAFrameError: a parameter of a manifold is no frame.
            OptimizerError: a group without a manifold holds a frame of some module, or one with gradient="reference" a
                frame whose gradient cannot be halved.
        """
        if isinstance(param_group, dict) and not isinstance(param_group.get("params"), Tensor | set):
            param_group = {**param_group, "params": list(param_group["params"])}
        if isinstance(param_group, dict):
            full = {**self.defaults, **param_group}
            self._check_group(full)
            given = full["params"] if isinstance(full["params"], list) else [full["params"]]
            members = [p[1] if isinstance(p, tuple) else p for p in given]
            self._check_members(full, members)
            self._check_readers(full, members)
        super().add_param_group(param_group)
        self._ask_readers(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also what loads a state dict, whose groups may come from a plain optimizer."""
        super().__setstate__(state)
        known = frames()
        for group in self.param_groups:
            for key, value in {**self.defaults, "manifold": None, "precision": "exact"}.items():
                group.setdefault(key, value)
            self._check_members(group, group["params"])
            # A copied optimizer may come before the module that holds its frames.
            self._check_readers(group, [p for p in group["params"] if id(p) in known])
            self._ask_readers(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Does one step.

        Args:
            closure: computes the loss and the gradients again; called once.

        Returns:
            What the closure returns.

        Raises:
            NonFiniteError: the gradient of a frame holds NaN or infinity; nothing has been changed.
            NotAFrameError: a frame was changed from outside and is none any more.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found = [(group, bucket) for group in self._of_frames() for bucket in buckets(group["params"], self.state)]
        if len(found) > 1:  # a single one is checked on the way
            self._check_gradients(found)
        for group, bucket in found:
            with FullPrecision(bucket.params[0].device):
                self._move(group, bucket)
        self._step_plain()
        return loss

    @abstractmethod
    def _increment(
        self, group: dict[str, Any], bucket: Bucket, w: Tensor, g: Tensor, defect: Tensor | None
    ) -> tuple[Tensor, float]:
        """What is added to W, and its length, the largest of the batch.

        Args:
            group: the settings.
            bucket: where the state is.
            w: frames, shape (*, n, p).
            g: gradients, of the objective that is minimised.
            defect: to be taken away as well, if given.
        """

    def _check_direction(self, direction: Tangent, bucket: Bucket) -> None:
        """Raises NonFiniteError unless a direction is finite; to be called before any state is written."""
        if not math.isfinite(sum(direction.rotation_norms) + sum(direction.rest_norms)):
            raise NonFiniteError(self._where([bucket]))

    def _check_group(self, group: dict[str, Any]) -> None:
        """Raises OptionError unless the settings are in range."""
        name = type(self).__name__
        if not float(group["lr"]) >= 0:
            raise OptionError(f"{name} needs lr >= 0, got {group['lr']!r}.")
        if group["manifold"] is None:
            return
        if group["manifold"] not in MANIFOLDS:
            raise OptionError(
                f"{name} knows no manifold {group['manifold']!r}{did_you_mean(group['manifold'], MANIFOLDS)}"
            )
        if group["precision"] not in PRECISIONS:
            raise OptionError(f"{name} needs precision in {PRECISIONS}, got {group['precision']!r}.")
        if group["weight_decay"]:
            raise OptionError(
                f"{name} needs weight_decay=0 for frames, which cannot shrink, got {group['weight_decay']!r}; "
                "sk.optim.parameter_groups(model, weight_decay=...) gives it to the other parameters only."
            )

    def _check_members(self, group: dict[str, Any], params: list[Any]) -> None:
        """Raises unless the frames of a group are frames, and a group without a manifold holds none."""
        name = type(self).__name__
        if group.get("manifold") is None:
            known = frames()
            for p in params:
                if id(p) in known:
                    raise OptimizerError(
                        f"{name} needs groups that name the manifold of frames, got {known[id(p)].carrier.weight} in "
                        "one without; give it sk.optim.parameter_groups(model, lr=...)."
                    )
            return
        for p in params:
            if not isinstance(p, Tensor) or p.is_meta or hasattr(p, "full_tensor"):
                continue
            if p.dim() < 2 or p.shape[-2] < p.shape[-1] or p.numel() == 0:
                raise ShapeError(f"{name} needs frames of shape (*, n, p) with n >= p, got {tuple(p.shape)}.")
            if p.dtype not in (torch.float32, torch.float64, torch.complex64, torch.complex128):
                raise OptionError(f"{name} needs frames in float32 or better, got {p.dtype}.")
            permitted = FRAME_TOLERANCE * rounding_limit(p.shape[-1], p.dtype)
            error = orthogonality_error(p).max().item()
            if not error <= permitted:
                raise NotAFrameError(
                    f"{name} needs frames, ||W^H W - I||_F <= {permitted:.2g}, got {error:.2g}; "
                    "sk.functional.nearest_frame gives the nearest."
                )

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
        """Tells what reads the frames which gradient to give."""
        if group["manifold"] is None:
            return
        known = frames()
        for p in group["params"]:
            if id(p) in known:
                known[id(p)].carrier.gradient = group.get("gradient", "exact")

    def _of_frames(self) -> list[dict[str, Any]]:
        return [group for group in self.param_groups if group["manifold"] is not None]

    def _check_gradients(self, found: list[tuple[dict[str, Any], Bucket]]) -> None:
        for device in {bucket.params[0].device for _, bucket in found}:
            here = [(g, b) for g, b in found if b.params[0].device == device]
            norms = [norm for _, bucket in here for norm in bucket.gradient_norms()]
            total = norms[0] if len(norms) == 1 else torch.stack(norms).sum()
            if not math.isfinite(total.item()):
                raise NonFiniteError(self._where([bucket for _, bucket in here]))

    def _where(self, found: list[Bucket]) -> str:
        known, name = frames(), type(self).__name__
        bad = [
            known[id(p)].carrier.weight if id(p) in known else f"a frame of shape {tuple(p.shape)}"
            for bucket in found
            for p, grad in zip(bucket.params, bucket.local_gradients(), strict=True)
            if not torch.isfinite(grad).all()
        ]
        where = ", ".join(bad) or "a frame on another rank"
        return f"{name} needs finite gradients, got NaN or infinity in that of {where}; no parameter was changed."

    def _move(self, group: dict[str, Any], bucket: Bucket) -> None:
        w, g = bucket.frames(), bucket.gradients()
        if group["maximize"]:
            g = -g
        exact = group["precision"] == "exact"
        with_remainder = exact and w.dtype != working_dtype(w.dtype)
        if with_remainder:
            bucket.add_remainders()
        if float(group["lr"]) == 0:
            # torch.distributed.checkpoint makes such a step, for the state; it must not so much as polish.
            self._increment(group, bucket, w, g, None)
            bucket.moved = bucket.moved
            return
        root = math.sqrt(w.shape[-1])
        cadence, rounds = (_CADENCE, _ROUNDS) if exact else (_FAST_CADENCE, _FAST_ROUNDS)
        defect, moved = None, bucket.moved
        if moved >= cadence * root:
            defect, norm = self._defect(bucket, w)
            if not norm <= _LOST * root:
                raise NotAFrameError(
                    f"{type(self).__name__} needs frames, got one with ||W^H W - I||_F = {norm:.2g}: it was changed "
                    "from outside; assign a frame with sk.assign_."
                )
            moved = self._left(bucket, norm)
        increment, length = self._increment(group, bucket, w, g, defect)
        bucket.add(increment)
        # Without a remainder W is rounded at every step, however small.
        bucket.moved = moved + max(length, 0.0 if with_remainder else cadence * root / rounds)
        self._settle(group, bucket, length)

    def _settle(self, group: dict[str, Any], bucket: Bucket, length: float) -> None:
        """What is to be done after an increment of some length: what cannot wait for the next is polished at once."""
        cadence = _CADENCE if group["precision"] == "exact" else _FAST_CADENCE
        if bucket.moved > _URGENT * cadence * math.sqrt(bucket.params[0].shape[-1]):
            self._polish(bucket)

    def _polish(self, bucket: Bucket) -> float:
        """Takes W^H W - I away, and returns how large it was."""
        w = bucket.frames()
        defect, norm = self._defect(bucket, w)
        bucket.add((w @ defect).mul_(-0.5))
        bucket.moved = self._left(bucket, norm)
        return norm

    def _defect(self, bucket: Bucket, w: Tensor) -> tuple[Tensor, float]:
        defect = rounded_defect(w, bucket.remainders())
        return defect, max(norms_of(defect)[0])

    def _left(self, bucket: Bucket, norm: float) -> float:
        """What `moved` begins with after a polish: 3/4 of the square of a defect remains."""
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
