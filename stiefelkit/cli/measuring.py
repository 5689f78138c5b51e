"""`stiefelkit drift`, `stiefelkit bench RACE` and `stiefelkit report`: they measure, and print tables of it."""

import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from cyclopts import App, Parameter
from rich.table import Table

from stiefelkit.cli.options import DEFAULTS, Options, asked
from stiefelkit.errors import OptionError
from stiefelkit.figure import Figures
from stiefelkit.measuring.plans import DriftPlan, FramePlan, OptimizerRace, ParametrizationRace, ReportPlan, ScanRace
from stiefelkit.training.display import Bar, Screen, say

if TYPE_CHECKING:
    from stiefelkit.measuring.contest import ProgressCallback, Race
    from stiefelkit.measuring.tables import Table as Measured

P = TypeVar("P", bound=FramePlan | ScanRace | DriftPlan)
RowsFile = Annotated[Path | None, Parameter(help="file for the rows, overwritten.")]

app = App(name="bench", help="Race implementations on this machine.", default_parameter=DEFAULTS)


@app.command
def scan(*, plan: Options[ScanRace] = None, json: RowsFile = None) -> None:
    """Races the scan h_t = act(x_t U^T + h_{t-1} W^T), forward and backward, on this machine.

    Timed is the forward, and the backward to W, U and the bias from a dense dL/dh at every step; "last state" has
    dL/dh_T alone. All run in turns in one process, after a warm-up; medians are shown. Unit: LIMIT, the matrix products
    that no scan can do without: T of (B, n) by (n, n) forward, T backward, and one (n, TB) by (TB, n).

    "ours x" is the time over that of our scan: 2 means that ours is twice as fast. docs/benchmarks.md has the
    cases, and what is drawn.
    """
    from stiefelkit.measuring.scan import races

    _raced(plan or ScanRace(), races, json)


@app.command
def parametrizations(*, plan: Options[ParametrizationRace] = None, json: RowsFile = None) -> None:
    """Races the parametrizations of the registry, and other implementations of the same maps, on this machine.

    All run in turns in one process, after a warm-up; medians are shown. Time is process CPU time, or that between CUDA
    events. Unit: g is one product of an n x p with a p x p matrix of that dtype, measured in the same turns.

    "forward" computes the frame without gradients; "forward_backward" gives the gradient of its coordinates for a fixed
    random dL/dW; "step" is zero_grad, the same, and a step of torch.optim.SGD. The ratio compares with the fastest peer
    of the same map in the same table: 2 means twice as fast as it. The error is ||W^H W - I||_F over what rounding an
    exact frame costs.
    """
    from stiefelkit.measuring.frames import races

    _raced(plan or ParametrizationRace(), races, json)


@app.command
def optimizers(*, plan: Options[OptimizerRace] = None, json: RowsFile = None) -> None:
    """Races the optimizers that move a frame itself, and geoopt's, on this machine.

    Timed is one optimizer.step() on one frame, or on one batch of frames. All move frames of their own from the same
    Haar draw by the same 16 gradients in turns, without momentum but Adam's, at the learning rate by which the first
    step turns the frame by --step-length. Time and unit are those of the race of parametrizations; the ratio compares
    with the faster of geoopt's RiemannianSGD, and the error is that after all steps of the race.
    """
    from stiefelkit.measuring.frames import races

    _raced(plan or OptimizerRace(), races, json)


def _raced(plan: P, races: "Callable[[P, ProgressCallback], Iterator[Race]]", json: Path | None) -> "list[Race]":
    """Races, prints each table when its race is over, writes the rows, and returns all."""
    from stiefelkit.files import write_json
    from stiefelkit.measuring.contest import NO_TIME, by_reason, check_place
    from stiefelkit.measuring.tables import of_race

    if json is not None:
        check_place(json)
    console, done, rows, said = Screen(), list["Race"](), [], {}
    late: dict[str, list[str]] = {}
    with Bar(console) as bar:
        for race in races(plan, bar.show):
            bar.stop()
            if race.rows:
                console.print(_rendered(of_race(race)))
            for reason, names in by_reason(race.left_out).items():
                if reason == NO_TIME:
                    late[f"{race.operation}, {race.subject}"] = names
                elif (words := f"Left out: {', '.join(names)}: {reason}") not in said:
                    console.print(words, soft_wrap=True)
                    said[words] = reason
            done.append(race)
            rows += race.rows
            if json is not None and rows:
                write_json(json, [row.figures for row in rows])
    _say_late(console, late.items())
    if not rows and not late:
        why = f"; {next(iter(said.values()))}" if said else "."
        raise OptionError(f"{plan.subject} needs something that can do this in {plan.dtype}, got nothing{why}")
    if json is not None and rows:
        console.print(f"Data: {json}", soft_wrap=True)
    return done


