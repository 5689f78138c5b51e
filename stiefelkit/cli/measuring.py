"""`stiefelkit drift`, `stiefelkit bench RACE` and `stiefelkit report`: they measure, and print tables of it."""

import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import Group, RenderableType
from rich.table import Table

from stiefelkit.cli.app import DEFAULTS
from stiefelkit.cli.options import options
from stiefelkit.errors import OptionError, RunError
from stiefelkit.measuring.drift.plan import DriftPlan
from stiefelkit.measuring.races import WHO
from stiefelkit.measuring.races.plan import (
    AXES,
    GrowthPlan,
    NormPlan,
    OptimizerRace,
    ParametrizationRace,
    ScanRace,
    TimedPlan,
)
from stiefelkit.measuring.report.plan import ReportPlan
from stiefelkit.training.display import Bar, Screen
from stiefelkit.training.figure import Figures

if TYPE_CHECKING:
    from stiefelkit.measuring.drift.run import DriftCurve
    from stiefelkit.measuring.races.field import Race, Row, Watch

__all__ = ["app", "drift", "report"]

RowsFile = Annotated[Path | None, Parameter(help="file for the rows, overwritten.")]
Columns = list[tuple[str, "Callable[[Row], str | float | None]"]]
"""Headings, and what stands below them."""

SHOWN = (0, 1, 100, 10_000, 100_000, 1_000_000)
"""Steps up to which drift is shown."""

app = App(name="bench", help="Race implementations on this machine.", default_parameter=DEFAULTS)


@app.command(name="scan")
@options(plan=ScanRace)
def scan(*, plan: ScanRace, json: RowsFile = None) -> int:
    """Races the scan h_t = act(x_t U^T + h_{t-1} W^T), forward and backward, on this machine.

    Timed is the forward, and the backward to W, U and the bias from a dense dL/dh at every step; "last state" has
    dL/dh_T alone, and does not return the other states (last_only=True). W is given: the map to it is not in here.
    All run in turns in one process, after a warm-up; medians are shown. Time is process CPU time, or that between CUDA
    events on a GPU. Unit: LIMIT, the matrix products that no scan can do without, working in the cache: T of (B, n) by
    (n, n) forward, T backward, and one (n, TB) by (TB, n); complex states count as 2n real numbers.

    The cases, T steps of B sequences: A, T=784, n=170, B=128, m=1; B, T=1020, n=190, B=20, m=10; C, T=200, n=512, B=50,
    m=129; D, complex, T=784, n=116, B=50, m=1. On request, with "scan (factors)", which never forms W: E, complex,
    T=784, n=512, B=50, fourier; F, complex, T=784, n=1024, B=128, givens of two layers; G, T=784, n=256, B=128,
    householder of 32 reflections.

    Drawn: input normal, W a Haar frame, U Glorot-uniform, modReLU's bias U(-0.01, 0), for complex states
    U(-0.01, 0.01), dL/dh normal.

    Peers: the same cell as a loop with autograd, step by step; torch's RNN (tanh, or relu if that is --activation) and
    LSTM, of as many units as a state has real numbers; and the LSTM that the papers match by its number of parameters.

    "ours x" is the time over that of our scan: 2 means that ours is twice as fast.
    """
    from stiefelkit.measuring.races.scan import races

    return _raced(races, plan, _scan, json)


@app.command(name="parametrizations")
@options(plan=ParametrizationRace)
def parametrizations(*, plan: ParametrizationRace, json: RowsFile = None) -> int:
    """Races the parametrizations of the registry, and other implementations of the same maps, on this machine.

    All versions run in turns in one process, after a warm-up; medians are shown. Time is process CPU time, or that
    between CUDA events on a GPU. Unit: g is one product of an n x p with a p x p matrix of that dtype (a batch of them,
    if there is one), measured in the same turns.

    "forward" computes the frame without gradients; "forward_backward" gives the gradient of its coordinates for a
    fixed random dL/dW; "step" is zero_grad, the same, and a step of torch.optim.SGD, or of geoopt's RiemannianSGD on
    the frame itself. Nothing is cached.

    Drawn, for ours and peers alike: skew A with entries of E |a|^2 = 1/n, so that ||A||_2 is about 2 (torch and
    geotorch map A / 2 by Cayley, and get 2 A); entries of reflectors N(0, 1), those of peers with 1 on top; angles and
    phases uniform on (-pi, pi); other coordinates by the parametrization's default init; dL/dW with E |g|^2 = 1/n.

    With --apart the batch races also as so many weights of their own, "apart" one by one, "grouped" inside sk.grouped;
    "/ batch" is the time over that of the batch as one weight.

    The ratio compares with the fastest peer of the same map in the same table: 2 means twice as fast as it. The error
    is ||W^H W - I||_F, computed in float64, over what rounding an exact frame costs.

    --launches times nothing: it counts the operators that a GPU would launch, and those that it would be waited for.
    """
    from stiefelkit.measuring.races.frames import races

    for package, names in plan.missing_peers().items():
        words = f'{", ".join(names)}; {package} is not installed: pip install "stiefelkit[peers]"'
        print(f"Left out: {words}", file=sys.stderr)
    return _raced(races, plan, _frames, json)


