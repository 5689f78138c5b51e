"""`stiefelkit drift`."""

import contextlib
import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from stiefelkit.cli.open_options import whole
from stiefelkit.errors import OptionError
from stiefelkit.experiments.drift import Curve, Plan, measure

__all__ = ["drift"]

SHOWN = (0, 1, 10, 100, 1000, 10_000, 100_000)


def drift(
    *,
    steps: Annotated[int, Parameter(converter=whole)] = 1000,
    methods: str = "",
    sizes: str = "64",
    dtype: str = "float32",
    optimizer: str = "adam",
    lr: float = 1e-3,
    seed: Annotated[int, Parameter(converter=whole)] = 0,
    out: Path = Path("runs/drift"),
) -> int:
    """Trains every parametrization under random gradients, and measures its orthogonality on the way.

    Args:
        steps: optimizer steps.
        methods: parametrizations, separated by commas; all, and an unconstrained weight, if left out.
        sizes: n of the n x n weights, separated by commas.
        dtype: float32, float64, complex64 or complex128.
        optimizer: adam, adamw, adagrad, rmsprop, sgd, or the name of an installed plugin.
        lr: learning rate.
        seed: fixes the initial weights and the gradients.
        out: folder for drift.json and drift.png; one that has a drift.json is refused.
    """
    try:
        numbers = tuple(int(size) for size in sizes.split(",") if size.strip())
    except ValueError as error:
        raise OptionError(f"--sizes needs integers separated by commas, got {sizes!r}.") from error
    names = tuple(name.strip() for name in methods.split(",") if name.strip())
    plan = Plan(steps, names, numbers, dtype, optimizer, lr, seed)
    console = Console(highlight=False)
    with console.status("") if console.is_terminal else contextlib.nullcontext() as status:
        curves, skipped, files = measure(
            plan, out, lambda method, size: status.update(f"{method}, {size} x {size}") if status else None
        )
    console.print(_table(plan, curves))
    for curve in curves:
        lost = next((s for s, e in zip(curve.steps, curve.errors, strict=True) if not math.isfinite(e)), None)
        if lost is not None:
            console.print(f"{curve.method} at {curve.size} x {curve.size} is NaN or infinite from step {lost} on.")
    for each in skipped:
        console.print(f"Skipped {each.method} at {each.size} x {each.size}: {each.reason}", soft_wrap=True)
    for file in files:
        console.print(f"{'Figure' if file.suffix == '.png' else 'Data'}: {file}", soft_wrap=True)
    return 0


def _table(plan: Plan, curves: list[Curve]) -> Table:
    shown = [step for step in SHOWN if step < plan.steps] + [plan.steps]
    title = f"orthogonality error / rounding limit, {plan.dtype}, {plan.optimizer} at {plan.lr:g}"
    table = Table("method", "n", title=title)
    for step in shown:
        table.add_column(f"step {step}", justify="right")
    for curve in curves:
        ratios = dict(zip(curve.steps, curve.ratios, strict=True))
        table.add_row(curve.method, str(curve.size), *(f"{ratios[step]:.3g}" for step in shown))
    return table
