"""Finds the tensors that must stay frames, and refuses optimizers that would take them off the manifold.

A coordinate list of such frames announces itself once, and so does who has a frame without a module. Nothing is stored
in the tensors, which FSDP2 and casts replace: which parameter is a frame is looked up when it matters, among the
coordinate lists and the tensors that are still alive. Only geoopt's parameters say themselves where they live.
"""

import sys
import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from stiefelkit._torch import write_count
from stiefelkit.errors import OptimizerError

__all__ = [
    "MANIFOLDS",
    "Frame",
    "coordinate_lists",
    "frames",
    "frames_alone",
    "is_left_between_landings",
    "manifold_of",
    "was_moved",
    "watch",
    "watch_frame",
    "watch_manifold",
]


MANIFOLDS = ("stiefel:canonical", "stiefel:euclidean")
"""The manifolds that optimizers know, each with its metric."""


class SupportsCoordinates(Protocol):
    """The part of `CoordinateList` that lower floors use."""

    weight: str

    @property
    def param(self) -> Any: ...

    @property
    def coordinates(self) -> dict[str, nn.Parameter]: ...


class Frame(NamedTuple):
    """The owner of a parameter that is a frame; the coordinate list is None for one without a module."""

    coordinate_list: Any
    name: str
    manifold: str

    @property
    def title(self) -> str:
        """The name in messages, "the frame of Linear.weight"."""
        weight = None if self.coordinate_list is None else self.coordinate_list.weight
        return "a frame without a module" if weight is None else f"the frame of {weight}"


_coordinate_lists: weakref.WeakSet[SupportsCoordinates] = weakref.WeakSet()
_alone: dict[int, tuple[weakref.ref[Tensor], str]] = {}
_manifolds: list[type] = []
"""Classes of manifolds; the tensors that say they are on one are watched too."""
_hooks: list[Any] = []
_moved: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, int]] = weakref.WeakKeyDictionary()
"""The write count of each frame after its optimizer's last step, by id."""


def watch(coordinate_list: SupportsCoordinates) -> None:
    """Adds a coordinate list that holds frames; it is forgotten when it dies."""
    _coordinate_lists.add(coordinate_list)
    _install()


def watch_frame(frame: Tensor, manifold: str) -> None:
    """Adds a frame that no coordinate list holds; it is forgotten when it dies."""
    key = id(frame)
    _alone[key] = weakref.ref(frame, lambda _: _alone.pop(key, None)), manifold
    _install()


def watch_manifold(manifold: type) -> None:
    """Adds a class of manifolds in geoopt's interface, whose tensors no other optimizer may move."""
    _manifolds.append(manifold)
    _install()


def manifold_of(p: Any) -> str | None:
    """Returns the manifold that a tensor of geoopt's says it is on; None for any other, and in Euclidean space.

    One of `MANIFOLDS`, of ours and of geoopt's own, or the name of one that no optimizer here knows.
    """
    manifold, geoopt = getattr(p, "manifold", None), sys.modules.get("geoopt")
    if manifold is None or geoopt is None or not isinstance(manifold, geoopt.Manifold):
        return None
    if isinstance(manifold, geoopt.Euclidean):
        return None
    if isinstance(manifold, (geoopt.Stiefel, *_manifolds)):
        canonical = getattr(manifold, "metric", manifold.name) in ("canonical", geoopt.CanonicalStiefel.name)
        return MANIFOLDS[not canonical]
    return manifold.name or type(manifold).__name__


def coordinate_lists() -> list[Any]:
    """Returns the coordinate lists alive that hold frames."""
    return list(_coordinate_lists)


def frames_alone() -> list[Tensor]:
    """Returns the frames alive that no coordinate list holds."""
    return [frame for alive, _ in list(_alone.values()) if (frame := alive()) is not None]


