"""The race of the scan, beside other recurrences."""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from stiefelkit.machine import threads
from stiefelkit.measuring import recurrences
from stiefelkit.measuring.clock import peak_bytes
from stiefelkit.measuring.contest import NO_TIME, Contest, ProgressCallback, Race, Row, Schedule, quiet, scatter, seeded
from stiefelkit.measuring.plans import FACTORS, ScanCase, ScanRace, torch_dtype
from stiefelkit.measuring.recurrences import Enter, Sequences, recurrence_peers

LOSSES = ("sequence", "last_state")


class ScanEntrant(NamedTuple):
    """A backend, or a peer; the loss that is differentiated; and what gets ready."""

    is_peer: bool
    loss: str
    enter: Enter


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
                yield _race(plan, drawn(plan, case), watch, schedule, 1 / (len(plan.cases) - done))


def _entrants(plan: ScanRace, sequences: Sequences) -> dict[str, ScanEntrant]:
    """Returns name in the table to entrant: backends, the first and factors with the last state too, and peers."""
    entrants = {}
    backends = plan.backends or recurrences.fast_backends(sequences)
    for number, (backend, enter) in enumerate(recurrences.ours(backends).items()):
        for loss in LOSSES if number == 0 or backend == FACTORS else LOSSES[:1]:
            name = f"scan ({backend})" + (", last state" if loss == LOSSES[1] else "")
            entrants[name] = ScanEntrant(False, loss, enter)
    peers = plan.named_peers or (recurrence_peers if plan.peers else ())
    return entrants | {name: ScanEntrant(True, LOSSES[0], recurrence_peers[name]) for name in peers}


def _race(plan: ScanRace, sequences: Sequences, watch: ProgressCallback, schedule: Schedule, share: float) -> Race:
    case, entrants = sequences.case, _entrants(plan, sequences)
    peers = [name for name, entrant in entrants.items() if entrant.is_peer]
    contest = Contest(str(case), peers, watch, {}, schedule, share)
    with seeded(plan.seed):
        entries = contest.attempt("preparing", entrants, lambda name: entrants[name].enter(sequences))
    runs = {name: recurrences.backward(entry, sequences, entrants[name].loss) for name, entry in entries.items()}
    unit, timings = contest.timed(plan, recurrences.limit(sequences), contest.tried(runs), "forward and backward")
    seconds = {name: timing.median for name, timing in timings.items()}
    # our scan: with the backend that "auto" picks or, if that does not race, the fastest
    picked = f"scan ({recurrences.picked_backend(sequences)})"
    whole = [name for name in seconds if name not in peers and entrants[name].loss == LOSSES[0]]
    yardstick = seconds.get(picked, min((seconds[name] for name in whole), default=None))
    rows = []
    for name in sorted(seconds, key=lambda name: (name in peers, seconds[name])):
        memory: dict[str, int | None] = {f"memory_{loss}": None for loss in LOSSES}
        for loss in LOSSES if plan.memory and entrants[name].loss == LOSSES[0] else ():
            found = contest.attempt(
                "memory of", [name], lambda name, loss=loss: memory_of(sequences, entrants[name].enter, loss)
            )
            memory[f"memory_{loss}"] = found.get(name)
        figures = {
            **{"operation": entrants[name].loss, "case": case.name, "contender": name, "T": case.T},
            **{"n": entries[name].width, "B": case.B, "m": case.m, "is_complex": entries[name].dtype.is_complex},
            **{"activation": plan.activation, "dtype": plan.dtype, "device": plan.device},
            **{"seconds": seconds[name], "limit_units": seconds[name] / unit},
            "time_over_ours": None if yardstick is None else seconds[name] / yardstick,
            **memory,
            **scatter(timings[name]),
        }
        rows.append(Row(figures, is_peer=name in peers))
    return Race(str(case), "forward_backward", rows, contest.left_out, unit)


def memory_of(sequences: Sequences, enter: Enter, loss: str) -> int:
    """Returns the most bytes that one forward and backward holds beside what was there before."""
    run = recurrences.backward(enter(sequences), sequences, loss)
    run()
    return peak_bytes(run, sequences.device)