@app.command(name="optimizers")
@options(plan=OptimizerRace)
def optimizers(*, plan: OptimizerRace, json: RowsFile = None) -> int:
    """Races the optimizers that move a frame itself, and geoopt's, on this machine.

    Timed is one optimizer.step() on one frame, or on one batch of frames. All move frames of their own from the same
    Haar draw, in turns in one process, after a warm-up; medians are shown. Time and unit are those of the race of
    parametrizations.

    16 gradients with E |g|^2 = 1/n, the same for all, take turns, so that the steps stay as long as they are. The
    learning rate makes the first one turn the frame by --step-length: lr ||B||_2, B = G W^H - W G^H, for the
    multiplicative Cayley update, and what is as long as that for the others, found by a tiny step in float64. Our
    optimizers have no momentum here but Adam's, as geoopt's have none.

    With --apart the frames of the batch race also as parameters of their own, in one group of one optimizer; "/ batch"
    is the time over that of the batch as one parameter.

    The ratio compares with the faster of geoopt's RiemannianSGD, in the canonical and the Euclidean metric: 2 means
    twice as fast as it. "exact/fast" is the time of the exact optimizer over that of the same in precision fast. The
    error is ||W^H W - I||_F, computed in float64, after all steps of the race, over what rounding an exact frame costs.
    """
    from stiefelkit.measuring.races.frames import races

    return _raced(races, plan, _frames, json)


@app.command(name="growth")
@options(plan=GrowthPlan)
def growth(*, plan: GrowthPlan, json: RowsFile = None) -> int:
    """Fits how time and memory of the parametrizations grow, and compares it with what they declare.

    Against n, and against the number of matrices (64 x 64), it is the forward and backward of the map. Against T
    (16 sequences) and the batch (64 steps) it is that of OrthogonalRNN(8, 64) with that map in it; against reflections
    (one sequence, 128 steps) that of OrthogonalRNN(8, 1024), where W stays a product of reflectors.

    The exponent is that of the least-squares line through log time, or log memory, over log n; +- is its standard
    error. Points at the low end from which the next costs less than half of what the expected exponent says are
    overhead, and left out; the table names the range of the fit, and up to where overhead dominates.

    "expected" is the cost exponent in its traits for time against n, 2 for memory against n, else 1.
    "faster": yes where it grows faster than that by more than twice the spread and what a factor log n could add.

    Time is measured as in the other races. Memory is the most that torch has allocated at once, beyond what was there
    before.
    """
    from stiefelkit.measuring.races.growth import races

    return _raced(races, plan, _growth, json)


@app.command(name="norms")
@options(plan=NormPlan)
def norms(*, plan: NormPlan, json: RowsFile = None) -> int:
    """Shows how orthogonal frames are where coordinates are large.

    The coordinates are drawn as in the race of the parametrizations, then multiplied by each factor. Shown is
    ||W^H W - I||_F, computed in float64, over what rounding an exact frame costs. Where the coordinate is the frame
    itself there is nothing to multiply.
    """
    from stiefelkit.measuring.races.frames import races

    return _raced(races, plan, _norms, json)


def _raced(
    races: "Callable[[Any, Watch], Iterator[Race]]",
    plan: Any,
    show: Callable[[Any, Any], RenderableType],
    json: Path | None,
) -> int:
    """Prints each table when its race is over, and writes the rows."""
    from stiefelkit.measuring.races.field import by_reason, check_place, write_rows

    if json is not None:
        check_place(json)
    console = Screen()
    rows, printed, reasons = [], set(), {}
    with Bar(console) as bar:
        for race in races(plan, bar.show):
            bar.hide()
            if race.rows:
                console.print(show(plan, race))
            for reason, names in by_reason(race.left_out).items():
                words = f"Left out: {', '.join(names)}: {reason}"
                if words not in printed:
                    console.print(words, soft_wrap=True)
                printed.add(words)
                reasons[reason] = None
            rows += race.rows
            if json is not None and rows:
                write_rows(json, rows)
    if not rows:
        why = f"; {next(iter(reasons))}" if reasons else "."
        raise OptionError(f"{WHO} needs a contender that does what is asked in {plan.dtype}, got none{why}")
    if json is not None:
        console.print(f"Data: {json}", soft_wrap=True)
    return 0


