"""How many operators a device has to launch for a map or a step, and how often it is waited for."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from stiefelkit._torch import TorchDispatchMode, is_view_operator
from stiefelkit.errors import DtypeError
from stiefelkit.functional._arithmetic.reads import without_reads
from stiefelkit.measuring.moved_frames import peer_optimizers, start
from stiefelkit.measuring.races.clock import Run
from stiefelkit.measuring.races.contenders import OPERATIONS
from stiefelkit.measuring.races.course import Course, Watch
from stiefelkit.measuring.races.frame_plans import OptimizerRace, ParametrizationRace
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.measuring.races.rows import LaunchRow
from stiefelkit.testing.unread import READS
from stiefelkit.training.memory import threads

__all__ = ["LaunchHeat", "counts_of", "heats"]

_IDLE = frozenset(
    "_record_function_enter_new _record_function_exit alias detach empty empty_like empty_strided lift_fresh new_empty "
    "new_empty_strided resize_ scalar_tensor set_".split()
)
"""Operators that take memory or make a number of the host's a tensor, and launch nothing."""


@dataclass(frozen=True)
class LaunchHeat:
    """One operation at one size: the counts of all, fewest first, and who was left out, and why."""

    problem: FrameProblem
    operation: str
    rows: list[LaunchRow]
    left_out: dict[str, str]


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.launches = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.reads += name in READS
        self.launches += not (name in _IDLE or name in READS or is_view_operator(func))
        return func(*args, **(kwargs or {}))


def counts_of(run: Run) -> tuple[int, int]:
    """How many operators that are no views one run launches, and how many that read a value; as on a device.

    Some operators are several kernels; how many depends on the device.
    """
    with without_reads():
        run()  # what is made at first use
        with _Counter() as counter:
            run()
    return counter.launches, counter.reads


def heats(plan: ParametrizationRace | OptimizerRace, watch: Watch = lambda what, done, rounds: None) -> Iterator[Any]:
    """Counts size by size and operation by operation, and yields each heat when it is over."""
    for n, p in plan.sizes:
        with threads(plan.threads):
            problem = plan.problem(n, p, getattr(plan, "options", None))
            course = Course(str(problem), plan.racing_peers(), watch)
            runs = _of_maps(plan, problem, course) if isinstance(plan, ParametrizationRace) else None
            runs = runs or {"step": _of_steps(plan, problem, course)}  # type: ignore[arg-type]
            for operation, contenders in runs.items():
                counts = course.attempt(
                    "counting", contenders, lambda name, contenders=contenders: counts_of(contenders[name])
                )
                rows = [
                    LaunchRow(operation, name, n, p, problem.batch, plan.dtype, launches, reads)
                    for name, (launches, reads) in sorted(counts.items(), key=lambda item: item[1])
                ]
                yield LaunchHeat(problem, operation, rows, dict(course.left_out))


def _of_maps(plan: ParametrizationRace, problem: FrameProblem, course: Course) -> dict[str, dict[str, Run]]:
    contenders, g = {**plan.contenders(), **plan.racing_peers()}, problem.gradient()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        entries = course.attempt("preparing", contenders, lambda name: contenders[name].enter(problem))
    return {
        operation: {
            name: prepare(entry, g) for name, entry in entries.items() if operation in contenders[name].operations
        }
        for operation, prepare in OPERATIONS.items()
        if operation in plan.operations
    }


def _of_steps(plan: OptimizerRace, problem: FrameProblem, course: Course) -> dict[str, Run]:
    racing_peers = plan.racing_peers()
    methods, frame, g = {**plan.contenders(), **racing_peers}, problem.exact_frame(), problem.gradient()

    def entered(name: str) -> Run:
        if problem.dtype.is_complex and name in racing_peers and not peer_optimizers.get(name).complex:
            raise DtypeError(f"it needs a real dtype, got {plan.dtype}.")
        moved = start(methods[name], frame, g, plan.step_length, problem.dtype)
        return lambda: moved.step(g.clone())

    return course.attempt("preparing", methods, entered)
