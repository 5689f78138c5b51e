"""`stiefelkit drift`, `stiefelkit bench RACE` and `stiefelkit report`: they measure, and print tables of it."""

import contextlib
import dataclasses
import math
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.table import Table

from stiefelkit.cli.options import DEFAULTS, Options, asked, began
from stiefelkit.errors import OptionError, RunError, StiefelkitError
from stiefelkit.measuring.drift.plan import DriftPlan
from stiefelkit.measuring.races import SUBJECT
from stiefelkit.measuring.races.plan import GrowthPlan, NormPlan, OptimizerRace, ParametrizationRace, ScanRace
from stiefelkit.measuring.report.plan import ReportPlan
from stiefelkit.training.display import Bar, Screen
from stiefelkit.training.figure import Figures

if TYPE_CHECKING:
    from stiefelkit.measuring.races.schedule import Course, Deadline
    from stiefelkit.measuring.tables import Table as Measured

RowsFile = Annotated[Path | None, Parameter(help="file for the rows, overwritten.")]

app = App(name="bench", help="Race implementations on this machine.", default_parameter=DEFAULTS)


@app.command
def scan(*, plan: Options[ScanRace] = None, json: RowsFile = None) -> int:
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
    return _raced(plan or ScanRace(), json)


@app.command
def parametrizations(*, plan: Options[ParametrizationRace] = None, json: RowsFile = None) -> int:
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
    plan = plan or ParametrizationRace()
    for package, names in plan.missing_peers().items():
        words = f'{", ".join(names)}; {package} is not installed: pip install "stiefelkit[peers]"'
        print(f"Left out: {words}", file=sys.stderr)
    return _raced(plan, json)


@app.command
def optimizers(*, plan: Options[OptimizerRace] = None, json: RowsFile = None) -> int:
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
    return _raced(plan or OptimizerRace(), json)


@app.command
def growth(*, plan: Options[GrowthPlan] = None, json: RowsFile = None) -> int:
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
    return _raced(plan or GrowthPlan(), json)


@app.command
def norms(*, plan: Options[NormPlan] = None, json: RowsFile = None) -> int:
    """Shows how orthogonal frames are where coordinates are large.

    The coordinates are drawn as in the race of the parametrizations, then multiplied by each factor. Shown is
    ||W^H W - I||_F, computed in float64, over what rounding an exact frame costs. Where the coordinate is the frame
    itself there is nothing to multiply.
    """
    return _raced(plan or NormPlan(), json)


class _Progress(Bar):
    """A bar that says how long a plan takes before it begins, and how much time is left while it goes on."""

    def __init__(self, console: Screen, is_quick: bool):
        from stiefelkit.measuring.races import schedule

        super().__init__(console)
        self._in_words = schedule.in_words
        self.course: Course | None = None
        self.deadline: Deadline | None = None
        if is_quick:
            # What is drawn at the end may take as long as the start did.
            startup = monotonic() - began.get(monotonic())
            self.deadline = schedule.Deadline(max(schedule.QUICK - startup - min(startup, 5.0), 0.0))
            console.print("Quick form: it ends in under a minute, and names what it has no time for.", soft_wrap=True)

    def begin(self, course: "Course") -> None:
        """Takes the parts of a measurement, and says how long they take if that is known."""
        self.course = course
        if course.total:
            shorter = "; --quick ends in under a minute" if self.deadline is None and course.total > 45 else ""
            self._console.print(f"About {self._in_words(course.total)} on this machine{shorter}.", soft_wrap=True)

    def watch(self, what: str, done: int, rounds: int) -> None:
        """Moves the bar, with the time that is left."""
        left = self.course.left(done / max(rounds, 1)) if self.course else math.inf
        if self.deadline is not None:
            left = self.deadline.left
        words = [f"about {self._in_words(left)} left"] if math.isfinite(left) else []
        self.show(what, done, rounds, words)


def _say_left_out(console: Screen, places: "Iterable[tuple[str, list[str]]]", command: str) -> None:
    """Names what a quick form had no time for, place by place, and the command that measures it."""
    from stiefelkit.measuring.races.schedule import NO_TIME

    for place, names in places:
        console.print(f"Left out of {place}: {'; '.join(names)}: {NO_TIME}", soft_wrap=True)
    console.print(f"To measure what was left out: {command}", soft_wrap=True)


def _say_complex(console: Screen, words: str, plan: Any, names: Iterable[str], out: Path | None = None) -> None:
    """Names the command that measures the parametrizations which were left out because they need a complex weight."""
    import torch

    from stiefelkit.measuring.races.contenders import dtype_of
    from stiefelkit.measuring.report.plan import command
    from stiefelkit.weights.attach import available

    known, own = available(), getattr(torch, plan.dtype)
    apart = tuple(name for name in dict.fromkeys(names) if name in known and dtype_of(known[name], own) != own)
    if not apart:
        return
    dtype, which = str(own.to_complex()).removeprefix("torch."), "methods" if words == "drift" else "parametrizations"
    with contextlib.suppress(StiefelkitError):  # of options that none of them has
        there = dataclasses.replace(plan, dtype=dtype, **{which: apart})
        line = command(words, there, **({"out": f"{out}-{dtype}"} if out else {}))
        console.print(f"To measure {', '.join(apart)}: {line}", soft_wrap=True)


