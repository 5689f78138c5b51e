"""How orthogonality fares where coordinates are large."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from stiefelkit.errors import OptimizerError
from stiefelkit.measuring.races.contenders import Contender
from stiefelkit.measuring.races.course import Course, Watch
from stiefelkit.measuring.races.frame_plans import NormPlan
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.training.memory import threads

__all__ = ["NormHeat", "NormRow", "heats"]


@dataclass(frozen=True)
class NormRow:
    """One contender at one size; what a `FrameRow` has too means the same.

    Args:
        family: the map it computes.
        factors: what the coordinates were multiplied by.
        errors_over_limit: ||W^H W - I||_F in float64 over the rounding limit, the worst of the batch, for each factor;
            None where it is not finite.
    """

    contender: str
    family: str
    n: int
    p: int
    batch: int
    dtype: str
    device: str
    factors: list[float]
    errors_over_limit: list[float | None]


@dataclass(frozen=True)
class NormHeat:
    """One size: rows family by family, parametrizations before peers, and which of them are peers'."""

    problem: FrameProblem
    rows: list[NormRow]
    is_peer: list[bool]
    left_out: dict[str, str]


def heats(plan: NormPlan, watch: Watch = lambda what, done, rounds: None) -> Iterator[NormHeat]:
    """Multiplies the coordinates of each contender and looks at the frame, size by size.

    A contender whose coordinate is the frame itself, or that has no forward, takes no part.
    """
    for n, p in plan.sizes:
        with threads(plan.threads):
            yield _heat(plan, plan.problem(n, p, plan.options), watch)


def _errors(plan: NormPlan, contender: Contender, problem: FrameProblem) -> list[float | None]:
    limit, ratios = rounding_limit(problem.p, problem.dtype), []
    for factor in plan.factors:
        entry = contender.enter(dataclasses.replace(problem, scale=factor))
        if entry.optimizer is None:
            raise OptimizerError("its coordinate is the frame, which has one length.")
        with torch.no_grad():
            ratio = float(orthogonality_error(entry.weight()).max()) / limit
        ratios.append(ratio if math.isfinite(ratio) else None)
    return ratios


def _heat(plan: NormPlan, problem: FrameProblem, watch: Watch) -> NormHeat:
    racing_peers = plan.racing_peers()
    contenders = {**plan.contenders(), **racing_peers}
    able = [name for name, contender in contenders.items() if "forward" in contender.operations]
    course = Course(str(problem), racing_peers, watch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        errors = course.attempt("looking at", able, lambda name: _errors(plan, contenders[name], problem))
    order = sorted(errors, key=lambda name: (contenders[name].family, name in racing_peers, name))
    rows = [
        NormRow(
            contender=name,
            family=contenders[name].family,
            n=problem.n,
            p=problem.p,
            batch=problem.batch,
            dtype=plan.dtype,
            device=plan.device,
            factors=list(plan.factors),
            errors_over_limit=errors[name],
        )
        for name in order
    ]
    return NormHeat(problem, rows, [name in racing_peers for name in order], course.left_out)
