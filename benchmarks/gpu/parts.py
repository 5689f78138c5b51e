"""The parts in their order, where each is measured, and how many seconds it has."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.gpu.scale import Scale
from stiefelkit.measuring.report.record import Figure

__all__ = ["PARTS", "Cells", "LeftOut", "Part", "absent_peers"]


@dataclass(frozen=True)
class LeftOut:
    """What was not measured, and the reason."""

    what: str
    reason: str


def absent_peers() -> Iterator[LeftOut]:
    """Other packages whose optimizers of frames are compared with, where they are not installed."""
    for module, package in (("geoopt", "geoopt"), ("pogo", "pogo-torch")):
        if importlib.util.find_spec(module) is None:
            yield LeftOut(f"optimizers of {package}", f"{package} is not installed.")


Cells = Iterator[Figure | LeftOut]
"""What a part yields, cell by cell."""


@dataclass(frozen=True)
class Part:
    """A part: what is in it, the function "module:name" from a scale and a device to its cells, and its seconds."""

    words: str
    where: str
    seconds: float

    def cells(self, scale: Scale, device: str) -> Cells:
        """Measures, and yields each cell when it is over."""
        module, _, name = self.where.partition(":")
        measure: Callable[[Scale, str], Cells] = getattr(importlib.import_module(module), name)
        return measure(scale, device)


PARTS = {
    "laws": Part("laws and gradients of maps and optimizers", "benchmarks.gpu.laws:of_everything", 110),
    "drift": Part("drift over many steps", "benchmarks.gpu.drifts:of_every_method", 110),
    "maps": Part("forward and backward of maps", "benchmarks.gpu.times:of_maps", 90),
    "steps": Part("steps of optimizers of frames", "benchmarks.gpu.times:of_steps", 50),
    "replays": Part("maps replayed as graphs", "benchmarks.gpu.times:of_replays", 20),
    "scan": Part("the recurrence", "benchmarks.gpu.recurrences:of_cases", 80),
    "linear": Part("linear recurrences and convolutions", "benchmarks.gpu.linear:of_scans_and_convolutions", 14),
    "capture": Part("whole training steps as one graph", "benchmarks.gpu.captured:of_training_steps", 15),
    "memory": Part("memory", "benchmarks.gpu.memories:of_maps_and_scan", 25),
    "epoch": Part("an epoch of scoRNN on MNIST", "benchmarks.gpu.epoch:of_scornn", 25),
}
"""Name to part; together less than nine minutes."""
