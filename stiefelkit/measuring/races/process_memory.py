"""Peak memory of one contender of a race of recurrences, measured in a process of its own.

`python -m stiefelkit.measuring.races.process_memory` reads the fields of `resident_bytes` as JSON, measures itself, and
answers in JSON.
"""

import contextlib
import dataclasses
import gc
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from stiefelkit.errors import OptionError, StiefelkitError
from stiefelkit.measuring.races.recurrence_problem import Sequences
from stiefelkit.measuring.races.recurrences import backward, ours, recurrence_peers
from stiefelkit.measuring.races.scan_cases import ScanCase
from stiefelkit.training.memory import threads

__all__ = ["resident_bytes"]


def resident_bytes(drawn: Sequences, contender: str, loss: str, is_peer: bool, thread_count: int = 1) -> int:
    """Bytes by which a fresh process grows at most while it runs a contender once, forward and backward.

    Input, weights and dL/dh are there before, and a run of two steps has loaded what torch loads at first use. On the
    CPU it is the resident set, on a GPU what torch has allocated.

    Args:
        drawn: the case.
        contender: name of a backend, or of a registered peer.
        loss: "sequence" or "last_state".
        is_peer: which of the two it is.
        thread_count: CPU threads.

    Raises:
        OptionError: the contender failed, or its process was ended from outside.
    """
    asked = {
        "case": dataclasses.asdict(drawn.case),
        "activation": drawn.activation,
        "dtype": str(drawn.dtype).removeprefix("torch."),
        "device": str(drawn.device),
        "seed": drawn.seed,
        "contender": contender,
        "loss": loss,
        "is_peer": is_peer,
        "threads": thread_count,
    }
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"])[-1]
        raise OptionError(f"its memory could not be measured: {last}.") from None
    if "refused" in answer:
        raise OptionError(answer["refused"])
    return answer["bytes"]


def _measured(asked: dict[str, Any]) -> int:
    case = ScanCase(**asked["case"])
    enter = (
        recurrence_peers.get(asked["contender"]) if asked["is_peer"] else ours([asked["contender"]])[asked["contender"]]
    )

    def prepared(case: ScanCase) -> Any:
        dtype, device = getattr(torch, asked["dtype"]), torch.device(asked["device"])
        drawn = Sequences(case, asked["activation"], dtype, device, asked["seed"])
        return backward(enter(drawn), drawn, asked["loss"])

    prepared(dataclasses.replace(case, T=min(2, case.T)))()
    run = prepared(case)
    gc.collect()
    if asked["device"].startswith("cuda"):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    with contextlib.suppress(OSError):  # where it can be, the peak is set back to what is resident now
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    run()
    return _peak() - before


def _peak() -> int:
    """Bytes of the largest resident set so far.

    Where there is a /proc, its figure is that of this program alone; Linux's getrusage hands the peak of the parent
    down to the child.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _answer() -> None:
    asked = json.load(sys.stdin)
    try:
        with threads(asked["threads"]):
            answer: dict[str, Any] = {"bytes": _measured(asked)}
    except StiefelkitError as error:
        answer = {"refused": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    _answer()
