"""A loss and a start, and the minimum: an optimizer of deterministic losses as a function."""

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stiefelkit.errors import DtypeError, OptionError, needs, shown
from stiefelkit.optim.checks import check_manifold, listed
from stiefelkit.optim.deterministic import minimizers
from stiefelkit.optim.deterministic.minimizer import Minimizer
from stiefelkit.optim.groups import frames

LOGGER = logging.getLogger("stiefelkit.optim.minimize")


@dataclass(frozen=True)
class Minimum:
    """Where `minimize` has ended, and why there; see `Progress` for the numbers.

    Attributes:
        point: the frame, of the shape and dtype of the start; of several points a tuple. Not shown by `print`.
        is_converged: whether the gradient is as short as was asked for, or as rounding lets it be.
        stopped: "gradient" or "rounding" if it is so, else "max_iter" or "no_descent".
    """

    point: Any = field(repr=False)
    value: float
    gradient_norm: float
    iterations: int
    evaluations: int
    products: int
    is_converged: bool
    stopped: str = "gradient"


def minimize(
    f: Callable[..., Tensor],
    x0: Any,
    method: str | type[Minimizer] = "trust_region",
    *,
    manifold: str | Sequence[str | None] | None = "stiefel:canonical",
    max_iter: int = 1000,
    callback: Callable[[Any, float, float], object] | None = None,
    **settings: Any,
) -> Minimum:
    r"""Minimises a function of a frame, or of a batch of them, whose values are added up, or of several points.

    Steps are continuous, and so keep the determinant of a square real frame. Where the loss depends on it, a warning
    says so: a start with a column negated may end lower.

    Args:
        f: gives a real number, by operations that torch differentiates: twice, for "trust_region". It takes one tensor,
            or as many as x0 has.
        x0: where to start: a frame of shape (*, n, p), :math:`n ≥ p`, float32 or better, real or complex, as a tensor
            or a NumPy array; or a tuple or list of such, of one precision. It is not changed.
        method: a name in `sk.optim.minimizers`: "trust_region", "lbfgs", "conjugate_gradient"; or a class,
            `sk.optim.LBFGS`.
        manifold: a name, "stiefel:canonical" or "stiefel:euclidean", which differ in the metric, or None for a point
            that moves freely; of several points, one for all or one for each.
        max_iter: iterations at most.
        callback: called after each iteration with the point, or a tuple of several, its value, and the length of its
            gradient; the logger "stiefelkit.optim.minimize" has the same at level INFO.
        **settings: of the method, as `tolerance_grad=1e-8`.

    >>> import torch, stiefelkit as sk
    >>> a = torch.diag(torch.arange(1.0, 7.0, dtype=torch.float64))
    >>> result = minimize(lambda w: -torch.trace(w.mT @ a @ w), sk.init.haar((6, 2)))
    >>> round(result.value, 12), result.is_converged
    (-11.0, True)
    """
    needs(callable(f), OptionError, "sk.optim.minimize", "a function of the point", f)
    needs(callback is None or callable(callback), OptionError, "sk.optim.minimize", "a function as callback", callback)
    are_several = isinstance(x0, tuple | list)
    points = [_parameter(x) for x in (x0 if are_several else [x0])]
    is_one = manifold is None or isinstance(manifold, str)
    manifolds: list[Any] = [manifold] * len(points) if is_one else listed("sk.optim.minimize", manifold)
    for name in manifolds:
        if name is not None:
            check_manifold("sk.optim.minimize", name)
    fit, got = bool(points) and len(manifolds) == len(points), f"{len(manifolds)} of {len(points)}"
    needs(fit, OptionError, "sk.optim.minimize", "a manifold for each point", got)
    cls = minimizers.find(method)

    def watch(at: list[Tensor], value: float, gradient_norm: float) -> None:
        LOGGER.info("value %.10g, gradient %.3g", value, gradient_norm)
        if callback is not None:
            cast = [w.to(like.dtype) for w, like in zip(at, points, strict=True)]
            callback(_given(cast, are_several), value, gradient_norm)

    def value(*points: Tensor) -> Tensor:
        try:
            return f(*points)
        except RuntimeError as error:
            is_torchs, wanted = "numpy" not in str(error), "a loss of torch's operations"
            needs(is_torchs, OptionError, "sk.optim.minimize", wanted, "one that NumPy computes")
            raise

    groups = [
        {"params": [w]} if name is None else frames(w, manifold=name)[0]
        for w, name in zip(points, manifolds, strict=True)
    ]
    optimizer = cls(groups, max_iter=max_iter, **settings)
    optimizer.watch = watch
    optimizer.step(lambda: value(*points))
    end = optimizer.progress
    assert end is not None
    if _depends_on_determinants(f, points, [name is not None for name in manifolds], end.loss):
        warnings.warn(
            "sk.optim.minimize ended at a square frame with the determinant of its start, which no step changes, and "
            "the loss depends on it; minimize from x0 with a column negated as well, and take the lower end.",
            stacklevel=2,
        )
    return Minimum(
        point=_given(points, are_several),
        value=end.loss,
        gradient_norm=end.gradient_norm,
        iterations=end.iterations,
        evaluations=end.evaluations,
        products=end.products,
        is_converged=end.is_done,
        stopped=end.stopped,
    )


def _given(points: Sequence[Tensor], are_several: bool) -> Any:
    """Returns points as the caller has given them: one, or a tuple."""
    return tuple(w.detach() for w in points) if are_several else points[0].detach()


def _parameter(x: Any) -> nn.Parameter:
    """Returns a copy of a tensor or an array, to be moved."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "fc":
        x = torch.from_numpy(np.array(x, dtype=x.dtype.newbyteorder("=")))
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()) or x.is_meta:
        raise DtypeError(f"sk.optim.minimize needs a tensor or array of floating-point numbers, got {shown(x)}.")
    return nn.Parameter(x.detach().clone(memory_format=torch.contiguous_format))


def _depends_on_determinants(
    f: Callable[..., Tensor], points: Sequence[Tensor], are_frames: Sequence[bool], loss: float
) -> bool:
    """Returns whether a loss changes, by more than rounding, where a column of square real frames is negated."""
    reflected = [w.detach().clone() for w in points]
    square = [w for w, is_frame in zip(reflected, are_frames, strict=True) if is_frame and w.shape[-2] == w.shape[-1]]
    with torch.no_grad():
        for w in square:
            if not w.is_complex():
                w[..., 0] *= -1
                if not abs(float(f(*reflected)) - loss) <= torch.finfo(w.dtype).eps ** 0.5 * abs(loss):
                    return True
                w[..., 0] *= -1
    return False
