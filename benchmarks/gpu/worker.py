"""One part, or a share of one, in a process of its own: `python -m benchmarks.gpu.worker PART SCALE DEVICE END SHARE`.

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
from benchmarks.gpu.scale import SCALES, Scale
from stiefelkit.machine import threads
from stiefelkit.measuring.contest import Schedule


def work(part: str, scale: Scale, device: str, end: float, say: Callable[[dict[str, object]], None]) -> None:
    """Measures a part, and says each table; ends before the first that would begin after a time of the clock."""
    with threads(1):
        for race in PARTS[part].measure(scale, device, Schedule(end - time.time())):
            say({"race": dataclasses.asdict(race)})
            if time.time() > end:
                say({"left_out": {"what comes after": "the time of the part was over."}})
                return


def indexed_device(device: torch.device | str) -> torch.device:
    """A device with its index, that of the current CUDA device where none is given."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def main() -> None:
    """Reads the command line, and keeps standard output for the lines."""
    part, scale, device, end, number, count = sys.argv[1:]
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if device.startswith("cuda"):
        torch.cuda.set_device(indexed_device(device))
    shared = dataclasses.replace(SCALES[scale], share=(int(number), int(count)))
    work(part, shared, device, float(end), lambda said: print(json.dumps(said), file=lines))


if __name__ == "__main__":
    main()
