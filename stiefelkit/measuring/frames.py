"""The races of frames: of parametrizations, and of optimizers that move frames."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from stiefelkit.errors import DtypeError
from stiefelkit.machine import threads
from stiefelkit.measuring.clock import Run, peak_bytes, product_of
from stiefelkit.measuring.contest import Contest, ProgressCallback, Race, Row, Schedule, finite, quiet, seeded
from stiefelkit.measuring.implementations import OPERATIONS, FrameProblem
from stiefelkit.measuring.moved_frames import YARDSTICKS, MovedFrame, start
from stiefelkit.measuring.plans import OptimizerRace, ParametrizationRace, torch_dtype
from stiefelkit.metrics import orthogonality_error, rounding_limit

GRADIENTS = 16  # gradients in turns: with a single one an optimizer would soon be where there is no step left


def races(
    plan: ParametrizationRace | OptimizerRace, watch: ProgressCallback = quiet, schedule: Schedule | None = None
) -> Iterator[Race]:
    """Races size by size, parametrizations operation by operation too, and yields each race when it is over."""
    schedule = schedule or Schedule.of(plan)
    for (n, p), part in schedule.shared(plan.sizes):
        problem = FrameProblem(n, p, plan.batch, torch_dtype(plan.dtype), torch.device(plan.device), {}, plan.seed)
        contest = Contest(str(problem), plan.racing_peers(), watch, {}, part)
        with threads(plan.threads):
            if isinstance(plan, OptimizerRace):
                yield _of_optimizers(plan, problem, contest)
            else:
                problem = dataclasses.replace(problem, options=dict(plan.options), scale=plan.scale)
                yield from _of_maps(plan, problem, contest)


def _of_maps(plan: ParametrizationRace, problem: FrameProblem, contest: Contest) -> Iterator[Race]:
    entrants = {**plan.implementations(), **plan.racing_peers()}
    families = {name: entrant.family for name, entrant in entrants.items()}
    with seeded(plan.seed):
        gradients = {problem.dtype: problem.gradient()}
        entries = contest.attempt("preparing", entrants, lambda name: entrants[name].enter(problem))
    dtypes = {name: entry.dtype or problem.dtype for name, entry in entries.items()}
    for dtype in {*dtypes.values()} - {*gradients}:
        gradients[dtype] = dataclasses.replace(problem, dtype=dtype).gradient()

    def error(name: str) -> float:
        with torch.no_grad():
            return float(orthogonality_error(entries[name].weight()).max())

    ahead = [name for name in OPERATIONS if name in plan.operations]  # since "step" moves the coordinates
    for operation, part in contest.schedule.shared(ahead):
        runs = {name: OPERATIONS[operation](entry, gradients[dtypes[name]]) for name, entry in entries.items()}
        own = dataclasses.replace(contest, left_out=dict(contest.left_out), schedule=part)
        runs = own.tried(runs)
        errors = {name: error(name) for name in runs}
        race = _timed(plan, problem, operation, own, runs, errors.__getitem__, families, dtypes)
        for row in race.rows if plan.memory else ():
            row.figures["bytes"] = peak_bytes(runs[row.name], problem.device)
        yield race


def _of_optimizers(plan: OptimizerRace, problem: FrameProblem, contest: Contest) -> Race:
    """Moves a frame of each optimizer's own from the same start, by the same gradients in turns."""
    peers = plan.racing_peers()
    methods = {**plan.implementations(), **{name: name for name in peers}}
    frame, gradients = problem.exact_frame(), [problem.gradient() for _ in range(GRADIENTS)]

    def entered(name: str) -> MovedFrame:
        if problem.dtype.is_complex and name in peers:
            raise DtypeError(f"it needs a real dtype, got {plan.dtype}.")
        return start(methods[name], frame, gradients[0], plan.step_length, problem.dtype)

    def running(name: str) -> Run:
        step = entries[name].step
        # peers may write into gradients, ours do not
        turns = itertools.cycle([g.clone() for g in gradients] if name in peers else gradients)
        return lambda: step(next(turns))

    def error(name: str) -> float:
        return float(orthogonality_error(entries[name].frame).max())

    entries = contest.attempt("preparing", methods, entered)
    runs = contest.tried({name: running(name) for name in entries})
    families = {name: "peer" if name in peers else "ours" for name in methods}
    return _timed(plan, problem, "step", contest, runs, error, families, {}, YARDSTICKS)


def _timed(
    plan: ParametrizationRace | OptimizerRace,
    problem: FrameProblem,
    operation: str,
    contest: Contest,
    runs: Mapping[str, Run],
    error: Callable[[str], float],
    families: Mapping[str, str],
    dtypes: Mapping[str, torch.dtype],
    yardsticks: Collection[str] | None = None,
) -> Race:
    """Times implementations; the rows go family by family, peers after ours, the fastest first."""
    product = product_of(problem.n, problem.p, problem.batch, problem.dtype, problem.device)
    unit, timings = contest.timed(plan, product, runs, operation)
    error_of, limit = {name: error(name) for name in timings}, rounding_limit(problem.p, problem.dtype)
    seconds = {name: timing.median for name, timing in timings.items()}
    sound = [name for name in seconds if name in contest.peers and finite(error_of[name]) is not None]
    rows = []
    for name in sorted(seconds, key=lambda name: (families[name], name in contest.peers, seconds[name])):
        kin = [peer for peer in sound if families[peer] == families[name]] if yardsticks is None else yardsticks
        best = min((seconds[peer] for peer in sound if peer in kin), default=None)
        figures = {
            **{"operation": operation, "contender": name, "n": problem.n, "p": problem.p, "batch": problem.batch},
            "dtype": str(dtypes.get(name, problem.dtype)).removeprefix("torch."),
            **{"device": plan.device, **timings[name].figures, "gemm_units": seconds[name] / unit},
            "ratio_to_best_peer": None if best is None else best / seconds[name],
            "error_over_limit": finite(error_of[name] / limit),
        }
        rows.append(Row(figures, families[name], name in contest.peers))
    return Race(str(problem), operation, rows, contest.left_out, unit)
