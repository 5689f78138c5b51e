"""The race of the scan, beside other recurrences."""

from collections.abc import Iterator
from functools import partial

import torch

from stiefelkit.machine import threads
from stiefelkit.measuring import recurrences
from stiefelkit.measuring.clock import peak_bytes
from stiefelkit.measuring.contest import NO_TIME, Contest, ProgressCallback, Race, Row, Schedule, quiet, seeded
from stiefelkit.measuring.plans import FACTORS, ScanCase, ScanRace, torch_dtype
from stiefelkit.measuring.recurrences import Enter, Sequences, recurrence_peers

LOSSES = ("sequence", "last_state")


def drawn(plan: ScanRace, case: ScanCase) -> Sequences:
    """Returns the tensors of a case."""
    return Sequences(case, plan.activation, torch_dtype(plan.dtype), torch.device(plan.device), plan.seed)


def races(plan: ScanRace, watch: ProgressCallback = quiet, schedule: Schedule | None = None) -> Iterator[Race]:
    """Races case by case, and yields each race when it is over: ours before peers, and the fastest first."""
    schedule = schedule or Schedule.of(plan)
    with threads(plan.threads):
        for done, case in enumerate(plan.cases):
            if schedule.is_over:
                yield Race(str(case), "forward_backward", [], {"all": NO_TIME})
            else:
                part = schedule.part(1 / (len(plan.cases) - done))
                contest = Contest(str(case), recurrence_peers, watch, {}, part)
                yield _race(plan, drawn(plan, case), contest)


def _entrants(plan: ScanRace, sequences: Sequences) -> dict[str, tuple[Enter, str]]:
    """Returns name in the table to what gets ready, and the loss: the first backend and factors have both losses."""
    entrants = {}
    backends = plan.backends or recurrences.fast_backends(sequences)
    for number, (backend, enter) in enumerate(recurrences.ours(backends).items()):
        entrants[f"scan ({backend})"] = enter, LOSSES[0]
        if number == 0 or backend == FACTORS:
            entrants[f"scan ({backend}), last state"] = enter, LOSSES[1]
    peers = plan.named_peers or (recurrence_peers if plan.peers else ())
    return entrants | {name: (recurrence_peers[name], LOSSES[0]) for name in peers}


def _race(plan: ScanRace, sequences: Sequences, contest: Contest) -> Race:
    case, entrants = sequences.case, _entrants(plan, sequences)
    enters = {name: enter for name, (enter, _) in entrants.items()}
    losses = {name: loss for name, (_, loss) in entrants.items()}
    with seeded(plan.seed):
        entries = contest.attempt("preparing", entrants, lambda name: enters[name](sequences))
    runs = {name: recurrences.backward(entry, sequences, losses[name]) for name, entry in entries.items()}
    unit, timings = contest.timed(plan, recurrences.limit(sequences), contest.tried(runs), "forward and backward")
    seconds = {name: timing.median for name, timing in timings.items()}
    # our scan: with the backend that "auto" picks or, if that does not race, the fastest
    picked = f"scan ({recurrences.picked_backend(sequences)})"
    whole = [name for name in seconds if name not in contest.peers and losses[name] == LOSSES[0]]
    yardstick = seconds.get(picked, min((seconds[name] for name in whole), default=None))
    rows = []
    for name in sorted(seconds, key=lambda name: (name in contest.peers, seconds[name])):
        memory: dict[str, int | None] = dict.fromkeys((f"memory_{loss}" for loss in LOSSES), None)
        if plan.memory and losses[name] == LOSSES[0]:
            enter = partial(_memory, sequences, enters[name])
            memory |= contest.attempt("memory of", [name], enter).get(name, {})
        figures = {
            **{"operation": losses[name], "case": case.name, "contender": name, "T": case.T},
            **{"n": entries[name].width, "B": case.B, "m": case.m, "is_complex": entries[name].dtype.is_complex},
            **{"activation": plan.activation, "dtype": plan.dtype, "device": plan.device},
            **{**timings[name].figures, "limit_units": seconds[name] / unit},
            "time_over_ours": None if yardstick is None else seconds[name] / yardstick,
            **memory,
        }
        rows.append(Row(figures, is_peer=name in contest.peers))
    return Race(contest.subject, "forward_backward", rows, contest.left_out, unit)


def _memory(sequences: Sequences, enter: Enter, name: str) -> dict[str, int]:
    return {f"memory_{loss}": memory_of(sequences, enter, loss) for loss in LOSSES}


def memory_of(sequences: Sequences, enter: Enter, loss: str) -> int:
    """Returns the most bytes that one forward and backward holds beside what was there before."""
    run = recurrences.backward(enter(sequences), sequences, loss)
    run()
    return peak_bytes(run, sequences.device)