def _three_digits(value: float | str | None) -> str:
    """Returns three digits or all of the integer part, and never an exponent; a dash for what there is not."""
    if value is None or isinstance(value, str):
        return value or "-"
    decimals = next((d for d, bound in ((0, 99.5), (1, 9.95), (2, 0.995)) if abs(value) >= bound), 3)
    return f"{value:,.{decimals}f}"


def _table(
    title: str,
    caption: str,
    rows: "list[Row]",
    columns: Columns,
    named: "Callable[[Row], str]" = lambda row: row.contender,
    first: str = "contender",
    is_divided: bool = True,
) -> Table:
    """Returns a table with a line between families, or else between ours and peers, if it is divided."""
    table = Table(title=title, caption=caption)
    table.add_column(first, no_wrap=True)
    for heading, _ in columns:
        table.add_column(heading, justify="right")
    for row, after in zip(rows, [*rows[1:], rows[-1]], strict=True):
        is_last = is_divided and (row.family or row.is_peer) != (after.family or after.is_peer)
        table.add_row(named(row), *(_three_digits(show(row)) for _, show in columns), end_section=is_last)
    return table


def _frames(plan: TimedPlan, race: "Race") -> Table:
    title = f"{race.operation}, {race.subject}, {plan.dtype}"
    if plan.launches:
        caption = "operators that a device launches, and those that it is waited for; on a CPU by the road of a device"
        columns: Columns = [("launches", lambda row: str(row["launches"])), ("reads", lambda row: str(row["reads"]))]
        return _table(title, caption, race.rows, columns)
    seconds = {row.contender: row["seconds"] for row in race.rows}

    def over(row: "Row", name: str) -> float | None:
        """Returns the time of a contender over that of another, if it races."""
        return seconds[row.contender] / seconds[name] if name != row.contender and name in seconds else None

    columns = [
        ("ms", lambda row: 1e3 * row["seconds"]),
        ("g", lambda row: row["gemm_units"]),
        ("ratio", lambda row: row["ratio_to_best_peer"]),
        ("error", lambda row: row["error_over_limit"]),
    ]
    if isinstance(plan, OptimizerRace) and len(plan.precisions) != 1:
        columns.append(("exact/fast", lambda row: over(row, row.contender.replace("(exact", "(fast"))))
    if plan.apart:
        columns.append(("/ batch", lambda row: over(row, re.sub(", (apart|grouped)$", "", row.contender))))
    caption = f"g = {_three_digits(1e6 * race.unit)} µs; ratio to the best peer; error in rounding limits"
    return _table(f"{title}, {plan.device}", caption, race.rows, columns)


def _growth(plan: GrowthPlan, race: "Race") -> Table:
    points = plan.points(race.subject)
    title = f"{race.operation} against {race.subject}, {points[0]} to {points[-1]}, {plan.device}"

    def named(row: "Row") -> str:
        name = row.contender + (f" ({row['precision']})" if row["precision"] not in (None, "exact") else "")
        return name + (f", {row['dtype']}" if row["dtype"] != plan.dtype else "")

    def exponent(row: "Row") -> str | None:
        spread = "" if row["spread"] is None else f" +- {row['spread']:.2f}"
        return None if row["exponent"] is None else f"{row['exponent']:.2f}{spread}"

    columns: Columns = [
        ("exponent", exponent),
        ("range", lambda row: None if row["first"] is None else f"{row['first']:g} to {row['last']:g}"),
        ("overhead", lambda row: None if row["overhead_until"] is None else f"to {row['overhead_until']:g}"),
        ("expected", lambda row: f"{row['expected']:g}"),
        ("faster", lambda row: None if row["exponent"] is None else "yes" if row["faster"] else "no"),
    ]
    table = _table(title, f"{AXES[race.subject]}; the exponent fitted over the range", race.rows, columns, named)
    table.min_width = len(title)
    return table


def _norms(plan: NormPlan, race: "Race") -> Table:
    title = f"error over the limit, {race.subject}, {plan.dtype}, {plan.device}"
    caption = "||W^H W - I||_F in rounding limits; the columns: what the coordinates are multiplied by"

    def error(row: "Row", i: int) -> str:
        found = row["errors_over_limit"][i]
        return "NaN" if found is None else f"{found:.3g}"

    columns: Columns = [(f"x {factor:g}", lambda row, i=i: error(row, i)) for i, factor in enumerate(plan.factors)]
    return _table(title, caption, race.rows, columns)


