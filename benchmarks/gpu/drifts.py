"""Drift of every map and optimizer of frames over many steps, and of the update without correction."""

import math

import torch

import stiefelkit as sk
from benchmarks.gpu.parts import Cells, LeftOut, absent_peers
from benchmarks.gpu.scale import Scale
from benchmarks.uncorrected import NAME, UncorrectedCayley
from stiefelkit.measuring.drift.plan import DriftPlan
from stiefelkit.measuring.drift.run import Skipped, outcomes
from stiefelkit.measuring.report.record import Figure
from stiefelkit.optim import register

__all__ = ["of_every_method"]

LOOKS = (1, 100, 1000)
"""Steps up to which the largest error is shown beside that of all."""


def of_every_method(scale: Scale, device: str) -> Cells:
    """The largest error over the limit, method by method; maps that are complex only in complex64."""
    yield from absent_peers()
    register(NAME, UncorrectedCayley)
    fields = {**scale.drift, "device": device}
    plans = [DriftPlan(**fields, methods=scale.drift_methods)]
    complex_only = tuple(
        name
        for name, cls in sk.available().items()
        if cls.supports((4, 4), torch.float32) is not None and not scale.drift_methods
    )
    if complex_only:
        plans.append(DriftPlan(**fields, methods=complex_only, dtype="complex64"))
    for plan in plans:
        for outcome in outcomes(plan):
            table = f"largest error / limit, {outcome.n} x {outcome.p}, {plan.dtype}, {plan.gradients} gradients"
            if isinstance(outcome, Skipped):
                if outcome.method not in complex_only or plan.dtype == "complex64":
                    yield LeftOut(f"{outcome.method}, {plan.dtype}", outcome.reason)
                continue
            steps = [step for step in LOOKS if step < plan.steps]
            beside = {f"to {step}": _finite(outcome.worst_until(_grid(outcome.steps, step))) for step in steps}
            yield Figure("drift", table, outcome.method, "limits", _finite(outcome.worst), beside=beside)


def _grid(grid: list[int], step: int) -> int:
    return max(at for at in grid if at <= step)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
