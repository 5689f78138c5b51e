"""The races of frames: of parametrizations, of optimizers that move frames, and of errors at large coordinates."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from stiefelkit._torch import TorchDispatchMode, is_view_operator
from stiefelkit.errors import DtypeError, OptimizerError, OptionError
from stiefelkit.functional._arithmetic.reads import without_reads
from stiefelkit.measuring.moved_frames import MovedApart, MovedFrame, peer_optimizers, start, start_apart
from stiefelkit.measuring.races.clock import Run, clock_of, product_of
from stiefelkit.measuring.races.contenders import APART, OPERATIONS, Contender, FrameProblem
from stiefelkit.measuring.races.field import Field, Race, Row, Watch, finite, quiet, scatter, seeded
from stiefelkit.measuring.races.plan import FramePlan, NormPlan, OptimizerRace, ParametrizationRace
from stiefelkit.measuring.races.schedule import NO_TIME, Deadline, deadline_of
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing.portable import READS
from stiefelkit.training.memory import threads

GRADIENTS = 16
"""Gradients that an optimizer gets in turns: with a single one it would soon be where there is no step left to make."""
LONGEST = 20.0
"""Seconds: an optimizer that takes longer for one step is left out."""
_IDLE = frozenset(
    "_record_function_enter_new _record_function_exit alias detach empty empty_like empty_strided lift_fresh new_empty "
    "new_empty_strided resize_ scalar_tensor set_".split()
)
"""Operators that take memory or make a number of the host's a tensor, and launch nothing."""


def races(
    plan: ParametrizationRace | OptimizerRace | NormPlan, watch: Watch = quiet, deadline: Deadline | None = None
) -> Iterator[Race]:
    """Races size by size, parametrizations operation by operation too, and yields each race when it is over.

    After the deadline, that of the plan, from now on, if left out, contenders are left out, as in all races; `watch` is
    called now and then.
    """
    deadline = deadline or deadline_of(plan)
    for done, (n, p) in enumerate(plan.sizes):
        share = 1 / (len(plan.sizes) - done)
        with threads(plan.threads):
            if isinstance(plan, OptimizerRace):
                yield _of_optimizers(plan, plan.problem(n, p), watch, deadline, share)
                continue
            problem, peers = plan.problem(n, p, plan.options), plan.racing_peers()
            contenders, field = {**plan.contenders(), **peers}, Field(str(problem), peers, watch, {}, deadline, share)
            if isinstance(plan, NormPlan):
                yield _of_norms(plan, problem, contenders, field)
            else:
                yield from _of_maps(plan, problem, contenders, field)


def _of_maps(
    plan: ParametrizationRace, problem: FrameProblem, contenders: Mapping[str, Contender], field: Field
) -> Iterator[Race]:
    g, families = problem.gradient(), {name: contender.family for name, contender in contenders.items()}
    with seeded(plan.seed):
        entries = field.attempt("preparing", contenders, lambda name: contenders[name].enter(problem))

    def tried(name: str, runs: Mapping[str, Run]) -> float:
        """Runs once; returns the error of the frame after it."""
        runs[name]()
        with torch.no_grad():
            return float(orthogonality_error(entries[name].weight()).max())

    ahead = [name for name in OPERATIONS if name in plan.operations]  # since "step" moves the coordinates
    for done, operation in enumerate(ahead):
        able = [name for name in entries if operation in contenders[name].operations]
        runs = {name: OPERATIONS[operation](entries[name], g) for name in able}
        share = field.share / (len(ahead) - done)
        own = dataclasses.replace(field, left_out=dict(field.left_out), share=share)
        if plan.launches:
            yield _counted(plan, problem, operation, own, runs)
            continue
        errors = own.attempt("trying", runs, partial(tried, runs=runs))
        runs = {name: runs[name] for name in errors}
        yield _timed(plan, problem, operation, own, runs, errors.__getitem__, families)


def _of_optimizers(plan: OptimizerRace, problem: FrameProblem, watch: Watch, deadline: Deadline, share: float) -> Race:
    """Moves a frame of each contender's own from the same start, by the same gradients in turns.

    The learning rate of each gives the first step the same length.
    """

    def with_apart(methods: dict[str, str]) -> dict[str, str]:
        return methods | ({name + APART: method for name, method in methods.items()} if plan.apart else {})

    peers = with_apart(plan.racing_peers())
    methods = {**with_apart(plan.contenders()), **peers}
    field = Field(str(problem), peers, watch, {}, deadline, share)
    if deadline.is_over:
        return Race(problem, "step", [], dict.fromkeys(methods, NO_TIME))
    frame, gradients = problem.exact_frame(), [problem.gradient() for _ in range(GRADIENTS)]

    def entered(name: str) -> MovedFrame | MovedApart:
        if problem.dtype.is_complex and name in peers and not peer_optimizers.get(methods[name]).complex:
            raise DtypeError(f"it needs a real dtype, got {plan.dtype}.")
        begin = start_apart if name.endswith(APART) else start
        return begin(methods[name], frame, gradients[0], plan.step_length, problem.dtype)

    def running(name: str) -> Run:
        step = entries[name].step
        if plan.launches:
            return lambda: step(gradients[0].clone())
        # peers may write into gradients, ours do not
        turns = itertools.cycle([g.clone() for g in gradients] if name in peers else gradients)
        return lambda: step(next(turns))

    def tried(name: str) -> None:
        took = clock(runs[name], 1)
        if took > LONGEST:
            raise OptionError(f"a step takes {took:.0f} s, more than {LONGEST:.0f}.")

    entries = field.attempt("preparing", methods, entered)
    runs, clock = {name: running(name) for name in entries}, clock_of(problem.device)
    if plan.launches:
        return _counted(plan, problem, "step", field, runs)
    able = {name: runs[name] for name in field.attempt("trying", runs, tried)}
    yardsticks = [name for name, method in peers.items() if peer_optimizers.get(method).yardstick]
    families = {name: "peer" if name in peers else "ours" for name in methods}

    def error(name: str) -> float:
        return float(orthogonality_error(entries[name].frame).max())

    return _timed(plan, problem, "step", field, able, error, families, yardsticks)


