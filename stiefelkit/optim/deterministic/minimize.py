"""A loss and a start, and the minimum: an optimizer of deterministic losses as a function."""

import itertools
import logging
import math
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stiefelkit.errors import DtypeError, OptionError, needs, shown
from stiefelkit.optim.checks import check_manifold, listed
from stiefelkit.optim.deterministic import minimizers
from stiefelkit.optim.deterministic.minimizer import Minimizer, Progress
from stiefelkit.optim.deterministic.objective import NOISE
from stiefelkit.optim.groups import frames
from stiefelkit.optim.settings import integer

LOGGER = logging.getLogger("stiefelkit.optim.minimize")


@dataclass(frozen=True)
class Minimum:
    """Where `minimize` has ended, and why there; see `Progress` for the numbers.

    Attributes:
        point: the frame, of the shape and dtype of the start; of several points a tuple. Not shown by `print`.
        is_converged: whether the gradient is as short as was asked for, or as rounding lets it be.
        stopped: "gradient" or "rounding" if it is so, else "max_iter" or "no_descent".
        reflected: for square real frames, whose determinant no step changes: the end of a minimization that started
            from a reflection of this one, where its loss is lower. None where none was found, which rules one out only
            for losses that are linear in the frame.
        component: "start", that of the start, or "reflected", where `components="both"` took such an end.
    """

    point: Any = field(repr=False)
    value: float
    gradient_norm: float
    iterations: int
    evaluations: int
    products: int
    is_converged: bool
    stopped: str = "gradient"
    reflected: Any = field(default=None, repr=False)
    component: str = "start"


def minimize(
    f: Callable[..., Tensor],
    x0: Any,
    method: str | type[Minimizer] = "trust_region",
    *,
    manifold: str | Sequence[str | None] | None = "stiefel:canonical",
    max_iter: int = 1000,
    reflections: int = 4,
    components: str = "start",
    callback: Callable[[Any, float, float], object] | None = None,
    **settings: Any,
) -> Minimum:
    r"""Minimises a function of a frame, or of a batch of them, whose values are added up, or of several points.

    Steps are continuous, and so never leave the component of :math:`O(n)` that a square real frame starts in. From
    reflections of the end it starts again, and where that ends lower, the result has it as `reflected`, and a warning
    says so.

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
        reflections: how many reflections of an end with square real frames are tried, each a minimization of its own,
            those of lowest loss first; 0 for none.
        components: "start", or "both" for the lowest of these ends itself in place of a warning.
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
    reflections = integer(0).require("sk.optim.minimize", "reflections", reflections)
    needs(components in ("start", "both"), OptionError, "sk.optim.minimize", 'components "start" or "both"', components)
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

    def descend(points: list[nn.Parameter]) -> Progress:
        groups = [
            {"params": [w]} if name is None else frames(w, manifold=name)[0]
            for w, name in zip(points, manifolds, strict=True)
        ]
        optimizer = cls(groups, max_iter=max_iter, **settings)
        optimizer.watch = watch
        optimizer.step(lambda: value(*points))
        assert optimizer.progress is not None
        return optimizer.progress

    end = descend(points)
    tries = 0 if end.stopped == "max_iter" else reflections
    found = _beyond_reflections(f, descend, points, [name is not None for name in manifolds], end.loss, tries)
    component = "start"
    if found is not None and components == "both":
        (points, end), found, component = found, None, "reflected"
    if found is not None:
        warnings.warn(
            "sk.optim.minimize ended at a frame, and found a lower loss behind a reflection of it, at the other "
            'determinant, which no step reaches: `reflected` of the result; components="both" takes it.',
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
        reflected=None if found is None else _given(found[0], are_several),
        component=component,
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


def _beyond_reflections(
    f: Callable[..., Tensor],
    descend: Callable[[list[nn.Parameter]], Progress],
    points: list[nn.Parameter],
    are_frames: list[bool],
    value: float,
    tries: int,
) -> tuple[list[nn.Parameter], Progress] | None:
    """Returns the lowest end of descents from reflected points that is lower than a value, or None.

    A try starts from the lowest reflection that has not been tried, of one matrix of the best points so far.
    """
    eps, best, waiting = torch.finfo(points[0].dtype).eps, None, None
    for _ in range(tries):
        if waiting is None:
            waiting, noise = _reflections(f, points if best is None else best[0], are_frames)
        if not waiting:
            break
        start = [nn.Parameter(w) for w in waiting.pop(0)[1]()]
        after = descend(start)
        if after.loss < value - NOISE * eps * max(abs(value), noise):
            best, value, waiting = (start, after), after.loss, None
    return best


def _reflections(
    f: Callable[..., Tensor], points: list[nn.Parameter], are_frames: list[bool]
) -> tuple[list[tuple[float, Callable[[], list[Tensor]]]], float]:
    """Returns reflections W (I - 2 v v^T) of single square real frames with their losses, the lowest first.

    The v are eigenvectors of the symmetric part of W^T G, which are all that matter to a loss that is linear in W. Also
    returns the sum of the norms of G, each times sqrt(n): a bound of what rounds in the loss.
    """
    square = [i for i, w in enumerate(points) if are_frames[i] and not w.is_complex() and w.shape[-1] == w.shape[-2]]
    with torch.enable_grad():
        gs = torch.autograd.grad(f(*points), [points[i] for i in square], materialize_grads=True) if square else ()
    found, size = [], 0.0
    for i, g in zip(square, gs, strict=True):
        n = g.shape[-1]
        size += torch.linalg.vector_norm(g).item() * n**0.5
        s = points[i].detach().mT @ g
        vectors = torch.linalg.eigh((s + s.mT).double()).eigenvectors.to(g.dtype).reshape(-1, n, n)
        for matrix, column in itertools.product(range(len(vectors)), range(n)):
            reflect = partial(_reflected, points, i, matrix, vectors[matrix, :, column, None])
            with torch.no_grad():
                found.append((float(f(*reflect())), reflect))
    return sorted((each for each in found if each[0] < math.inf), key=operator.itemgetter(0)), size


def _reflected(points: list[nn.Parameter], which: int, matrix: int, v: Tensor) -> list[Tensor]:
    turned = [w.detach().clone() for w in points]
    w = turned[which].view(-1, len(v), len(v))[matrix]
    w -= 2 * (w @ v) @ v.mT
    return turned
