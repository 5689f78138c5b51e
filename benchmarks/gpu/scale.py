"""How much each part measures: nine minutes of a GPU, a dry run of minutes on two cores, a smoke test of seconds."""

from dataclasses import dataclass
from typing import Any

from stiefelkit.measuring.races.scan_cases import CASES, ScanCase

__all__ = ["DRY", "FULL", "SCALES", "SMOKE", "Scale"]

Sizes = tuple[tuple[int, int, int], ...]
"""Of n, p, and the number of frames in the batch; the ones that matter most first, in case time runs out."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Args:
        time: what the limits of the parts are multiplied by; a CPU may be busy with other things.
        maps: parametrizations whose laws are checked; all if empty.
        optimizers: the same.
        laws: of maps, most telling first.
        steps_laws: of optimizers.
        drift: fields of `DriftPlan`.
        drift_methods: all if empty.
        sizes: of maps.
        step_sizes: of optimizers of frames.
        replays: sizes of maps that are replayed as graphs.
        race: fields of the races.
        scan: of the race of the scan.
        memory_size: n of the frames whose memory is measured.
        losses: of the recurrence whose memory is measured.
        epoch: batches of the epoch; all if 0.
        rotations: T, B and n of linear recurrences.
        image: side of the images of convolutions.
    """

    time: float
    maps: tuple[str, ...]
    optimizers: tuple[str, ...]
    laws: tuple[str, ...]
    steps_laws: tuple[str, ...]
    drift: dict[str, Any]
    drift_methods: tuple[str, ...]
    sizes: Sizes
    step_sizes: Sizes
    replays: Sizes
    race: dict[str, Any]
    cases: tuple[ScanCase, ...]
    scan: dict[str, Any]
    memory_size: int
    losses: tuple[str, ...]
    epoch: int
    rotations: Sizes
    image: int


LAWS = (
    "frames",
    "gradients",
    "precision",
    "batch",
    "pure",
    "round_trip",
    "finite_gradients",
    "linear",
    "decay",
    "schemes",
)
STEPS_LAWS = ("frames", "precision", "descent", "refusal", "batch", "groups", "resume", "guard")

FULL = Scale(
    time=1.0,
    maps=(),
    optimizers=(),
    laws=LAWS,
    steps_laws=STEPS_LAWS,
    drift={"steps": 10_000, "gradients": "rotation", "step_length": 1e-2, "look_every": 50},
    drift_methods=(),
    sizes=(
        (64, 64, 1),
        (1024, 1024, 1),
        (64, 64, 256),
        (256, 256, 1),
        (4096, 4096, 1),
        (32, 32, 2048),
        (512, 512, 1),
        (128, 128, 64),
        (32, 32, 1),
        (2048, 2048, 1),
        (128, 128, 1),
        (2048, 32, 1),
    ),
    step_sizes=(
        (64, 64, 1),
        (64, 64, 256),
        (1024, 1024, 1),
        (256, 256, 1),
        (2048, 32, 1),
        (32, 32, 2048),
        (512, 512, 1),
        (4096, 4096, 1),
    ),
    replays=((64, 64, 1), (64, 64, 256), (512, 512, 1), (32, 32, 2048)),
    race={"repeats": 20, "seconds": 0.05},
    cases=tuple(CASES[name] for name in "ABCD"),
    scan={"repeats": 20, "seconds": 0.3},
    memory_size=2048,
    losses=("sequence", "last_state"),
    epoch=0,
    rotations=((784, 50, 128), (16384, 2, 128), (784, 128, 512)),
    image=28,
)
_TINY_CASES = (ScanCase("A", T=20, n=6, B=4), ScanCase("D", T=20, n=4, B=3, is_complex=True))
DRY = Scale(
    time=3.0,
    maps=(),
    optimizers=(),
    laws=("frames", "precision"),
    steps_laws=("frames", "descent"),
    drift={"steps": 20, "gradients": "rotation", "step_length": 1e-2, "sizes": ((8, 8),)},
    drift_methods=(),
    sizes=((8, 8, 1), (8, 8, 3), (12, 4, 1)),
    step_sizes=((8, 8, 1), (8, 8, 3)),
    replays=((8, 8, 1),),
    race={"repeats": 1, "seconds": 1e-3},
    cases=_TINY_CASES,
    scan={"repeats": 1, "seconds": 1e-3},
    memory_size=32,
    losses=("sequence", "last_state"),
    epoch=2,
    rotations=((40, 3, 8), (200, 2, 8)),
    image=8,
)
SMOKE = Scale(
    time=3.0,
    maps=("cayley",),
    optimizers=("cayley_sgd",),
    laws=("frames",),
    steps_laws=("descent",),
    drift={"steps": 3, "gradients": "rotation", "sizes": ((4, 4),)},
    drift_methods=("cayley", "cayley_sgd"),
    sizes=((4, 4, 1),),
    step_sizes=((4, 4, 1),),
    replays=((4, 4, 1),),
    race={"repeats": 1, "seconds": 1e-3},
    cases=_TINY_CASES[:1],
    scan={"repeats": 1, "seconds": 1e-3},
    memory_size=8,
    losses=("last_state",),
    epoch=1,
    rotations=((40, 3, 8),),
    image=8,
)
SCALES = {"full": FULL, "dry": DRY, "smoke": SMOKE}
