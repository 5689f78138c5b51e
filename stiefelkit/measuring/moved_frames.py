"""Frames that an optimizer moves, ours or another's, by steps of a given length."""

import importlib.util
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from stiefelkit.errors import OptionError
from stiefelkit.metrics import working_dtype
from stiefelkit.numbers import PRECISIONS
from stiefelkit.optim import optimizers
from stiefelkit.registry import code_of_others
from stiefelkit.weights.optimizer_hooks import moves_frames

__all__ = ["MovedFrame", "imported", "methods", "own_optimizers", "peer_optimizers", "start"]

T = TypeVar("T")

MANIFOLD = "stiefel:canonical"
TRIAL = 1e-6
"""Learning rate of the step that is made to learn how long steps are, times the size of the gradient."""


@dataclass(frozen=True)
class MovedFrame:
    """A frame, which is a parameter, and the optimizer of it alone that moves it."""

    frame: Tensor
    optimizer: torch.optim.Optimizer

    def step(self, gradient: Tensor) -> None:
        """Makes a step with that gradient, which belongs to the frame from then on."""
        self.frame.grad = gradient
        self.optimizer.step()


Make = Callable[[Tensor, float], MovedFrame]
"""Gets an optimizer ready to move a frame, by a learning rate."""


def _geoopt(optimizer: str, canonical: bool, frame: Tensor, lr: float) -> MovedFrame:
    import geoopt

    manifold = geoopt.CanonicalStiefel() if canonical else geoopt.EuclideanStiefel()
    point = cast(Any, geoopt).ManifoldParameter(frame, manifold=manifold)
    return MovedFrame(point, getattr(geoopt.optim, optimizer)([point], lr=lr))


def _pogo(frame: Tensor, lr: float) -> MovedFrame:
    import pogo  # pyright: ignore[reportMissingImports]
    from pogo.base import SGD  # pyright: ignore[reportMissingImports]

    point = nn.Parameter(frame)
    # It takes stacks alone, and turns them so that rows are orthonormal.
    stacked = partial(torch.Tensor.reshape, shape=(-1, *frame.shape[-2:]))
    return MovedFrame(point, pogo.POGO([point], SGD(), lr, flatten_fn=stacked, rows=False))


_PEERS: dict[str, Make] = {  # each name begins with that of its package
    "geoopt_adam_canonical": partial(_geoopt, "RiemannianAdam", True),
    "geoopt_adam_euclidean": partial(_geoopt, "RiemannianAdam", False),
    "geoopt_sgd_canonical": partial(_geoopt, "RiemannianSGD", True),
    "geoopt_sgd_euclidean": partial(_geoopt, "RiemannianSGD", False),
    "pogo_torch": _pogo,
}
peer_optimizers = {
    name: peer for name, peer in _PEERS.items() if importlib.util.find_spec(name.partition("_")[0]) is not None
}
"""Name to `Make` of other implementations, which take real frames alone, of those whose package is installed."""
YARDSTICKS = ("geoopt_sgd_canonical", "geoopt_sgd_euclidean")
"""Peers beside which the time of a step is shown as a ratio."""


def imported(who: str, path: str, kind: type[T]) -> type[T]:
    """Returns the class of an import path, my.module:MyClass; modules in the current folder are found too."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    wanted = f"{who} needs the import path of a subclass of {kind.__name__}, as my.module:MyClass"
    with code_of_others(f"{wanted}, and {path!r} to import"):
        found = pkgutil.resolve_name(path)
    if not (isinstance(found, type) and issubclass(found, kind)):
        raise OptionError(f"{wanted}, got {path!r}.")
    return found


def own_optimizers() -> dict[str, type[torch.optim.Optimizer]]:
    """Returns name to class of the registered optimizers that move frames, plugins included."""
    return {name: cls for name, cls in optimizers.available().items() if moves_frames(cls)}


def methods() -> dict[str, Make]:
    """Returns name to what gets ready to move a frame: ours, as "name" or "name:precision", and peers."""
    found: dict[str, Make] = {}
    for name, cls in own_optimizers().items():
        has_several = "precision" in inspect.signature(cls).parameters
        for precision in PRECISIONS if has_several else PRECISIONS[:1]:
            found[f"{name}:{precision}"] = partial(_ours, cls, {"precision": precision} if has_several else {})
        found[name] = found[f"{name}:{PRECISIONS[0]}"]
    return found | peer_optimizers


def start(method: str, frame: Tensor, gradient: Tensor, length: float, dtype: torch.dtype | None = None) -> MovedFrame:
    """Gets an optimizer, ours or a peer's, ready to move a frame, its first step by a given length.

    The length is the largest angle by which a short step turns: the 2-norm of the skew A with :math:`dW = A W`. A tiny
    step in float64 finds the learning rate, in the same way for all. A frame is exact in float64 or complex128, and
    rounded to `dtype`.
    """
    known = methods()
    make = known[method] if method in known else partial(_ours, imported("drift", method, torch.optim.Optimizer), {})
    return make(frame.to(dtype or frame.dtype, copy=True), rate(make, frame, gradient, length))


def rate(make: Make, frame: Tensor, gradient: Tensor, length: float) -> float:
    """Returns the learning rate by which the first step has a length."""
    w = frame.reshape(-1, *frame.shape[-2:])[0]
    g = gradient.reshape(-1, *gradient.shape[-2:])[0].to(w.dtype)
    size = float(torch.linalg.vector_norm(g))
    lr = TRIAL / size if size else TRIAL
    trial = make(w.clone(), lr)
    trial.step(g.clone())
    turn = _turn(w, trial.frame.detach() - w) / lr
    if not turn > TRIAL * min(size, 1.0):
        turn = 1.0  # nowhere to go, as on the real 1 x 1 frames
    return length / turn


def _ours(cls: Callable[..., torch.optim.Optimizer], options: dict[str, Any], frame: Tensor, lr: float) -> MovedFrame:
    point = nn.Parameter(frame)
    groups: list[dict[str, Any]] = [{"params": [point]} | ({"manifold": MANIFOLD} if moves_frames(cls) else {})]
    return MovedFrame(point, cls(groups, lr=lr, **options, **getattr(cls, "steady", {})))


def _turn(w: Tensor, moved: Tensor) -> float:
    """Returns the 2-norm of the n x n skew matrix that maps W to a tangent vector, from a matrix of 2p rows."""
    w, moved = (t.to(working_dtype(t.dtype)) for t in (w, moved))
    along = w.mH @ moved
    a = (along - along.mH) / 2
    if w.shape[-2] > w.shape[-1]:
        rest = torch.linalg.qr(moved - w @ along)[1]
        a = torch.cat([torch.cat([a, -rest.mH], 1), torch.cat([rest, torch.zeros_like(a)], 1)])
    return math.sqrt(max(float(torch.linalg.eigvalsh(a.mH @ a)[-1]), 0.0))