def _raced(plan: Any, json: Path | None) -> int:
    """Races, prints each table when its race is over, and writes the rows."""
    from stiefelkit.measuring.races import frames, growth, scan
    from stiefelkit.measuring.races.field import by_reason, check_place
    from stiefelkit.measuring.races.schedule import NO_TIME, Course, planned
    from stiefelkit.measuring.tables import of_race
    from stiefelkit.training.files import write_json

    if json is not None:
        check_place(json)
    room: Any = scan if isinstance(plan, ScanRace) else growth if isinstance(plan, GrowthPlan) else frames
    console, rows, said, late, apart = Screen(), [], {}, {}, []
    with _Progress(console, plan.quick) as progress:
        course = Course([] if plan.quick else planned(plan))
        progress.begin(course)
        for race in room.races(plan, progress.watch, progress.deadline):
            course.finished()
            progress.hide()
            if race.rows:
                has_shares = isinstance(plan, OptimizerRace) and len(plan.precisions) != 1
                console.print(*map(_rendered, of_race(race, plan.dtype, has_shares)), sep="\n")
            for reason, names in by_reason(race.left_out).items():
                if reason == NO_TIME:
                    late[f"{race.operation}, {race.subject}"] = names
                    continue
                apart += [name.partition(" (")[0] for name in names]
                words = f"Left out: {', '.join(names)}: {reason}"
                if words not in said:
                    console.print(words, soft_wrap=True)
                said[words] = reason
            rows += race.rows
            if json is not None and rows:
                write_json(json, [row.figures for row in rows])
    if isinstance(plan, ParametrizationRace | NormPlan):
        words = "bench norms" if isinstance(plan, NormPlan) else "bench parametrizations"
        _say_complex(console, words, plan, apart)
    if late:
        words = [word for word in asked.get() if word != "--quick"]
        _say_left_out(console, late.items(), shlex.join(["stiefelkit", *words]))
    if not rows and not late:
        why = f"; {next(iter(said.values()))}" if said else "."
        raise OptionError(f"{SUBJECT} needs a contender for these options in {plan.dtype}, got none{why}")
    if json is not None and rows:
        console.print(f"Data: {json}", soft_wrap=True)
    return 0


def _rendered(table: "Measured") -> Table:
    """Returns a table of measurements for a terminal, with a line where a group begins."""
    from stiefelkit.measuring.tables import three_digits

    def digits(cell: float | str | None) -> str:
        is_short = table.exponents and isinstance(cell, float)
        return ("NaN" if cell != cell else f"{cell:.3g}") if is_short else three_digits(cell)

    drawn = Table(title=table.title, caption=table.note, min_width=len(table.title))
    for number, heading in enumerate(table.columns):
        is_head = number == 0
        drawn.add_column(heading, no_wrap=is_head, justify="left" if is_head else "right")
    for row, after in zip(table.rows, [*table.rows[1:], None], strict=True):
        drawn.add_row(row.head, *map(digits, row.cells), end_section=after is not None and after.opens)
    return drawn


