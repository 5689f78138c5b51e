"""The laws where rounding counts: losses that W and W Q share for every rotation Q, and gradients of any size."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit.errors import StiefelkitError
from stiefelkit.functional._arithmetic.reads import without_reads
from stiefelkit.metrics import frame_tolerance, orthogonality_error, working_dtype
from stiefelkit.testing import seeds
from stiefelkit.testing.optimizer_cases import RATE, OptimizerCase, distance, give_gradients, snapshot
from stiefelkit.testing.require import require, require_within
from stiefelkit.weights.optimizer_hooks import MANIFOLDS

_EXPONENTS = {True: (-44, -38, -30, -22, -12, 0, 19, 30, 38), False: (-320, -300, -200, -160, 0, 150, 160, 300)}
"""Powers of 10 of gradients, of single precision and of double."""
_SHAPES = ((6, 6), (7, 3), (2, 5, 4), (3, 1), (1, 1))


def law_of_invariant_losses(case: OptimizerCase) -> None:
    """Where W and W Q have the same loss, and part of a gradient is rounding, single precision ends where double does.

    Principal components, whose gradient has no rotation within the columns of W. Those whose variances lie far apart
    are for steps that do not grow with the gradient. Where double precision does not come within 1 % of the least
    value, that tells nothing. Of a square frame all of the gradient is rounding.
    """
    wide = working_dtype(case.dtype)
    if case.dtype == wide:
        return
    n, p, steps = 12, 4, 150
    basis = init.haar((n, n), wide, seeds.generator(5))

    def gap(dtype: torch.dtype, values: Tensor, manifold: str) -> float:
        a = ((basis * values) @ basis.mH).to(case.device, dtype)
        (w,) = case.frames((n, p), dtype=dtype)
        optimizer = case.on([w], manifold)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            w.grad = -2 * a @ w.detach()
            optimizer.step()
            schedule.step()
        exact, end = a.to(wide), w.detach().to(wide)
        end = torch.linalg.qr(end)[0]
        return torch.linalg.eigvalsh(exact)[-p:].sum().item() - (end.conj() * (exact @ end)).sum().real.item()

    def first_step(size: float) -> float:
        (w,), (start,) = case.frames((n, p), dtype=wide), case.frames((n, p), dtype=wide)
        give_gradients([w], 0, size)
        case.on([w]).step()
        return torch.dist(w, start).item()

    even = torch.tensor([1, 0.9, 0.8, 0.7, 0.1, *[0.05] * (n - 5)], dtype=torch.float64)
    steep = 1e5 * torch.tensor([1, 0.03, 0.01, 0.003, 3e-4, *[1e-4] * (n - 5)], dtype=torch.float64)
    is_normalised = first_step(1e5) < 10 * first_step(1.0)
    for values, manifold in [(even, MANIFOLDS[0]), *([(steep, m) for m in MANIFOLDS] if is_normalised else [])]:
        least, double = values[:p].sum().item(), gap(wide, values, manifold)
        if not double <= 0.01 * least:
            continue
        permitted = 2 * max(double, 0.0) + 16 * torch.finfo(case.dtype).eps * p**0.5 * least
        single = gap(case.dtype, values, manifold)
        require(
            single <= permitted,
            f"single precision ends {single:.3g} above the least value, double {double:.3g}, in {manifold}",
            single,
            permitted,
        )

    def moved(dtype: torch.dtype) -> float:
        a = ((basis * even) @ basis.mH).to(case.device, dtype)
        (w,), (start,) = case.frames((n, n), dtype=dtype), case.frames((n, n), dtype=dtype)
        optimizer = case.on([w])
        for _ in range(10):
            w.grad = a @ w.detach()
            optimizer.step()
        return distance([w], [start])

    single, permitted = moved(case.dtype), 2 * moved(wide) + 0.01 * RATE
    require(single <= permitted, f"rounding alone moves a square frame by {single:.3g}", single, permitted)


def law_of_invariant_minima(case: Any) -> None:
    """Where W and W Q have the same loss, whose curvatures lie 1e4 apart, it ends at the least, up to rounding."""
    n, p = 12, 4
    basis = init.haar((n, n), working_dtype(case.dtype), seeds.generator(5))
    values = torch.tensor([1e4, 300.0, 100.0, 30.0, 3.0, *[1.0] * (n - 5)], dtype=torch.float64)
    a = ((basis * values) @ basis.mH).to(case.dtype)
    w = nn.Parameter(init.haar((n, p), working_dtype(case.dtype), seeds.generator(6)).to(case.dtype))
    optimizer = case.make([{"params": [w], "manifold": MANIFOLDS[0]}], max_iter=3000)
    optimizer.step(lambda: -(w.conj() * (a @ w)).sum().real)
    progress: Any = optimizer.progress
    require(progress.is_done, f"it ends ({progress.stopped}) at a gradient of {progress.gradient_norm:.3g}")
    exact = a.to(working_dtype(case.dtype))
    least = torch.linalg.eigvalsh(exact)[-p:].sum().item()
    end = w.detach().to(exact.dtype)
    gap = least - (end.conj() * (exact @ end)).sum().real.item()
    size = 2 * torch.linalg.vector_norm(values[:p]).item() * p**0.5
    require_within(gap, 8 * torch.finfo(case.dtype).eps * size, "above the least value by")


def law_of_sizes(case: OptimizerCase) -> None:
    """After a gradient and a rate of any size a weight is a finite frame, or as it was, which a sentence tells.

    Where no value is read nothing can be told, and the frame is as it was.
    """
    for number, (exponent, kind, lr) in enumerate(_draws(case.dtype)):
        shape = _SHAPES[number % len(_SHAPES)]
        for unread in (False, True):
            what = f"a {kind} gradient of 1e{exponent} of shape {shape} with lr={lr:.2g}{', unread,' if unread else ''}"
            (w,) = ws = case.frames(shape)
            optimizer = case.on(ws, lr=lr)
            for step in range(2):
                w.grad, before = _gradient(w, exponent, kind, step), snapshot(optimizer)
                try:
                    with without_reads() if unread else contextlib.nullcontext():
                        optimizer.step()
                except StiefelkitError as refusal:
                    require("\n" not in str(refusal), f"{what} is refused in more than a sentence: {refusal}")
                    require(torch.equal(w, before[0][0]), f"{what} is refused, but moves the frame")
                    break
                except Exception as error:
                    require(False, f"{what} ends in {type(error).__name__}: {error}")
                _require_sound(optimizer, w, what)


def _draws(dtype: torch.dtype) -> Iterator[tuple[int, str, float]]:
    """Yields sizes and kinds of gradients, and rates that make an ordinary step of them, a long one or none."""
    is_single = dtype != working_dtype(dtype)
    for exponent in _EXPONENTS[is_single]:
        ordinary = min(0.1 * 10.0**-exponent if exponent > -308 else math.inf, 1e300)
        for lr in (ordinary, 1e30 if is_single else 1e200, 1e-30, 1e300):
            for kind in ("random", "lone"):
                yield exponent, kind, lr
    yield from ((0, "zero", lr) for lr in (1e30, 1e300))


def _gradient(w: Tensor, exponent: int, kind: str, seed: int) -> Tensor:
    """Returns a gradient whose largest entry has a size: one of many, or the only one of that size."""
    g = torch.randn(w.shape, dtype=working_dtype(w.dtype), generator=seeds.generator(seed))
    g = g / g.abs().max() * (1e-3 if kind == "lone" else 10.0**exponent if kind == "random" else 0.0)
    if kind == "lone":
        g[..., -1, 0] = 10.0**exponent
    return g.to(w.device, w.dtype)


def _require_sound(optimizer: torch.optim.Optimizer, w: Tensor, what: str) -> None:
    error = orthogonality_error(w).max().item()
    bound = frame_tolerance(w.shape[-1], w.dtype)
    require(error <= bound, f"{what} leaves ||W^H W - I||_F = {error:.3g}", error, bound)
    for key, value in optimizer.state[w].items():
        finite = not isinstance(value, Tensor) or bool(torch.isfinite(value).all())
        require(finite, f"{what} leaves a state {key} that is not finite")
