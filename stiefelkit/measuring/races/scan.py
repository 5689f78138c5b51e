"""The race of the scan, beside other recurrences."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from stiefelkit.measuring.races.clock import Run, Timing
from stiefelkit.measuring.races.course import Course, Watch
from stiefelkit.measuring.races.process_memory import resident_bytes
from stiefelkit.measuring.races.recurrence_problem import Sequences
from stiefelkit.measuring.races.recurrences import (
    FACTORS,
    Enter,
    backward,
    fast_backends,
    limit,
    ours,
    picked_backend,
    recurrence_peers,
)
from stiefelkit.measuring.races.rows import ScanRow
from stiefelkit.measuring.races.scan_cases import ScanCase
from stiefelkit.measuring.races.scan_plan import ScanRace
from stiefelkit.measuring.races.training_step import MODEL, whole_and_scan
from stiefelkit.training.memory import threads

__all__ = ["LOSSES", "ScanHeat", "heats"]

LOSSES = ("sequence", "last_state")
STEP = "training_step"


@dataclass(frozen=True)
class ScanHeat:
    """One case, "forward_backward" of sequences and of last states, or a "training_step".

    Attributes:
        unit: seconds of the LIMIT.
        rows: the figures, ours before peers, and the fastest first.
        is_peer: of the rows, one each.
        left_out: contender to the reason why it could not take part.
    """

    case: ScanCase
    operation: str
    unit: float
    rows: list[ScanRow]
    is_peer: list[bool]
    left_out: dict[str, str]


@dataclass(frozen=True)
class ScanContender:
    """A backend, or a peer, by name; the loss that is differentiated; and what gets ready."""

    contender: str
    is_peer: bool
    loss: str
    enter: Enter


def heats(plan: ScanRace, watch: Watch = lambda what, done, rounds: None) -> Iterator[ScanHeat]:
    """Races case by case, and yields each heat when it is over."""
    with threads(plan.threads):
        for case in plan.cases:
            yield _heat(plan, plan.drawn(case), watch)
        if plan.training_step:
            yield _training_step(plan, next(case for case in plan.cases if not case.is_complex), watch)


def _starters(plan: ScanRace, drawn: Sequences) -> dict[str, ScanContender]:
    """Name in the table to contender: backends, the first and factors with the last state alone too, and peers."""
    contenders = {}
    for number, (backend, enter) in enumerate(ours(plan.backends or fast_backends(drawn)).items()):
        for loss in LOSSES if number == 0 or backend == FACTORS else LOSSES[:1]:
            contenders[_label(backend, loss)] = ScanContender(backend, False, loss, enter)
    racing_peers = plan.named_peers or (recurrence_peers.available() if plan.peers else ())
    peers = {name: ScanContender(name, True, LOSSES[0], recurrence_peers.get(name)) for name in racing_peers}
    return contenders | peers


def _label(backend: str, loss: str) -> str:
    return f"scan ({backend})" + (", last state" if loss == LOSSES[1] else "")


def _heat(plan: ScanRace, drawn: Sequences, watch: Watch) -> ScanHeat:
    starters = _starters(plan, drawn)
    racing_peers = [name for name, starter in starters.items() if starter.is_peer]
    course = Course(str(drawn.case), racing_peers, watch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(plan.seed)
        entries = course.attempt("preparing", starters, lambda name: starters[name].enter(drawn))
    runs = {name: backward(entry, drawn, starters[name].loss) for name, entry in entries.items()}
    able = course.attempt("trying", runs, lambda name: runs[name]())
    unit, timings = course.timed(plan, limit(drawn), {name: runs[name] for name in able}, "forward and backward")
    seconds = {name: timing.median for name, timing in timings.items()}
    memory = _memory(plan, drawn, {name: starters[name] for name in seconds}, course)
    yardstick = _yardstick(plan, drawn, seconds, starters)
    order = sorted(seconds, key=lambda name: (name in racing_peers, seconds[name]))
    rows = []
    for name in order:
        row = _row(plan, drawn.case, starters[name].loss, name, seconds[name], unit, yardstick)
        n, is_complex = entries[name].width, entries[name].dtype.is_complex
        row = _scattered(row, timings[name])
        rows.append(dataclasses.replace(row, n=n, is_complex=is_complex, **memory.get(name, {})))
    is_peer = [name in racing_peers for name in order]
    return ScanHeat(drawn.case, "forward_backward", unit, rows, is_peer, course.left_out)


def _row(
    plan: ScanRace, case: ScanCase, operation: str, name: str, seconds: float, unit: float, yardstick: float | None
) -> ScanRow:
    return ScanRow(
        operation=operation,
        case=case.name,
        contender=name,
        T=case.T,
        n=case.n,
        B=case.B,
        m=case.m,
        is_complex=case.is_complex,
        activation=plan.activation,
        dtype=plan.dtype,
        device=plan.device,
        seconds=seconds,
        limit_units=seconds / unit,
        time_over_ours=None if yardstick is None else seconds / yardstick,
    )


def _scattered(row: ScanRow, timing: Timing) -> ScanRow:
    return dataclasses.replace(row, spread=timing.spread, samples=len(timing.samples))


def _yardstick(
    plan: ScanRace, drawn: Sequences, seconds: Mapping[str, float], starters: Mapping[str, ScanContender]
) -> float | None:
    """Seconds of our scan: of the backend that "auto" picks or, where that does not race, of our fastest."""
    sequences = [name for name in seconds if not starters[name].is_peer and starters[name].loss == LOSSES[0]]
    picked = _label(picked_backend(drawn), LOSSES[0])
    return seconds[picked] if picked in sequences else min((seconds[name] for name in sequences), default=None)


def _memory(
    plan: ScanRace, drawn: Sequences, starters: Mapping[str, ScanContender], course: Course
) -> dict[str, dict[str, int]]:
    """Name to the fields of a row about memory."""
    sizes: dict[str, dict[str, int]] = {}
    for name, starter in starters.items() if plan.memory else ():
        for loss in LOSSES if starter.loss == LOSSES[0] else ():
            key = f"memory of {name}, {loss.replace('_', ' ')}"

            def measured(_: str, starter: ScanContender = starter, loss: str = loss) -> int:
                return resident_bytes(drawn, starter.contender, loss, starter.is_peer, plan.threads)

            for size in course.attempt("measuring", [key], measured).values():
                sizes.setdefault(name, {})[f"memory_{loss}"] = size
    return sizes


def _training_step(plan: ScanRace, case: ScanCase, watch: Watch) -> ScanHeat:
    step, scan = whole_and_scan(case, torch.device(plan.device), plan.seed)
    names = (MODEL, f"{MODEL}, scan alone")
    runs: dict[str, Run] = dict(zip(names, (step, scan), strict=True))
    course = Course(str(case), (), watch)
    unit, timings = course.timed(plan, limit(plan.drawn(case)), runs, "training step")
    alone = timings[names[1]].median if names[1] in timings else None
    rows = [
        _scattered(_row(plan, case, STEP, name, timing.median, unit, alone), timing) for name, timing in timings.items()
    ]
    return ScanHeat(case, STEP, unit, rows, [False] * len(rows), course.left_out)
