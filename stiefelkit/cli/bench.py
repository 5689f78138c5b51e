"""`stiefelkit bench RACE`."""

import sys
from typing import TYPE_CHECKING

from cyclopts import App
from rich.table import Table

from stiefelkit.cli.app import DEFAULTS
from stiefelkit.cli.bench_scan import scan
from stiefelkit.cli.open_options import of_plan
from stiefelkit.cli.races import RowsFile, raced, table_of, three_digits
from stiefelkit.measuring.races.plan import AXES, GrowthPlan, NormPlan, OptimizerRace, ParametrizationRace, TimedPlan

if TYPE_CHECKING:
    from stiefelkit.measuring.races.field import Race, Row

__all__ = ["app"]

app = App(name="bench", help="Race implementations on this machine.", default_parameter=DEFAULTS)
app.command(scan, name="scan")


@app.command(name="parametrizations")
@of_plan(ParametrizationRace)
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
    return raced(races, plan, _launches if plan.launches else _table, json)


@app.command(name="optimizers")
@of_plan(OptimizerRace)
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

    return raced(races, plan, _launches if plan.launches else _table, json)


def _launches(plan: TimedPlan, race: "Race") -> Table:
    title = f"{race.operation}, {race.subject}, {plan.dtype}"
    caption = "operators that a device launches, and those that it is waited for; on a CPU by the road of a device"
    table = table_of(title, caption, ["contender"], ["launches", "reads"])
    for row in race.rows:
        table.add_row(row.contender, str(row["launches"]), str(row["reads"]))
    return table


def _table(plan: TimedPlan, race: "Race") -> Table:
    title = f"{race.operation}, {race.subject}, {plan.dtype}, {plan.device}"
    caption = f"g = {three_digits(1e6 * race.unit)} µs; ratio to the best peer; error in rounding limits"
    compares = isinstance(plan, OptimizerRace) and len(plan.precisions) != 1
    columns = ["ms", "g", "ratio", "error", *(["exact/fast"] if compares else [])]
    columns += ["/ batch"] if plan.apart else []
    table = table_of(title, caption, ["contender"], columns)
    of_fast, of_batch = _exact_over_fast(race.rows), _apart_over_batch(race.rows)
    for row, after in zip(race.rows, [*race.rows[1:], None], strict=True):
        figures = [1e3 * row["seconds"], row["gemm_units"], row["ratio_to_best_peer"], row["error_over_limit"]]
        figures += [of_fast.get(row.contender)] if compares else []
        figures += [of_batch.get(row.contender)] if plan.apart else []
        table.add_row(
            row.contender, *map(three_digits, figures), end_section=after is None or row.family != after.family
        )
    return table


def _exact_over_fast(rows: "list[Row]") -> dict[str, float]:
    """Time of each exact contender over that of the same in precision fast."""
    seconds = {row.contender: row["seconds"] for row in rows}
    pairs = {name: name.replace("(exact", "(fast") for name in seconds if "(exact" in name}
    return {name: seconds[name] / seconds[fast] for name, fast in pairs.items() if fast in seconds}


def _apart_over_batch(rows: "list[Row]") -> dict[str, float]:
    """Time of each contender whose frames are apart over that of the same with a batch."""
    seconds = {row.contender: row["seconds"] for row in rows}
    pairs = {name: name.removesuffix(", apart").removesuffix(", grouped") for name in seconds}
    return {name: seconds[name] / seconds[batch] for name, batch in pairs.items() if batch in seconds and batch != name}


@app.command(name="growth")
@of_plan(GrowthPlan)
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

    return raced(races, plan, _growth, json)


def _growth(plan: GrowthPlan, race: "Race") -> Table:
    points = plan.points(race.subject)
    title = f"{race.operation} against {race.subject}, {points[0]} to {points[-1]}, {plan.device}"
    caption = f"{AXES[race.subject]}; the exponent fitted over the range"
    table = table_of(title, caption, ["contender"], ["exponent", "range", "overhead", "expected", "faster"])
    table.min_width = len(title)
    for row in race.rows:
        name = row.contender + (f" ({row['precision']})" if row["precision"] not in (None, "exact") else "")
        name += f", {row['dtype']}" if row["dtype"] != plan.dtype else ""
        exponent = "-" if row["exponent"] is None else f"{row['exponent']:.2f}"
        exponent += "" if row["spread"] is None else f" +- {row['spread']:.2f}"
        fitted = "-" if row["first"] is None else f"{row['first']:g} to {row['last']:g}"
        overhead = "-" if row["overhead_until"] is None else f"to {row['overhead_until']:g}"
        faster = "-" if row["exponent"] is None else "yes" if row["faster"] else "no"
        table.add_row(name, exponent, fitted, overhead, f"{row['expected']:g}", faster)
    return table


@app.command(name="norms")
@of_plan(NormPlan)
def norms(*, plan: NormPlan, json: RowsFile = None) -> int:
    """Shows how orthogonal frames are where coordinates are large.

    The coordinates are drawn as in the race of the parametrizations, then multiplied by each factor. Shown is
    ||W^H W - I||_F, computed in float64, over what rounding an exact frame costs. Where the coordinate is the frame
    itself there is nothing to multiply.
    """
    from stiefelkit.measuring.races.frames import races

    return raced(races, plan, _norms, json)


def _norms(plan: NormPlan, race: "Race") -> Table:
    title = f"error over the limit, {race.subject}, {plan.dtype}, {plan.device}"
    caption = "||W^H W - I||_F in rounding limits; the columns: what the coordinates are multiplied by"
    table = table_of(title, caption, ["contender"], [f"x {factor:g}" for factor in plan.factors])
    for row, after in zip(race.rows, [*race.rows[1:], None], strict=True):
        figures = ["NaN" if error is None else f"{error:.3g}" for error in row["errors_over_limit"]]
        table.add_row(row.contender, *figures, end_section=after is None or row.family != after.family)
    return table
