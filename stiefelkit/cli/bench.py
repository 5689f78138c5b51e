"""`stiefelkit bench RACE`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.table import Table

from stiefelkit.cli.app import DEFAULTS
from stiefelkit.cli.bench_growth import growth, norms
from stiefelkit.cli.bench_scan import scan
from stiefelkit.cli.figures import table_of
from stiefelkit.cli.lists import sizes_of, words_of
from stiefelkit.cli.open_options import literal, whole
from stiefelkit.cli.races import raced, three_digits
from stiefelkit.cli.words import with_plain_help
from stiefelkit.training.recipes import Option

if TYPE_CHECKING:
    from stiefelkit.measuring.races.course import Conditions, FrameHeat
    from stiefelkit.measuring.races.rows import FrameRow

__all__ = ["app"]

app = App(name="bench", help="Race implementations on this machine.", default_parameter=DEFAULTS)
app.command(with_plain_help(scan), name="scan")
app.command(with_plain_help(growth), name="growth")
app.command(with_plain_help(norms), name="norms")


@app.command(name="parametrizations")
@with_plain_help
def parametrizations(
    *,
    sizes: str = "64,256,512",
    batch: Annotated[int, Parameter(converter=whole)] = 1,
    dtype: str = "float32",
    device: str = "cpu",
    members: str = "",
    precisions: str = "",
    options: Annotated[
        dict[str, Annotated[Option, Parameter(converter=literal)]] | None, Parameter(show_default=False)
    ] = None,
    operations: str = "forward_backward,step",
    peers: bool = False,
    repeats: Annotated[int, Parameter(converter=whole)] = 200,
    seconds: float = 1.0,
    threads: Annotated[int, Parameter(converter=whole)] = 1,
    seed: Annotated[int, Parameter(converter=whole)] = 0,
    json: Path | None = None,
) -> int:
    """Races the parametrizations of the registry, and other implementations of the same maps, on this machine.

    All versions run in turns in one process, after a warm-up; medians are shown. Time is process CPU time, or that
    between CUDA events on a GPU. Unit: g is one product of an n x p with a p x p matrix of that dtype (a batch of them,
    if there is one), measured in the same turns.

    "forward" computes the frame without gradients; "forward_backward" gives the gradient of its coordinates for a
    fixed random dL/dW; "step" is zero_grad, the same, and a step of torch.optim.SGD, or of geoopt's RiemannianSGD on
    the frame itself. Nothing is cached.

    Drawn, for members and peers alike: skew A with entries of E |a|^2 = 1/n, so that ||A||_2 is about 2 (torch and
    geotorch map A / 2 by Cayley, and get 2 A); entries of reflectors N(0, 1), those of peers with 1 on top; angles and
    phases uniform on (-pi, pi); other coordinates by the member's default init; dL/dW with E |g|^2 = 1/n.

    The ratio compares with the fastest peer of the same map in the same table: 2 means twice as fast as it. The error
    is ||W^H W - I||_F, computed in float64, over what rounding an exact frame costs.

    Args:
        sizes: n, or n x p for tall frames (2048x32), separated by commas.
        batch: number of frames.
        dtype: float32, float64, complex64, complex128, bfloat16 or float16.
        device: cpu or cuda.
        members: parametrizations, separated by commas; all if left out. Their peers race alone with them.
        precisions: exact, fast, or both, separated by commas; each that a member has if left out.
        options: options of members, as in --options.reflections 16, for those that have them.
        operations: forward, forward_backward, step, separated by commas.
        peers: race torch's own maps, geoopt, and geotorch if it is installed.
        repeats: samples of each contender at most.
        seconds: time for the samples of each contender; slow ones get five samples at least.
        threads: CPU threads.
        seed: fixes what is drawn.
        json: file for the rows, overwritten.
    """
    from stiefelkit.measuring.races import parametrizations as of_parametrizations
    from stiefelkit.measuring.races.rows import check_place

    plan = of_parametrizations.ParametrizationRace(
        sizes=sizes_of(sizes),
        members=words_of(members),
        precisions=words_of(precisions),
        operations=words_of(operations),
        peers=peers,
        batch=batch,
        dtype=dtype,
        device=device,
        options={name.replace("-", "_"): value for name, value in (options or {}).items()},
        repeats=repeats,
        seconds=seconds,
        threads=threads,
        seed=seed,
    )
    if json is not None:
        check_place(json)
    for package, names in of_parametrizations.missing_peers(plan).items():
        print(
            f'Left out: {", ".join(names)}; {package} is not installed: pip install "stiefelkit[peers]"',
            file=sys.stderr,
        )
    return raced(
        lambda watch: of_parametrizations.heats(plan, watch), lambda heat: _table(plan, heat), json, plan.dtype
    )


@app.command(name="optimizers")
@with_plain_help
def optimizers(
    *,
    sizes: str = "64,256,512,1024x64,2048x32",
    batch: Annotated[int, Parameter(converter=whole)] = 1,
    dtype: str = "float32",
    device: str = "cpu",
    optimizers: str = "",
    precisions: str = "exact,fast",
    step_length: float = 0.1,
    peers: bool = False,
    repeats: Annotated[int, Parameter(converter=whole)] = 200,
    seconds: float = 1.0,
    threads: Annotated[int, Parameter(converter=whole)] = 1,
    seed: Annotated[int, Parameter(converter=whole)] = 0,
    json: Path | None = None,
) -> int:
    """Races the optimizers that move a frame itself, and geoopt's, on this machine.

    Timed is one optimizer.step() on one frame, or on one batch of frames. All move frames of their own from the same
    Haar draw, in turns in one process, after a warm-up; medians are shown. Time and unit are those of the race of
    parametrizations.

    16 gradients with E |g|^2 = 1/n, the same for all, take turns, so that the steps stay as long as they are. The
    learning rate makes the first one turn the frame by --step-length: lr ||B||_2, B = G W^H - W G^H, for the
    multiplicative Cayley update, and what is as long as that for the others, found by a tiny step in float64. Our
    optimizers have no momentum here but Adam's, as geoopt's have none.

    The ratio compares with the faster of geoopt's RiemannianSGD, in the canonical and the Euclidean metric: 2 means
    twice as fast as it. "exact/fast" is the time of the exact optimizer over that of the same in precision fast. The
    error is ||W^H W - I||_F, computed in float64, after all steps of the race, over what rounding an exact frame costs.

    Args:
        sizes: n, or n x p for tall frames (2048x32), separated by commas.
        batch: number of frames.
        dtype: float32, float64, complex64 or complex128.
        device: cpu or cuda.
        optimizers: names, separated by commas, peers' among them; all of ours that move frames, plugins too, if left
            out.
        precisions: exact, fast, or both, separated by commas.
        step_length: of the first step, at most 100.
        peers: race geoopt's RiemannianSGD and RiemannianAdam, or those of them that --optimizers names; what takes over
            20 s for a step is left out.
        repeats: samples of each contender at most.
        seconds: time for the samples of each contender; slow ones get five samples at least.
        threads: CPU threads.
        seed: fixes what is drawn.
        json: file for the rows, overwritten.
    """
    from stiefelkit.measuring.races import optimizers as of_optimizers
    from stiefelkit.measuring.races.rows import check_place

    plan = of_optimizers.OptimizerRace(
        sizes=sizes_of(sizes),
        optimizers=words_of(optimizers),
        precisions=words_of(precisions),
        step_length=step_length,
        peers=peers,
        batch=batch,
        dtype=dtype,
        device=device,
        repeats=repeats,
        seconds=seconds,
        threads=threads,
        seed=seed,
    )
    if json is not None:
        check_place(json)
    return raced(
        lambda watch: of_optimizers.heats(plan, watch),
        lambda heat: _table(plan, heat, compares_precisions=True),
        json,
        plan.dtype,
    )


def _table(plan: "Conditions", heat: "FrameHeat", compares_precisions: bool = False) -> Table:
    problem = heat.problem
    title = f"{heat.operation}, {problem}, {plan.dtype}, {plan.device}"
    caption = f"g = {three_digits(1e6 * heat.unit)} µs; ratio to the best peer; error in rounding limits"
    columns = ["ms", "g", "ratio", "error", *(["exact/fast"] if compares_precisions else [])]
    table = table_of(title, caption, ["contender"], columns)
    of_fast = _exact_over_fast(heat.rows)
    following = [*heat.families[1:], None]
    for row, family, after in zip(heat.rows, heat.families, following, strict=True):
        ratio = "-" if row.ratio_to_best_peer is None else three_digits(row.ratio_to_best_peer)
        error = "-" if row.error_over_limit is None else three_digits(row.error_over_limit)
        figures = [three_digits(1e3 * row.seconds), three_digits(row.gemm_units), ratio, error]
        if compares_precisions:
            figures.append(three_digits(of_fast[row.contender]) if row.contender in of_fast else "-")
        table.add_row(row.contender, *figures, end_section=family != after)
    return table


def _exact_over_fast(rows: "list[FrameRow]") -> dict[str, float]:
    """Time of each exact contender over that of the same in precision fast."""
    seconds = {row.contender: row.seconds for row in rows}
    pairs = {name: name.replace("(exact", "(fast") for name in seconds if "(exact" in name}
    return {name: seconds[name] / seconds[fast] for name, fast in pairs.items() if fast in seconds}
