"""The laws of losses that W and W Q share for every rotation Q, part or all of whose gradient is only rounding."""

from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit.metrics import working_dtype
from stiefelkit.testing import seeds
from stiefelkit.testing.optimizer_cases import RATE, OptimizerCase, distance, give_gradients
from stiefelkit.testing.require import require, require_within
from stiefelkit.weights.optimizer_hooks import MANIFOLDS

__all__ = ["law_of_invariant_losses", "law_of_invariant_minima"]


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
