"""The race of the scan, beside other recurrences.

`python -m stiefelkit.measuring.races.scan` is the process of its own in which `resident_bytes` has memory measured.
"""

import contextlib
import copy
import dataclasses
import gc
import pickle
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn import functional as F

from stiefelkit import models
from stiefelkit.errors import OptionError, StiefelkitError
from stiefelkit.measuring.races import recurrences
from stiefelkit.measuring.races.clock import Run, Timing, peak_bytes
from stiefelkit.measuring.races.field import Field, Race, Row, Watch, quiet, scatter, seeded
from stiefelkit.measuring.races.plan import ScanRace
from stiefelkit.measuring.races.recurrences import FACTORS, Enter, Sequences, recurrence_peers
from stiefelkit.measuring.races.scan_cases import ScanCase
from stiefelkit.measuring.races.schedule import NO_TIME, Deadline, deadline_of
from stiefelkit.models import SequenceModel
from stiefelkit.optim import parameter_groups
from stiefelkit.training.memory import peak_memory, threads
from stiefelkit.weights.change import bake

LOSSES = ("sequence", "last_state")
STEP = "training_step"
MODEL, CLASSES = "scornn", 10
"""The net of the training step, and the classes that it tells apart."""


class ScanContender(NamedTuple):
    """A backend, or a peer, by name; the loss that is differentiated; and what gets ready."""

    contender: str
    is_peer: bool
    loss: str
    enter: Enter


def races(plan: ScanRace, watch: Watch = quiet, deadline: Deadline | None = None) -> Iterator[Race]:
    """Races case by case, and yields each race when it is over: ours before peers, and the fastest first."""
    deadline, ahead = deadline or deadline_of(plan), [*plan.cases]
    if plan.training_step:
        ahead.append(next(case for case in plan.cases if not case.is_complex))
    with threads(plan.threads):
        for done, case in enumerate(ahead):
            share = 1 / (len(ahead) - done)
            operation = STEP if done == len(plan.cases) else "forward_backward"
            if deadline.is_over:
                whole = "training step" if operation == STEP else "all contenders"
                yield Race(case, operation, [], {whole: NO_TIME})
            elif operation == STEP:
                yield _training_step(plan, case, watch, deadline)
            else:
                yield _race(plan, plan.drawn(case), watch, deadline, share)


def _starters(plan: ScanRace, drawn: Sequences) -> dict[str, ScanContender]:
    """Returns name in the table to contender: backends, the first and factors with the last state too, and peers."""
    contenders = {}
    backends = plan.backends or recurrences.fast_backends(drawn)
    for number, (backend, enter) in enumerate(recurrences.ours(backends).items()):
        for loss in LOSSES if number == 0 or backend == FACTORS else LOSSES[:1]:
            name = f"scan ({backend})" + (", last state" if loss == LOSSES[1] else "")
            contenders[name] = ScanContender(backend, False, loss, enter)
    peers = plan.named_peers or (recurrence_peers.available() if plan.peers else ())
    return contenders | {name: ScanContender(name, True, LOSSES[0], recurrence_peers.get(name)) for name in peers}


def _race(plan: ScanRace, drawn: Sequences, watch: Watch, deadline: Deadline, share: float) -> Race:
    starters = _starters(plan, drawn)
    peers = [name for name, starter in starters.items() if starter.is_peer]
    field = Field(str(drawn.case), peers, watch, {}, deadline, share)
    with seeded(plan.seed):
        entries = field.attempt("preparing", starters, lambda name: starters[name].enter(drawn))
    runs = {name: recurrences.backward(entry, drawn, starters[name].loss) for name, entry in entries.items()}
    unit, timings = field.timed(plan, recurrences.limit(drawn), field.tried(runs), "forward and backward")
    seconds = {name: timing.median for name, timing in timings.items()}
    memory = _memory(plan, drawn, {name: starters[name] for name in seconds}, field)
    # our scan: with the backend that "auto" picks or, if that does not race, the fastest
    picked = f"scan ({recurrences.picked_backend(drawn)})"
    sequences = [name for name in seconds if name not in peers and starters[name].loss == LOSSES[0]]
    fastest = min((seconds[name] for name in sequences), default=None)
    yardstick = seconds.get(picked, fastest)
    rows = []
    for name in sorted(seconds, key=lambda name: (name in peers, seconds[name])):
        width = {"n": entries[name].width, "is_complex": entries[name].dtype.is_complex}
        row = _row(plan, drawn.case, starters[name].loss, name, timings[name], unit, yardstick)
        rows.append(Row(row.figures | width | memory.get(name, {}), is_peer=name in peers))
    return Race(drawn.case, "forward_backward", rows, field.left_out, unit)


def _row(
    plan: ScanRace, case: ScanCase, operation: str, name: str, timing: Timing, unit: float, yardstick: float | None
) -> Row:
    sizes = {"T": case.T, "n": case.n, "B": case.B, "m": case.m, "is_complex": case.is_complex}
    figures = {
        **{"operation": operation, "case": case.name, "contender": name, **sizes},
        **{"activation": plan.activation, "dtype": plan.dtype, "device": plan.device},
        "seconds": timing.median,
        "limit_units": timing.median / unit,
        "time_over_ours": None if yardstick is None else timing.median / yardstick,
        **{"memory_sequence": None, "memory_last_state": None},
        **scatter(timing),
    }
    return Row(figures)


# A training step