def _say_late(console: Screen, places: Iterable[tuple[str, list[str]]]) -> None:
    """Names what a quick form had no time for, place by place, and the command that measures it."""
    from stiefelkit.measuring.contest import NO_TIME

    late = [(place, names) for place, names in places if names]
    for place, names in late:
        console.print(f"Left out of {place}: {'; '.join(names)}: {NO_TIME}", soft_wrap=True)
    if late:
        words = [word for word in asked.get() if word != "--quick"]
        console.print(f"To measure all: {shlex.join(['stiefelkit', *words])}", soft_wrap=True)


def _rendered(table: "Measured") -> Table:
    """Returns a table of measurements for a terminal, with a line where a group begins."""
    drawn = Table(title=table.title, caption=table.note, min_width=len(table.title))
    for number, heading in enumerate(table.columns):
        is_head = number == 0
        drawn.add_column(heading, no_wrap=is_head, justify="left" if is_head else "right")
    for row, after in zip(table.rows, [*table.rows[1:], None], strict=True):
        drawn.add_row(row.head, *row.cells, end_section=after is not None and after.opens)
    return drawn


def drift(
    *,
    plan: Options[DriftPlan] = None,
    out: Path = Path("runs/drift"),
    figures: Options[Figures] = None,
    fail_above: float | None = None,
) -> int:
    """Measure how weights keep orthogonality.

    Each weight is taken through many optimizer steps: parametrizations by --optimizer; "unconstrained", a plain weight;
    optimizers that move the frame itself, in precision exact, or fast as in multiplicative_cayley:fast, and geoopt's
    (geoopt_sgd_canonical, geoopt_sgd_euclidean, geoopt_adam_canonical, geoopt_adam_euclidean), without momentum. The
    table shows the largest ||W^H W - I||_F up to a step over the error of rounding an exact frame. drift.json is
    replaced after each method. With --quick it makes at most 100 steps, in a minute.

    Args:
        plan: what to measure.
        out: folder for drift.json and drift.png; one that has a drift.json is refused.
        figures: how the figure is written.
        fail_above: bits of orthogonality; the exit status is 1 if a method loses more at its worst step or is left out.
            Those given by import path are held to it, or all if there is none.
    """
    from stiefelkit.measuring.drift import failures, measure

    plan, figures = plan or DriftPlan(), figures or Figures()
    done = _raced(plan, lambda plan, watch: measure(plan, out, figures, watch), None)
    if (record := out / "drift.json").exists():
        say(f"Data: {record}")
        say(f"Figure: {figures.path(out, 'drift')}")
    failed = [] if fail_above is None else failures(plan, done, fail_above)
    for words in failed:
        say(f"Above the limit: {words}")
    return int(bool(failed))


def report(
    *,
    plan: Options[ReportPlan] = None,
    out: Path = Path("report.html"),
    json: Path | None = None,
    from_: Annotated[Path | None, Parameter(name="--from")] = None,
) -> int:
    """Measure this machine, and write one page about it.

    The page is one file of HTML that needs no network: the machine; drift against optimizer steps; time against n, with
    the time of one matrix product and its ratio to other implementations; and the scan's four cases. It takes a few
    minutes, and under a minute with --quick, which names what it has no time for. The page is written at the end: a
    command stopped by Ctrl-C leaves an older one unchanged.

    Args:
        plan: what to measure.
        out: the page, overwritten.
        json: file for the figures, overwritten after each section; its "finished" says whether all are there.
        from_: draw the page of a file that --json or `python -m benchmarks.gpu` has written, and measure nothing.
    """
    from stiefelkit.files import write_atomically
    from stiefelkit.measuring.contest import check_place
    from stiefelkit.measuring.report import gather, read_record

    for place in filter(None, (out, json)):
        check_place(place)
    plan, console = plan or ReportPlan(), Screen()
    if from_ is not None:
        if json is not None:
            raise OptionError("--from measures nothing that --json could store; leave --json out.")
        record = read_record(from_)
    else:
        command = shlex.join(["stiefelkit", *asked.get()])
        with Bar(console) as bar:
            for record in gather(plan, command, bar.show):
                bar.stop()
                console.print(f"{record.parts[-1].name}: {record.parts[-1].seconds:.0f} s")
                if json is not None:
                    record.write(json)
        _say_late(console, [(part.name, part.late) for part in record.parts])
    write_atomically(out, record.page().encode())
    console.print(f"Page: {out}", soft_wrap=True)
    if json is not None:
        console.print(f"Data: {json}", soft_wrap=True)
    return 0
