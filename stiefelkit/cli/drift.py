"""`stiefelkit drift`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from stiefelkit.cli.options import options
from stiefelkit.measuring.drift.plan import DriftPlan
from stiefelkit.training.display import Bar, Screen
from stiefelkit.training.figure import Figures

if TYPE_CHECKING:
    from stiefelkit.measuring.drift.run import DriftCurve

__all__ = ["drift"]

SHOWN = (0, 1, 100, 10_000, 100_000, 1_000_000)


@options(plan=DriftPlan)
def drift(*, plan: DriftPlan, out: Path = Path("runs/drift"), figures: Figures) -> int:
    """Measures drift, prints a table and the files; the words of its help stand in the table of commands.

    Args:
        plan: what to measure.
        out: folder for drift.json and drift.png; one that has a drift.json is refused.
        figures: how the figure is written.
    """
    from stiefelkit.measuring.drift.run import measure

    console = Screen()
    with Bar(console) as bar:
        outcome = measure(
            plan, out, lambda method, n, p, step: bar.show(f"{method}, {n} x {p}", step, plan.steps), figures
        )
    if outcome.curves:
        console.print(_table(plan, outcome.curves))
    for curve in outcome.curves:
        lost = next((s for s, e in zip(curve.steps, curve.errors, strict=True) if not math.isfinite(e)), None)
        if lost is not None:
            console.print(f"{curve.method} at {curve.n} x {curve.p} is NaN or infinite from step {lost} on.")
    for skipped in outcome.skipped:
        console.print(f"Skipped {skipped.method} at {skipped.n} x {skipped.p}: {skipped.reason}", soft_wrap=True)
    for file in outcome.files:
        console.print(f"{'Data' if file.suffix == '.json' else 'Figure'}: {file}", soft_wrap=True)
    return 0


def _table(plan: DriftPlan, curves: "list[DriftCurve]") -> Table:
    shown = [step for step in SHOWN if step < plan.steps] + [plan.steps]
    title = f"largest error up to a step / limit, {plan.dtype}, {plan.gradients} gradients"
    caption = f"parametrizations: {plan.optimizer} at {plan.lr:g}; frames: steps of {plan.step_length:g}"
    table = Table(title=title, caption=caption)
    table.add_column("method", no_wrap=True)
    table.add_column("size", no_wrap=True)
    for step in shown:
        table.add_column(f"to {step}", justify="right")
    for curve in curves:
        worst = (curve.worst_until(step) for step in shown)
        table.add_row(curve.method, f"{curve.n} x {curve.p}", *(f"{ratio:.3g}" for ratio in worst))
    return table