def _scan(plan: ScanRace, race: "Race") -> RenderableType:
    from stiefelkit.measuring.races.recurrences import LOOP

    title, limit = f"{race.subject}, {plan.activation}, {plan.dtype}, {plan.device}", _three_digits(1e3 * race.unit)
    timed: Columns = [("ms", lambda row: 1e3 * row["seconds"]), ("/ LIMIT", lambda row: row["limit_units"])]
    if race.operation == "training_step":
        step, alone = race.rows
        share = f"{1 - alone['seconds'] / step['seconds']:.1%}"
        columns: Columns = [*timed, ("outside the scan", lambda row: share if row is step else None)]
        title = f"training step of {step.contender}, {race.subject}, {plan.device}"
        table = _table(title, f"LIMIT = {limit} ms", race.rows, columns, first="what")
        table.min_width = len(title)
        return table
    columns = [("n", lambda row: str(row["n"])), *timed, ("ours x", lambda row: row["time_over_ours"])]
    tables = [_table(title, f"LIMIT = {limit} ms; ours x: time over that of our scan", race.rows, columns)]
    tables[0].min_width = len(title)
    if any(row["memory_sequence"] is not None or row["memory_last_state"] is not None for row in race.rows):
        loop = next((row for row in race.rows if row.contender == LOOP), None)

        def over_loop(row: "Row", name: str) -> float | None:
            return row[name] / loop[name] if row[name] is not None and loop and loop[name] else None

        columns = []
        for heading, name in (("last state", "memory_last_state"), ("sequence", "memory_sequence")):
            columns.append((heading, lambda row, name=name: row[name] and row[name] / 1e6))
            columns.append((f"/ {LOOP}", lambda row, name=name: over_loop(row, name)))
        caption = f"MB above what was there before; / {LOOP}: over that of the same loss"
        rows = [row for row in race.rows if row["operation"] == "sequence"]
        tables.append(_table(f"peak memory, {title}", caption, rows, columns, is_divided=False))
    return Group(*tables)


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
        console.print(_drift(plan, outcome.curves))
    for curve in outcome.curves:
        lost = next((s for s, e in zip(curve.steps, curve.errors, strict=True) if not math.isfinite(e)), None)
        if lost is not None:
            console.print(f"{curve.method} at {curve.n} x {curve.p} is NaN or infinite from step {lost} on.")
    for skipped in outcome.skipped:
        console.print(f"Skipped {skipped.method} at {skipped.n} x {skipped.p}: {skipped.reason}", soft_wrap=True)
    for file in outcome.files:
        console.print(f"{'Data' if file.suffix == '.json' else 'Figure'}: {file}", soft_wrap=True)
    return 0


def _drift(plan: DriftPlan, curves: "list[DriftCurve]") -> Table:
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


@options(plan=ReportPlan)
def report(
    *,
    plan: ReportPlan,
    out: Path = Path("report.html"),
    json: Path | None = None,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
) -> int:
    """Measures and writes; the words of its help stand in the table of commands.

    Args:
        plan: what to measure.
        out: the page, overwritten.
        json: file for the figures, overwritten after each section; its "finished" says whether all are there.
        from_: draw the page of a file that `python -m benchmarks.gpu` has written, and measure nothing.
    """
    from stiefelkit.measuring.races.field import check_place
    from stiefelkit.measuring.report.findings import gather
    from stiefelkit.measuring.report.page import page, record_page
    from stiefelkit.training.files import write_atomically, write_json

    for place in (out, json):
        if place is not None:
            check_place(place)
    console = Screen()
    if from_ is not None:
        from jinja2 import TemplateError

        from stiefelkit.measuring.report.record import WHO, read_record

        if json is not None:
            raise OptionError("A page from a file measures nothing; leave --json out.")
        record = read_record(from_)
        try:
            drawn = record_page(record)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
            raise RunError(f"{WHO} needs a file as benchmarks.gpu wrote it, got {from_}: {error!r:.200}.") from error
        write_atomically(out, drawn.encode())
        console.print(f"Page: {out}", soft_wrap=True)
        return 0
    findings = None
    with Bar(console) as bar:
        for findings in gather(plan, bar.show):
            bar.hide()
            section, seconds = list(findings.seconds.items())[-1]
            console.print(f"{section}: {seconds:.0f} s")
            if json is not None:
                write_json(json, findings.json())
    assert findings is not None
    write_atomically(out, page(findings).encode())
    console.print(f"Page: {out}", soft_wrap=True)
    if json is not None:
        console.print(f"Data: {json}", soft_wrap=True)
    return 0
