"""The drift of every method at every size, and what is written of it."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from stiefelkit.errors import RunError, StiefelkitError
from stiefelkit.measuring.drift.plan import UNCONSTRAINED, WHO, DriftPlan
from stiefelkit.measuring.drift.plot import draw
from stiefelkit.measuring.drift.run import DriftCurve, run
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.training.figure import Figures
from stiefelkit.training.files import writable, write_json
from stiefelkit.training.memory import threads

__all__ = ["DriftOutcome", "Skipped", "measure", "outcomes"]


@dataclass(frozen=True)
class Skipped:
    """A method that cannot do what was asked of an n x p weight, and the reason."""

    method: str
    n: int
    p: int
    reason: str


@dataclass(frozen=True)
class DriftOutcome:
    """A curve for each method and size in the order of measurement; what was skipped; drift.json and the figure."""

    curves: list[DriftCurve]
    skipped: list[Skipped]
    files: list[Path]


Watch = Callable[[str, int, int, int], None]
"""Called with method, n, p and the number of steps done, after each look."""


def measure(
    plan: DriftPlan, out: Path, watch: Watch = lambda method, n, p, step: None, figures: Figures | None = None
) -> DriftOutcome:
    """Takes every method through the steps at every size, and writes `drift.json` and `drift.png`.

    `drift.json` is replaced as a whole after each curve, so that an interruption loses only the one at work; its entry
    "finished" says whether all are there.

    Args:
        plan: what to measure.
        out: folder for the two files; made if missing.
        watch: called after each look.
        figures: the format of the figure, which is also its ending; PNG if left out.

    Raises:
        RunError: there is a `drift.json` already, which is not overwritten, or the folder cannot be written.
    """
    record = out / "drift.json"
    if record.exists():
        raise RunError(f"{WHO} needs a folder without drift.json, got {out}; choose another --out.")
    with writable(WHO, out):
        out.mkdir(parents=True, exist_ok=True)
    curves: list[DriftCurve] = []
    skipped: list[Skipped] = []
    try:
        for outcome in outcomes(plan, watch):
            curves += [outcome] if isinstance(outcome, DriftCurve) else []
            skipped += [outcome] if isinstance(outcome, Skipped) else []
            _write(record, plan, curves, skipped)
    finally:
        files = [record] if curves or skipped else []
        if curves:
            figures = figures or Figures()
            files.append(figures.path(out, "drift"))
            words = f"{plan.dtype}, {plan.gradients} gradients"
            draw(files[-1], curves, words, grey=UNCONSTRAINED, dpi=figures.dpi)
    return DriftOutcome(curves, skipped, files)


def outcomes(plan: DriftPlan, watch: Watch = lambda method, n, p, step: None) -> Iterator[DriftCurve | Skipped]:
    """Takes every method through the steps at every size, and yields what became of it; writes nothing."""
    for n, p in plan.sizes:
        for method in plan.methods:
            yield _measured(plan, method, n, p, watch)


def _measured(plan: DriftPlan, method: str, n: int, p: int, watch: Watch) -> DriftCurve | Skipped:
    try:
        with threads(plan.threads):
            return run(plan, method, n, p, lambda step: watch(method, n, p, step))
    except StiefelkitError as error:
        return Skipped(method, n, p, str(error))
    except (RuntimeError, TypeError, ValueError) as error:
        if "alloc" in str(error):
            return Skipped(method, n, p, "it does not fit into memory.")
        if method not in peer_optimizers.names():
            raise
        return Skipped(method, n, p, str(error).partition("\n")[0])


def _write(record: Path, plan: DriftPlan, curves: list[DriftCurve], skipped: list[Skipped]) -> None:
    content = {
        "plan": dataclasses.asdict(plan),
        "finished": len(curves) + len(skipped) == len(plan.sizes) * len(plan.methods),
        "curves": [dataclasses.asdict(curve) | {"worst": curve.worst} for curve in curves],
        "skipped": [dataclasses.asdict(method) for method in skipped],
    }
    write_json(record, content)
