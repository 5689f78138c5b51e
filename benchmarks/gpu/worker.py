"""One part, in a process of its own: `python -m benchmarks.gpu.worker PART SCALE DEVICE SECONDS`.

A line of JSON on standard output for each table; what libraries print goes to standard error.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.scale import SCALES
from stiefelkit.machine import threads
from stiefelkit.measuring.contest import Schedule


def work(part: str, scale: str, device: str, seconds: float, say: Callable[[dict[str, object]], None]) -> None:
    """Measures a part, and says each table; ends before the first that would begin after so many seconds."""
    end = time.monotonic() + seconds
    with threads(1):
        for race in PARTS[part].measure(SCALES[scale], device, Schedule(seconds)):
            say({"race": dataclasses.asdict(race)})
            if time.monotonic() > end:
                say({"left_out": {"what comes after": f"{seconds:.0f} seconds were over."}})
                return


def indexed_device(device: torch.device | str) -> torch.device:
    """A device with its index, that of the current CUDA device where none is given."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def main() -> None:
    """Reads the command line, and keeps standard output for the lines."""
    part, scale, device, seconds = sys.argv[1:]
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if device.startswith("cuda"):
        torch.cuda.set_device(indexed_device(device))
    work(part, scale, device, float(seconds), lambda said: print(json.dumps(said), file=lines))


if __name__ == "__main__":
    main()