def drift(*, plan: Options[DriftPlan] = None, out: Path = Path("runs/drift"), figures: Options[Figures] = None) -> int:
    """Measure how weights keep orthogonality.

    Each weight is taken through many optimizer steps. Methods are parametrizations, trained by --optimizer;
    "unconstrained", a plain weight; optimizers that move the frame itself, in precision exact, or fast as in
    multiplicative_cayley:fast; and geoopt's (geoopt_sgd_canonical, geoopt_sgd_euclidean, geoopt_adam_canonical,
    geoopt_adam_euclidean). Optimizers of frames have no momentum here, and a learning rate for which the first step has
    the length --step-length.

    It says first how long it takes on this machine; with --quick, which makes fewer steps, that is under a minute.

    The table shows the largest ||W^H W - I||_F, computed in float64, up to a step, over the error of rounding an exact
    frame; the figure shows the largest between two of its points. drift.json is replaced after each method, so Ctrl-C
    loses only the current one.

    Args:
        plan: what to measure.
        out: folder for drift.json and drift.png; one that has a drift.json is refused.
        figures: how the figure is written.
    """
    from stiefelkit.measuring.drift.run import measure
    from stiefelkit.measuring.races.schedule import NO_TIME
    from stiefelkit.measuring.report.plan import command
    from stiefelkit.measuring.tables import of_drift

    plan, figures = plan or DriftPlan(), figures or Figures()
    console = Screen()
    with _Progress(console, plan.quick) as progress:

        def begin(chosen: DriftPlan, course: "Course") -> None:
            if chosen.steps < plan.steps:
                words = f"{chosen.steps} steps of {plan.steps}, as many as fit"
                console.print(f"{words}; for all: {command('drift', plan, out=f'{out}-all')}", soft_wrap=True)
            progress.begin(course)

        outcome = measure(plan, out, progress.watch, figures, progress.deadline, begin)
    if outcome.curves:
        note = f"parametrizations: {plan.optimizer} at {plan.lr:g}; frames: steps of {plan.step_length:g}"
        console.print(_rendered(of_drift(outcome.curves, f"{plan.gradients} gradients", note)))
    for curve in outcome.curves:
        lost = next((s for s, e in zip(curve.steps, curve.errors, strict=True) if not math.isfinite(e)), None)
        if lost is not None:
            console.print(f"{curve.method} at {curve.n} x {curve.p} is NaN or infinite from step {lost} on.")
    late: dict[str, list[str]] = {}
    apart: list[str] = []
    for skipped in outcome.skipped:
        if skipped.reason == NO_TIME:
            late.setdefault(f"{skipped.n} x {skipped.p}", []).append(skipped.method)
            continue
        console.print(f"Skipped {skipped.method} at {skipped.n} x {skipped.p}: {skipped.reason}", soft_wrap=True)
        apart.append(skipped.method)
    _say_complex(console, "drift", plan, apart, out)
    if apart and not (outcome.curves or late):
        raise OptionError(f"The drift experiment needs a method that can do this in {plan.dtype}, got none.")
    if late:
        methods = tuple(dict.fromkeys(name for names in late.values() for name in names))
        rest = dataclasses.replace(plan, methods=methods)
        _say_left_out(console, late.items(), command("drift", rest, out=f"{out}-rest"))
    for file in outcome.files:
        console.print(f"{'Data' if file.suffix == '.json' else 'Figure'}: {file}", soft_wrap=True)
    return 0


def report(
    *,
    plan: Options[ReportPlan] = None,
    out: Path = Path("report.html"),
    json: Path | None = None,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
) -> int:
    """Measure this machine, and write one page about it.

    The page is one file of HTML that needs no network: the machine; drift against optimizer steps; time against n, with
    the time of one matrix product, and its ratio to other implementations; how time and memory grow; errors against the
    norm of the coordinates; and the scan's four cases. Each part names the command that makes it alone.

    It says first how long it takes on this machine: a few minutes, most of an hour with --full, and under a minute with
    --quick, which names what it has no time for.

    The page is written when everything is measured, the file of --json after each part. A command stopped by Ctrl-C
    leaves an older page unchanged. --from FILE measures nothing, and draws what `python -m benchmarks.gpu` has measured
    on a GPU.

    Args:
        plan: what to measure.
        out: the page, overwritten.
        json: file for the figures, overwritten after each section; its "finished" says whether all are there.
        from_: draw the page of a file that `python -m benchmarks.gpu` has written, and measure nothing.
    """
    from stiefelkit.measuring.races.field import by_reason, check_place
    from stiefelkit.measuring.races.schedule import NO_TIME, Course
    from stiefelkit.measuring.report.findings import course_of, gather
    from stiefelkit.measuring.report.page import page, record_page
    from stiefelkit.training.files import write_atomically, write_json

    for place in filter(None, (out, json)):
        check_place(place)
    console = Screen()
    if from_ is not None:
        from jinja2 import TemplateError

        from stiefelkit.measuring.report.record import SUBJECT, read_record

        if json is not None:
            raise OptionError("--from measures nothing that --json could store; leave --json out.")
        record = read_record(from_)
        try:
            drawn = record_page(record)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
            raise RunError(
                f"{SUBJECT} needs a file as benchmarks.gpu wrote it, got {from_}: {error!r:.200}."
            ) from error
        write_atomically(out, drawn.encode())
        console.print(f"Page: {out}", soft_wrap=True)
        return 0
    plan, findings = plan or ReportPlan(), None
    with _Progress(console, plan.quick) as progress:
        course = Course([]) if plan.quick else course_of(plan)
        progress.begin(course)
        for findings in gather(plan, progress.watch, progress.deadline, course):
            progress.hide()
            section, seconds = list(findings.seconds.items())[-1]
            console.print(f"{section}: {seconds:.0f} s")
            if json is not None:
                write_json(json, findings.json())
    assert findings is not None
    for section, left_out in findings.left_out.items():
        late = by_reason(left_out).get(NO_TIME, [])
        if late:
            _say_left_out(console, [(section, late)], "; ".join(plan.commands(section)))
    write_atomically(out, page(findings).encode())
    console.print(f"Page: {out}", soft_wrap=True)
    if json is not None:
        console.print(f"Data: {json}", soft_wrap=True)
    return 0
