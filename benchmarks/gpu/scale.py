"""How much each part measures: nine minutes of a GPU, a dry run of minutes on two cores, a smoke test of seconds."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from stiefelkit.measuring.plans import CASES, ScanCase

T = TypeVar("T")
Sizes = tuple[tuple[int, int, int], ...]
"""Of n, p, and the number of frames in the batch; the ones that matter most first, in case time runs out."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    `time` multiplies the limits of the parts, since a CPU may be busy with other things. All maps and optimizers are
    looked at if none is named, and laws most telling first. `drift` and `race` are fields of plans; races of the scan
    have six times the seconds. `epoch` is in batches, all if 0; `rotations` are T, B and n of linear recurrences; of
    `tries` cases of each kind the truth is looked at. `share` is the number of this process, of how many.
    """

    time: float = 3.0
    maps: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    laws: tuple[str, ...] = ("frames", "precision")
    steps_laws: tuple[str, ...] = ("frames", "descent")
    drift: dict[str, Any] = field(default_factory=lambda: {"steps": 20, "sizes": ((8, 8),)})
    sizes: Sizes = ((8, 8, 1), (8, 8, 3), (12, 4, 1))
    step_sizes: Sizes = ((8, 8, 1), (8, 8, 3))
    replays: Sizes = ((8, 8, 1),)
    cases: tuple[ScanCase, ...] = (ScanCase("A", T=20, n=6, B=4), ScanCase("D", T=20, n=4, B=3, is_complex=True))
    race: dict[str, Any] = field(default_factory=lambda: {"repeats": 1, "seconds": 1e-3})
    memory_size: int = 32
    epoch: int = 2
    rotations: Sizes = ((40, 3, 8), (200, 2, 8))
    image: int = 8
    tries: int = 3
    share: tuple[int, int] = (0, 1)

    def mine(self, items: Iterable[T]) -> list[T]:
        """Returns those of the items that are this process's."""
        number, count = self.share
        return list(items)[number::count]


_SQUARES = ((64, 64, 1), (1024, 1024, 1), (64, 64, 256), (256, 256, 1), (4096, 4096, 1), (32, 32, 2048), (512, 512, 1))
DRY = Scale()
SCALES = {
    "full": Scale(
        time=1.0,
        laws=(
            *("frames", "gradients", "precision", "batch", "pure", "round_trip", "finite_gradients", "linear"),
            *("decay", "schemes"),
        ),
        steps_laws=("frames", "precision", "descent", "refusal", "batch", "groups", "resume", "guard"),
        drift={"steps": 10_000, "look_every": 50},
        sizes=(*_SQUARES, (128, 128, 64), (32, 32, 1), (2048, 2048, 1), (128, 128, 1), (2048, 32, 1)),
        step_sizes=(*_SQUARES, (2048, 32, 1)),
        replays=((64, 64, 1), (64, 64, 256), (512, 512, 1), (32, 32, 2048)),
        cases=tuple(CASES[name] for name in "ABCD"),
        race={"repeats": 20, "seconds": 0.05},
        memory_size=2048,
        epoch=0,
        rotations=((784, 50, 128), (16384, 2, 128), (784, 128, 512)),
        image=28,
        tries=10_000,
    ),
    "dry": DRY,
    "smoke": replace(
        DRY,
        maps=("cayley",),
        optimizers=("cayley_sgd",),
        laws=("frames",),
        steps_laws=("descent",),
        drift={"steps": 3, "sizes": ((4, 4),), "methods": ("cayley", "cayley_sgd")},
        sizes=((4, 4, 1),),
        step_sizes=((4, 4, 1),),
        replays=((4, 4, 1),),
        cases=DRY.cases[:1],
        memory_size=8,
        epoch=1,
        rotations=DRY.rotations[:1],
        tries=1,
    ),
}
