"""`stiefelkit bench growth` and `stiefelkit bench norms`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.table import Table

from stiefelkit.cli.figures import table_of
from stiefelkit.cli.lists import integers_of, sizes_of, words_of
from stiefelkit.cli.open_options import whole
from stiefelkit.cli.races import raced

if TYPE_CHECKING:
    from stiefelkit.measuring.growth import measure as of_growth
    from stiefelkit.measuring.races import norms as of_norms

__all__ = ["growth", "norms"]


def growth(
    *,
    members: str = "",
    what: str = "time,memory",
    against: str = "n,matrices,T,batch",
    sizes: str = "64,128,256,512,1024",
    matrices: str = "1,4,16,64",
    steps: Annotated[str, Parameter(name=("--T", "--steps"))] = "128,256,512,1024",
    batches: str = "16,64,256,1024",
    precision: str = "exact",
    dtype: str = "float32",
    device: str = "cpu",
    repeats: Annotated[int, Parameter(converter=whole)] = 20,
    seconds: float = 0.3,
    threads: Annotated[int, Parameter(converter=whole)] = 1,
    seed: Annotated[int, Parameter(converter=whole)] = 0,
    json: Path | None = None,
) -> int:
    """Fits how time and memory of the parametrizations grow, and compares it with what they declare.

    Against n, and against the number of matrices (64 x 64), it is the forward and backward of the map. Against T
    (16 sequences) and the batch (64 steps) it is that of OrthogonalRNN(8, 64) with that map in it. The exponent is that
    of the least-squares line through log time, or log memory, over log n; +- is its standard error. Points at the low
    end from which the next costs less than half of what the expected exponent says are overhead, and left out; the
    table names the range of the fit, and up to where overhead dominates.

    "expected" is the cost exponent in the traits of the member for time against n, 2 for memory against n, else 1.
    "faster": yes where it grows faster than that by more than twice the spread and what a factor log n could add.

    Time is measured as in the other races. Memory is the most that torch has allocated at once, beyond what was there
    before.

    Args:
        members: parametrizations, separated by commas; all if left out. One that is complex only is measured as such.
        what: time, memory, or both, separated by commas.
        against: n, matrices, T, batch, separated by commas.
        sizes: values of n, separated by commas.
        matrices: numbers of matrices.
        steps: values of T.
        batches: numbers of sequences.
        precision: exact or fast; members without fast are measured as exact.
        dtype: float32, float64, complex64 or complex128.
        device: cpu or cuda.
        repeats: samples of each contender at most.
        seconds: time for the samples of each contender; slow ones get five samples at least.
        threads: CPU threads.
        seed: fixes what is drawn.
        json: file for the rows, overwritten.
    """
    from stiefelkit.measuring.growth import measure as of_growth
    from stiefelkit.measuring.races.rows import check_place

    plan = of_growth.GrowthPlan(
        members=words_of(members),
        what=words_of(what),
        against=words_of(against),
        sizes=integers_of(sizes, "--sizes"),
        matrices=integers_of(matrices, "--matrices"),
        steps=integers_of(steps, "--T"),
        batches=integers_of(batches, "--batches"),
        precision=precision,
        dtype=dtype,
        device=device,
        repeats=repeats,
        seconds=seconds,
        threads=threads,
        seed=seed,
    )
    if json is not None:
        check_place(json)
    return raced(lambda watch: of_growth.heats(plan, watch), lambda heat: _growth(plan, heat), json, plan.dtype)


def _growth(plan: "of_growth.GrowthPlan", heat: "of_growth.GrowthHeat") -> Table:
    from stiefelkit.measuring.growth.measure import AXES

    points = plan.points(heat.against)
    title = f"{heat.what} against {heat.against}, {points[0]} to {points[-1]}, {plan.device}"
    caption = f"{AXES[heat.against]}; the exponent fitted over the range"
    table = table_of(title, caption, ["contender"], ["exponent", "range", "overhead", "expected", "faster"])
    table.min_width = len(title)
    for row in heat.rows:
        name = row.contender + (f" ({row.precision})" if row.precision not in (None, "exact") else "")
        name += f", {row.dtype}" if row.dtype != plan.dtype else ""
        exponent = "-" if row.exponent is None else f"{row.exponent:.2f}"
        exponent += "" if row.spread is None else f" +- {row.spread:.2f}"
        fitted = "-" if row.first is None else f"{row.first:g} to {row.last:g}"
        overhead = "-" if row.overhead_until is None else f"to {row.overhead_until:g}"
        faster = "-" if row.exponent is None else "yes" if row.faster else "no"
        table.add_row(name, exponent, fitted, overhead, f"{row.expected:g}", faster)
    return table


def norms(
    *,
    sizes: str = "64",
    batch: Annotated[int, Parameter(converter=whole)] = 1,
    dtype: str = "float32",
    device: str = "cpu",
    members: str = "",
    precisions: str = "",
    factors: str = "1,10,100,1000,10000",
    peers: bool = False,
    threads: Annotated[int, Parameter(converter=whole)] = 1,
    seed: Annotated[int, Parameter(converter=whole)] = 0,
    json: Path | None = None,
) -> int:
    """Shows how orthogonal frames are where coordinates are large.

    The coordinates are drawn as in the race of the parametrizations, then multiplied by each factor. Shown is
    ||W^H W - I||_F, computed in float64, over what rounding an exact frame costs. Where the coordinate is the frame
    itself there is nothing to multiply.

    Args:
        sizes: n, or n x p for tall frames (2048x32), separated by commas.
        batch: number of frames; the worst of them is shown.
        dtype: float32, float64, complex64, complex128, bfloat16 or float16.
        device: cpu or cuda.
        members: parametrizations, separated by commas; all if left out.
        precisions: exact, fast, or both, separated by commas; each that a member has if left out.
        factors: integers, separated by commas.
        peers: show the peers of the members too.
        threads: CPU threads.
        seed: fixes what is drawn.
        json: file for the rows, overwritten.
    """
    from stiefelkit.measuring.races import norms as of_norms
    from stiefelkit.measuring.races.rows import check_place

    plan = of_norms.NormPlan(
        sizes=sizes_of(sizes),
        members=words_of(members),
        precisions=words_of(precisions),
        factors=tuple(map(float, integers_of(factors, "--factors"))),
        peers=peers,
        batch=batch,
        dtype=dtype,
        device=device,
        threads=threads,
        seed=seed,
    )
    if json is not None:
        check_place(json)
    return raced(lambda watch: of_norms.heats(plan, watch), lambda heat: _norms(plan, heat), json, plan.dtype)


def _norms(plan: "of_norms.NormPlan", heat: "of_norms.NormHeat") -> Table:
    title = f"error over the limit, {heat.problem}, {plan.dtype}, {plan.device}"
    caption = "||W^H W - I||_F in rounding limits; the columns: what the coordinates are multiplied by"
    table = table_of(title, caption, ["contender"], [f"x {factor:g}" for factor in plan.factors])
    following = [*heat.rows[1:], None]
    for row, after in zip(heat.rows, following, strict=True):
        figures = ["NaN" if error is None else f"{error:.3g}" for error in row.errors_over_limit]
        table.add_row(row.contender, *figures, end_section=after is None or row.family != after.family)
    return table
