"""Finds frames that are coordinates themselves, and refuses optimizers that would take them off the manifold.

A carrier of such frames announces itself once. Nothing is stored in the tensors, which FSDP2 and casts replace: which
parameter is a frame is looked up when it matters, among the carriers that are still alive.
"""

import sys
import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stiefelkit.errors import OptimizerError
from stiefelkit.param import OrthogonalParam

__all__ = ["MANIFOLDS", "Frame", "frames", "watch"]

MANIFOLDS = ("stiefel:canonical", "stiefel:euclidean")
"""The manifolds that optimizers know, each with its metric."""


class _Carrier(Protocol):
    weight: str

    @property
    def param(self) -> OrthogonalParam: ...

    @property
    def coordinates(self) -> dict[str, nn.Parameter]: ...


class Frame(NamedTuple):
    """Where a frame that is a coordinate belongs.

    Attributes:
        carrier: the `CoordinateList` that holds it.
        name: the coordinate's name, "stiefel".
        manifold: what it must stay on, "stiefel:canonical".
    """

    carrier: Any
    name: str
    manifold: str


_carriers: weakref.WeakSet[_Carrier] = weakref.WeakSet()
_hooks: list[Any] = []


def watch(carrier: _Carrier) -> None:
    """Adds a carrier whose map has `manifolds`; it is forgotten when it dies."""
    _carriers.add(carrier)
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_refuse))


def frames() -> dict[int, Frame]:
    """Returns id to `Frame` of every parameter alive that must stay on a manifold, as its carrier holds it now.

    Under FSDP2 these are the sharded parameters, as the optimizer has them. Look up at once: an id means nothing once
    its parameter is replaced.
    """
    found = {}
    for carrier in list(_carriers):
        manifolds = carrier.param.manifolds
        for name, c in carrier.coordinates.items():
            if name in manifolds:
                found[id(c)] = Frame(carrier, name, manifolds[name])
    return found


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Raises OptimizerError before a step that would take a frame off its manifold."""
    if getattr(optimizer, "moves_frames", False) or not _carriers:
        return
    known = frames()
    for group in optimizer.param_groups:
        for p in group["params"]:
            if id(p) in known and (p.requires_grad or p.grad is not None) and not _is_geoopts(optimizer, p):
                raise OptimizerError(_in_words(optimizer, p, known[id(p)]))


def _is_geoopts(optimizer: torch.optim.Optimizer | None, p: Any = None) -> bool:
    """Whether an optimizer is one of geoopt's and a parameter is one that it moves along a manifold."""
    mixin, tensor = sys.modules.get("geoopt.optim.mixin"), sys.modules.get("geoopt.tensor")
    if mixin is None or tensor is None or not isinstance(optimizer, mixin.OptimMixin):
        return False
    return p is None or isinstance(p, tensor.ManifoldParameter)


def _in_words(optimizer: torch.optim.Optimizer, p: torch.Tensor, frame: Frame) -> str:
    size, name = " x ".join(map(str, p.shape)), type(optimizer).__name__
    got = f"got the frame of {frame.carrier.weight} ({size}), which must stay on its manifold"
    if _is_geoopts(optimizer):
        return f"{name} needs frames as geoopt's own parameters, {got}; give it sk.optim.geoopt_parameters(model)."
    return (
        f"{name} needs parameters that may move freely, {got}; use "
        "sk.optim.MultiplicativeCayley(sk.optim.parameter_groups(model, lr=...))."
    )