def _training_step(plan: ScanRace, case: ScanCase, watch: Watch, deadline: Deadline) -> Race:
    alone, field = f"{MODEL}, scan alone", Field(str(case), (), watch, deadline=deadline)
    step, run = whole_and_scan(case, torch.device(plan.device), plan.seed)
    runs: dict[str, Run] = {MODEL: step, alone: run}
    unit, timings = field.timed(plan, recurrences.limit(plan.drawn(case)), runs, "training step")
    if len(timings) < len(runs):  # one alone tells nothing
        return Race(case, STEP, [], dict.fromkeys(runs, next(iter(field.left_out.values()))))
    yardstick = timings[alone].median
    rows = [_row(plan, case, STEP, name, timing, unit, yardstick) for name, timing in timings.items()]
    return Race(case, STEP, rows, field.left_out, unit)


def whole_and_scan(case: ScanCase, device: torch.device, seed: int) -> tuple[Run, Run]:
    """Returns a training step of scoRNN, and the forward and backward of its scan alone.

    The step draws nothing: it is zero_grad, the map to W, the scan, the read-out of the last state, cross-entropy over
    ten classes, the backward of all, and RMSprop with the rates of the paper. The scan alone has the same input, input
    weights and bias, and a W that is given, whose gradient it takes too. Sizes are those of a real net; the seed fixes
    weights and data.
    """
    with seeded(seed):
        x, y = torch.rand(case.B, case.T, case.m).to(device), torch.randint(CLASSES, (case.B,)).to(device)
        model = cast(SequenceModel, models.create(MODEL, case.m, case.n, CLASSES).to(device))
        g = (torch.randn(case.B, case.n) / case.n**0.5).to(device)
    optimizer = torch.optim.RMSprop(parameter_groups(model, lr=1e-3, skew={"lr": 1e-4}), alpha=0.9)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x, last_only=True), y).backward()
        optimizer.step()

    rnn = copy.deepcopy(model.rnn)
    bake(rnn, "weight_hh_l0")
    # The signs of the bias decide how fast the scan is: it is the model's own, wherever the steps take it.
    for name in ("weight_ih_l0", "bias_l0"):
        setattr(rnn, name, getattr(model.rnn, name))
    alone = SequenceModel(rnn, cast(nn.Linear, nn.Identity()))
    parameters = list(rnn.parameters())
    return step, lambda: torch.autograd.grad(alone(x, last_only=True), parameters, g)


# Memory


def _memory(
    plan: ScanRace, drawn: Sequences, starters: Mapping[str, ScanContender], field: Field
) -> dict[str, dict[str, int]]:
    """Returns name to the figures of a row about memory."""
    sizes: dict[str, dict[str, int]] = {}
    for name, starter in starters.items() if plan.memory else ():
        for loss in LOSSES if starter.loss == LOSSES[0] else ():
            key = f"memory of {name}, {loss.replace('_', ' ')}"
            asked = (drawn, starter.contender, loss, starter.is_peer, plan.threads)
            for size in field.attempt("measuring", [key], lambda _, asked=asked: resident_bytes(*asked)).values():
                sizes.setdefault(name, {})[f"memory_{loss}"] = size
    return sizes


def resident_bytes(drawn: Sequences, contender: str, loss: str, is_peer: bool, thread_count: int = 1) -> int:
    """Returns the bytes by which a fresh process grows at most while it runs a contender once, forward and backward.

    Input, weights and dL/dh are there before, and a run of two steps has loaded what torch loads at first use. On the
    CPU it is the resident set, on a GPU what torch has allocated.

    The contender is the name of a backend or of a registered peer, the loss "sequence" or "last_state".

    Raises:
        OptionError: the contender failed, or its process was ended from outside.
    """
    # Fields, not the object: its tensors are drawn again over there.
    fields = {entry.name: getattr(drawn, entry.name) for entry in dataclasses.fields(Sequences)}
    asked = pickle.dumps((fields, contender, loss, is_peer, thread_count))
    done = subprocess.run([sys.executable, "-m", __name__], input=asked, capture_output=True, check=False)
    if done.returncode:
        said = [line for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
        last = said[-1] if said else f"it ended with code {done.returncode}"
        raise OptionError(f"its memory could not be measured: {last}.")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, str):
        raise OptionError(answer)
    return answer


def _growth(fields: dict[str, Any], contender: str, loss: str, is_peer: bool) -> int:
    enter = recurrence_peers.get(contender) if is_peer else recurrences.ours([contender])[contender]
    case = fields["case"]

    def prepared(case: ScanCase) -> Run:
        drawn = Sequences(**{**fields, "case": case})
        return recurrences.backward(enter(drawn), drawn, loss)

    prepared(dataclasses.replace(case, T=min(2, case.T)))()
    run = prepared(case)
    gc.collect()
    if fields["device"].type == "cuda":
        return peak_bytes(run, fields["device"])
    with contextlib.suppress(OSError):  # where it can be, the peak is set back to what is resident now
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    run()
    return _peak() - before


def _peak() -> int:
    """Returns the bytes of the largest resident set so far.

    Where there is a /proc, its figure is that of this program alone; Linux's getrusage hands the peak of the parent
    down to the child.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return peak_memory("cpu")["peak_bytes"]
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    *asked, thread_count = pickle.load(sys.stdin.buffer)
    answer: int | str
    try:
        with threads(thread_count):
            answer = _growth(*asked)
    except StiefelkitError as refused:
        answer = str(refused)
    pickle.dump(answer, sys.stdout.buffer)
