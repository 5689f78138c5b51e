"""A loss and a start, and the minimum: an optimizer of deterministic losses as a function."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from stiefelkit.errors import DtypeError
from stiefelkit.optim.deterministic.registry import minimizers
from stiefelkit.optim.groups import frames

__all__ = ["Minimum", "minimize"]


@dataclass(frozen=True)
class Minimum:
    """Where `minimize` has ended.

    Attributes:
        point: the frame, of the shape and dtype of the start.
        value: the loss there.
        gradient_norm: length of the Riemannian gradient there.
        iterations: how many it took.
        evaluations: how often the loss and its gradient were computed.
        products: how many products with the Hessian were.
        is_converged: whether the gradient is as short as was asked for, or as rounding lets it be.
    """

    point: Tensor
    value: float
    gradient_norm: float
    iterations: int
    evaluations: int
    products: int
    is_converged: bool


def minimize(
    f: Callable[[Tensor], Tensor],
    x0: Tensor,
    method: str = "trust_region",
    *,
    manifold: str = "stiefel:canonical",
    max_iter: int = 1000,
    **settings: Any,
) -> Minimum:
    r"""Minimises a function of a frame, or of a batch of them, whose values are added up.

    Args:
        f: gives a real number, by operations that torch differentiates: twice, for "trust_region".
        x0: where to start: a frame of shape (*, n, p), n >= p, float32 or better, real or complex. It is not changed.
        method: a name in `sk.optim.minimizers`: "trust_region", "lbfgs", "conjugate_gradient".
        manifold: "stiefel:canonical" or "stiefel:euclidean", which differ in the metric.
        max_iter: iterations at most.
        **settings: of the method, as `tolerance_grad=1e-8`.

    Raises:
        NotAFrameError, ShapeError, OptionError: x0 is no frame.
        UnknownNameError: no method has that name.
        DtypeError: x0 is no tensor.
        NonFiniteError: the value or the gradient at x0 is not finite.
        OptimizerError: f does not return a tensor that depends on its argument.

    >>> import torch, stiefelkit as sk
    >>> a = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
    >>> result = minimize(lambda w: -torch.trace(w.mT @ a @ w), sk.init.haar((6, 2)))
    >>> round(result.value, 12), result.is_converged
    (-11.0, True)
    """
    if not isinstance(x0, Tensor):
        raise DtypeError(f"sk.optim.minimize needs a tensor to start from, got {type(x0).__name__}.")
    cls = minimizers.get(method)
    w = nn.Parameter(x0.detach().clone())
    optimizer = cls(frames(w, manifold=manifold), max_iter=max_iter, **settings)
    optimizer.step(lambda: f(w))
    end = optimizer.progress
    return Minimum(
        point=w.detach(),
        value=end.loss,
        gradient_norm=end.gradient_norm,
        iterations=end.iterations,
        evaluations=end.evaluations,
        products=end.products,
        is_converged=end.is_done,
    )