def _of_norms(plan: NormPlan, problem: FrameProblem, contenders: Mapping[str, Contender], field: Field) -> Race:
    """Multiplies the coordinates of each contender and looks at the frame.

    A contender whose coordinate is the frame itself, or that has no forward, takes no part.
    """
    limit = rounding_limit(problem.p, problem.dtype)

    def errors_of(name: str) -> list[float | None]:
        ratios = []
        for factor in plan.factors:
            entry = contenders[name].enter(dataclasses.replace(problem, scale=factor))
            if entry.optimizer is None:
                raise OptimizerError("its coordinate is the frame, which has one length.")
            with torch.no_grad():
                ratios.append(finite(float(orthogonality_error(entry.weight()).max()) / limit))
        return ratios

    with seeded(plan.seed):
        able = [name for name, contender in contenders.items() if "forward" in contender.operations]
        errors = field.attempt("looking at", able, errors_of)
    rows = []
    for name in sorted(errors, key=lambda name: (contenders[name].family, name in field.peers, name)):
        family = contenders[name].family
        figures = {"contender": name, "family": family, **_sizes(plan, problem), "device": plan.device}
        figures |= {"factors": list(plan.factors), "errors_over_limit": errors[name]}
        rows.append(Row(figures, family, name in field.peers))
    return Race(problem, "norms", rows, field.left_out)


def _timed(
    plan: ParametrizationRace | OptimizerRace,
    problem: FrameProblem,
    operation: str,
    field: Field,
    runs: Mapping[str, Run],
    error: Callable[[str], float],
    families: Mapping[str, str],
    yardsticks: Collection[str] | None = None,
) -> Race:
    """Times contenders; the rows go family by family, peers after ours, the fastest first.

    `error` gives ||W^H W - I||_F of a contender after the race; each is compared with `yardsticks`, or else with the
    peers of its family.
    """
    product = product_of(problem.n, problem.p, problem.batch, problem.dtype, problem.device)
    unit, timings = field.timed(plan, product, runs, operation)
    error_of, limit = {name: error(name) for name in timings}, rounding_limit(problem.p, problem.dtype)
    seconds = {name: timing.median for name, timing in timings.items()}
    sound = [name for name in seconds if name in field.peers and finite(error_of[name]) is not None]
    rows = []
    for name in sorted(seconds, key=lambda name: (families[name], name in field.peers, seconds[name])):
        kin = [peer for peer in sound if families[peer] == families[name]] if yardsticks is None else yardsticks
        best = min((seconds[peer] for peer in sound if peer in kin), default=None)
        figures = {
            **{"operation": operation, "contender": name, **_sizes(plan, problem), "device": plan.device},
            **{"seconds": seconds[name], "gemm_units": seconds[name] / unit},
            "ratio_to_best_peer": None if best is None else best / seconds[name],
            "error_over_limit": finite(error_of[name] / limit),
            **scatter(timings[name]),
        }
        rows.append(Row(figures, families[name], name in field.peers))
    return Race(problem, operation, rows, field.left_out, unit)


def _counted(plan: FramePlan, problem: FrameProblem, operation: str, field: Field, runs: Mapping[str, Run]) -> Race:
    """Counts what each contender launches and reads; the fewest first."""
    counts = field.attempt("counting", runs, lambda name: counts_of(runs[name]))
    rows = []
    for name, (launches, reads) in sorted(counts.items(), key=lambda item: item[1]):
        figures = {"operation": operation, "contender": name, **_sizes(plan, problem)}
        rows.append(Row({**figures, "launches": launches, "reads": reads}))
    return Race(problem, operation, rows, field.left_out)


def _sizes(plan: FramePlan, problem: FrameProblem) -> dict[str, Any]:
    return {"n": problem.n, "p": problem.p, "batch": problem.batch, "dtype": plan.dtype}


class _Counter(TorchDispatchMode):
    launches = reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.reads += name in READS
        self.launches += not (name in _IDLE or name in READS or is_view_operator(func))
        return func(*args, **(kwargs or {}))


def counts_of(run: Run) -> tuple[int, int]:
    """Counts the operators that are no views, and those that read a value, of one run, as on a device.

    Some operators are several kernels; how many depends on the device.
    """
    with without_reads():
        run()  # what is made at first use
        with _Counter() as counter:
            run()
    return counter.launches, counter.reads