def frames() -> dict[int, Frame]:
    """Returns id to `Frame` of every parameter alive that must stay on a manifold, as its coordinate list holds it now.

    Under FSDP2 these are the sharded parameters, as the optimizer has them. Look up at once: an id means nothing once
    its parameter is replaced.
    """
    watched = {}
    for key, (alive, manifold) in list(_alone.items()):
        if alive() is not None:
            watched[key] = Frame(None, "stiefel", manifold)
    for coordinate_list in list(_coordinate_lists):
        manifolds = coordinate_list.param.manifolds
        for name, c in coordinate_list.coordinates.items() if manifolds else ():
            if name in manifolds:
                watched[id(c)] = Frame(coordinate_list, name, manifolds[name])
    return watched


def was_moved(frame: Tensor) -> bool:
    """Returns whether it was an optimizer along its manifold, still alive, that has written to a frame last."""
    count = write_count(frame)
    return any(counts.get(id(frame)) == count for counts in list(_moved.values()))


def is_left_between_landings(frame: Tensor) -> bool:
    """Returns whether the optimizer of a frame lands it on the manifold after some steps only."""
    groups = [group for optimizer in list(_moved) for group in optimizer.param_groups if group.get("every", 1) > 1]
    return any(p is frame for group in groups for p in group["params"])


def _install() -> None:
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse))
        _hooks.append(register_optimizer_step_post_hook(_note))


def _note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Remembers what an optimizer has moved along its manifold, for `was_moved`."""
    if not _coordinate_lists or not (getattr(optimizer, "moves_frames", False) or _is_geoopts(optimizer)):
        return
    moved: list[Tensor] = []
    for group in optimizer.param_groups:
        if group.get("manifold", "any") is not None:
            moved += group["params"]
    _moved[optimizer] = dict(zip(map(id, moved), map(write_count, moved), strict=True))


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises OptimizerError before a step that would take a frame off its manifold."""
    if not (_coordinate_lists or _alone or _manifolds):
        return
    groups, own = [], getattr(optimizer, "moves_frames", False)
    for group in optimizer.param_groups:
        if not own or group.get("manifold", "any") is None:
            groups.append(group)
    watched, manifolds = frames() if groups else {}, tuple(_manifolds)
    for group in groups:
        for p in group["params"]:
            # geoopt's are of classes of its own, and an attribute of a thousand plain ones takes time
            says = type(p) is not nn.Parameter and _is_among(getattr(p, "manifold", None), manifolds)
            is_bound = says or id(p) in watched
            if is_bound and (p.requires_grad or p.grad is not None) and not _is_geoopts(optimizer, p):
                raise OptimizerError(_in_words(optimizer, p, watched.get(id(p)) or Frame(None, "stiefel", "")))


def _is_among(manifold: Any, classes: tuple[type, ...]) -> bool:
    """Returns whether a manifold is of one of the classes, or is geoopt's `Scaled` around one that is."""
    return isinstance(manifold, classes) or isinstance(getattr(manifold, "base", None), classes)


def _is_geoopts(optimizer: torch.optim.Optimizer | None, p: Any = None) -> bool:
    """Returns whether an optimizer is one of geoopt's and a parameter is one that it moves along a manifold."""
    mixin, tensor = sys.modules.get("geoopt.optim.mixin"), sys.modules.get("geoopt.tensor")
    if mixin is None or tensor is None or not isinstance(optimizer, mixin.OptimMixin):
        return False
    return p is None or isinstance(p, tensor.ManifoldTensor)


def _in_words(optimizer: torch.optim.Optimizer, p: Tensor, frame: Frame) -> str:
    size, name = " x ".join(map(str, p.shape)), type(optimizer).__name__
    got = f"got {frame.title} ({size}), which must stay on its manifold"
    alone = frame.coordinate_list is None
    if _is_geoopts(optimizer):
        remedy = "geoopt.ManifoldParameter(w, sk.manifolds.Stiefel())" if alone else "sk.optim.geoopt_parameters(model)"
        return f"{name} needs frames as geoopt's own parameters, {got}; give it {remedy}."
    groups = "sk.optim.frames([w])" if alone else "sk.optim.parameter_groups(model, lr=...)"
    if getattr(optimizer, "moves_frames", False):
        return f"{name} needs groups that name the manifold of frames, {got}, in one without; give it {groups}."
    return f"{name} needs parameters that may move freely, {got}; use sk.optim.MultiplicativeCayley({groups})."
