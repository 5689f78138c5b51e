"""`stiefelkit bench growth` and `stiefelkit bench norms`."""

from typing import TYPE_CHECKING

from rich.table import Table

from stiefelkit.cli.figures import table_of
from stiefelkit.cli.open_options import of_plan
from stiefelkit.cli.races import RowsFile, raced
from stiefelkit.measuring.growth.plan import AXES, GrowthPlan
from stiefelkit.measuring.races.plan import NormPlan

if TYPE_CHECKING:
    from stiefelkit.measuring.races.field import Race

__all__ = ["growth", "norms"]


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
    from stiefelkit.measuring.growth.measure import races

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
