"""One part, in a process of its own: `python -m benchmarks.gpu.worker PART SCALE DEVICE SECONDS`.

A line of JSON on standard output for each cell; what libraries print goes to standard error.
"""

import dataclasses
import json
import os
import sys
import time
from typing import Any

import torch

from benchmarks.gpu.parts import PARTS, LeftOut
from benchmarks.gpu.scale import SCALES
from stiefelkit.measuring.races.clock import indexed_device
from stiefelkit.measuring.report.record import clocks, machine
from stiefelkit.training.memory import threads

__all__ = ["work"]


def work(part: str, scale: str, device: str, seconds: float, say: Any) -> None:
    """Measures a part, and says each cell; ends before the first that would begin after so many seconds."""
    end = time.monotonic() + seconds
    say({"machine": machine(device, 1, "float32")})
    with threads(1):
        for cell in PARTS[part].cells(SCALES[scale], device):
            if isinstance(cell, LeftOut):
                say({"left_out": dataclasses.asdict(cell)})
            else:
                say({"figure": dataclasses.asdict(cell), "clocks": clocks(device)})
            if time.monotonic() > end:
                say({"left_out": {"what": "what comes after", "reason": f"{seconds:.0f} seconds were over."}})
                return


def main() -> None:
    """Reads the command line, and keeps standard output for the lines."""
    part, scale, device, seconds = sys.argv[1:]
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if device.startswith("cuda"):
        torch.cuda.set_device(indexed_device(device))
    work(part, scale, device, float(seconds), lambda cell: print(json.dumps(cell), file=lines))


if __name__ == "__main__":
    main()
