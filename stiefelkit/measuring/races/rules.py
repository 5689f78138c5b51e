"""What the plans of races share: where, how long, and of which frames. Read for help, so torch comes in functions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from stiefelkit.errors import OptionError
from stiefelkit.measuring.drift.plan import DTYPES as WIDE_DTYPES
from stiefelkit.numbers import above, settle_, whole
from stiefelkit.training.checks import (
    known_words,
    tall_sizes,
    usable_place,
)

if TYPE_CHECKING:
    from stiefelkit.measuring.races.frame_problem import FrameProblem

__all__ = ["DTYPES", "WHO", "FramePlan", "Rules", "Site"]

WHO = "The race"
DTYPES = (*WIDE_DTYPES, "bfloat16", "float16")


@dataclass(frozen=True)
class Site:
    """Where something is measured.

    Args:
        device: cpu or cuda.
        threads: CPU threads.
        seed: fixes what is drawn.
    """

    device: str = "cpu"
    threads: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        settle_(self)
        usable_place(WHO, self.device, self.threads, self.seed)


@dataclass(frozen=True)
class Rules(Site):
    """Where and how long a race is run, whatever takes part.

    Args:
        repeats: samples of each contender at most.
        seconds: time for the samples of each contender; one whose single call takes longer gets one sample.
        cold: write over the device's last cache before every call.
        replay: capture each contender in a CUDA graph, and time its replays; what cannot be captured is left out.
    """

    repeats: int = 200
    seconds: float = 1.0
    cold: bool = False
    replay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(1).require(WHO, "repeats", self.repeats)
        above(0).require(WHO, "seconds", self.seconds)
        if self.replay and not self.device.startswith("cuda"):
            raise OptionError(f"{WHO} needs a CUDA device for replays, got {self.device!r}.")


@dataclass(frozen=True)
class FramePlan(Site):
    """Which frames are measured.

    Args:
        sizes: n, or n x p for tall frames (2048x32), separated by commas.
        batch: number of frames.
        dtype: float32, float64, complex64, complex128, bfloat16 or float16.
        peers: race other implementations too.
    """

    sizes: tuple[tuple[int, int], ...] = ((64, 64), (256, 256), (512, 512))
    batch: int = 1
    dtype: str = "float32"
    peers: bool = False

    dtypes: ClassVar[Collection[str]] = DTYPES
    """Those that can be raced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(1).require(WHO, "batch", self.batch)
        tall_sizes(WHO, self.sizes)
        known_words(WHO, "dtype", [self.dtype], self.dtypes)

    def problem(self, n: int, p: int, options: dict[str, Any] | None = None) -> FrameProblem:
        """The problem of one size."""
        import torch

        from stiefelkit.measuring.races.frame_problem import FrameProblem

        dtype, device = getattr(torch, self.dtype), torch.device(self.device)
        return FrameProblem(n, p, self.batch, dtype, device, dict(options or {}), self.seed)
