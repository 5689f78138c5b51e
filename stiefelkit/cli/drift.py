"""`stiefelkit drift`."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from stiefelkit.cli.bar import Bar
from stiefelkit.cli.figures import table_of
from stiefelkit.cli.lists import sizes_of, words_of
from stiefelkit.cli.open_options import FigureOptions, given, whole
from stiefelkit.cli.words import with_plain_help
from stiefelkit.training.figure import Figures

if TYPE_CHECKING:
    from stiefelkit.measuring.drift.plan import DriftPlan
    from stiefelkit.measuring.drift.run import DriftCurve

__all__ = ["drift"]

SHOWN = (0, 1, 100, 10_000, 100_000, 1_000_000)


@with_plain_help
def drift(
    *,
    steps: Annotated[int, Parameter(converter=whole)] = 1000,
    methods: str = "",
    sizes: str = "64",
    dtype: str = "float32",
    gradients: str = "random",
    optimizer: str = "adam",
    lr: float = 1e-3,
    step_length: float = 1e-2,
    look_every: Annotated[int, Parameter(converter=whole)] = 1,
    device: str = "cpu",
    autocast: bool = False,
    tf32: bool = False,
    threads: Annotated[int, Parameter(converter=whole)] = 1,
    seed: Annotated[int, Parameter(converter=whole)] = 0,
    out: Path = Path("runs/drift"),
    figures: FigureOptions = None,
) -> int:
    """Measures drift, prints a table and the files; the words of its help stand in the table of commands.

    Args:
        steps: optimizer steps; 100000 for what adds up slowly.
        methods: separated by commas; if left out all that --optimizer can train, and those of frames in precision
            exact.
        sizes: n, or n x p for tall frames (1024x64), separated by commas.
        dtype: float32, float64, complex64 or complex128; bfloat16 for parametrizations.
        gradients: random draws one for each step, fixed keeps the first, rotation turns the weight steadily, by
            G = A W with one random skew A, digits trains it to tell handwritten digits apart.
        optimizer: of the parametrizations: adam, adamw, adagrad, rmsprop, sgd, one that moves frames (the method
            "stiefel" needs such), or the name of an installed plugin.
        lr: its learning rate.
        step_length: lr ||B||_2, B = G W^H - W G^H, of the first step of a frame; at most 100.
        look_every: the error is looked at after one step, at random, out of so many in a row; more is faster, and may
            miss a peak.
        device: cpu or cuda.
        autocast: make the steps under autocast to bfloat16.
        tf32: let a GPU lower float32 products to TF32.
        threads: CPU threads.
        seed: fixes the initial weights and the gradients.
        out: folder for drift.json and drift.png; one that has a drift.json is refused.
        figures: how the figure is written.
    """
    from stiefelkit.measuring.drift.measure import measure
    from stiefelkit.measuring.drift.plan import DriftPlan

    plan = DriftPlan(
        steps=steps,
        methods=words_of(methods),
        sizes=sizes_of(sizes),
        dtype=dtype,
        gradients=gradients,
        optimizer=optimizer,
        lr=lr,
        step_length=step_length,
        look_every=look_every,
        device=device,
        autocast=autocast,
        tf32=tf32,
        threads=threads,
        seed=seed,
    )
    console = Console(highlight=False)
    look = Figures(**given(figures))
    with Bar(console) as bar:
        outcome = measure(
            plan, out, lambda method, n, p, step: bar.show(f"{method}, {n} x {p}", step, plan.steps), look
        )
    if outcome.curves:
        console.print(_table(plan, outcome.curves))
    for curve in outcome.curves:
        lost = next((s for s, e in zip(curve.steps, curve.errors, strict=True) if not math.isfinite(e)), None)
        if lost is not None:
            console.print(f"{curve.method} at {curve.n} x {curve.p} is NaN or infinite from step {lost} on.")
    for each in outcome.skipped:
        console.print(f"Skipped {each.method} at {each.n} x {each.p}: {each.reason}", soft_wrap=True)
    for file in outcome.files:
        console.print(f"{'Data' if file.suffix == '.json' else 'Figure'}: {file}", soft_wrap=True)
    return 0


def _table(plan: "DriftPlan", curves: "list[DriftCurve]") -> Table:
    shown = [step for step in SHOWN if step < plan.steps] + [plan.steps]
    title = f"largest error up to a step / limit, {plan.dtype}, {plan.gradients} gradients"
    caption = f"parametrizations: {plan.optimizer} at {plan.lr:g}; frames: steps of {plan.step_length:g}"
    table = table_of(title, caption, ["method", "size"], [f"to {step}" for step in shown])
    for curve in curves:
        worst = (curve.worst_until(step) for step in shown)
        table.add_row(curve.method, f"{curve.n} x {curve.p}", *(f"{ratio:.3g}" for ratio in worst))
    return table
