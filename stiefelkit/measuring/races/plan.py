"""Plans of the races: where, how long, of what, and who takes part. Read for help, so torch comes in functions."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from stiefelkit.errors import OptionError
from stiefelkit.measuring.drift.plan import DTYPES as WIDE_DTYPES
from stiefelkit.numbers import above, settle_, whole
from stiefelkit.training.checks import STEP_LENGTH, known_parametrizations, known_words, tall_sizes, usable_place
from stiefelkit.training.recipes import Option

if TYPE_CHECKING:
    from stiefelkit.measuring.races.contenders import Contender
    from stiefelkit.measuring.races.frame_problem import FrameProblem

__all__ = ["WHO", "FramePlan", "NormPlan", "OptimizerRace", "ParametrizationRace", "Rules", "TimedPlan"]

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
        """Returns the problem of one size."""
        import torch

        from stiefelkit.measuring.races.frame_problem import FrameProblem

        dtype, device = getattr(torch, self.dtype), torch.device(self.device)
        return FrameProblem(n, p, self.batch, dtype, device, dict(options or {}), self.seed)


@dataclass(frozen=True)
class TimedPlan(FramePlan, Rules):
    """How frames race for time.

    Args:
        apart: race the batch also as so many weights or parameters of their own.
        launches: count what a device has to launch, and how often it is waited for, instead of timing.
    """

    apart: bool = False
    launches: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.apart and self.batch < 2:
            raise OptionError(f"{WHO} needs a batch of two frames or more to take them apart, got {self.batch}.")


@dataclass(frozen=True)
class EntrantPlan(FramePlan):
    """Which parametrizations take part; their peers are those of the ones named, all of them where none is.

    Args:
        parametrizations: names, separated by commas; all if left out. Their peers race alone with them.
        precisions: exact, fast, or both, separated by commas; each that a parametrization has if left out.
        options: options of parametrizations, as in --options.reflections 16, for those that have them.
    """

    parametrizations: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    options: dict[str, Option] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from stiefelkit.measuring.races.contenders import options_of
        from stiefelkit.weights.attach import available

        super().__post_init__()
        classes = available()
        known_parametrizations(self.parametrizations)
        precisions = {"exact", "fast"}.union(*(cls.precisions for cls in classes.values()))
        known_words(WHO, "precision", self.precisions, precisions)
        options = {option for name in self.parametrizations or classes for option in options_of(classes[name])}
        known_words(WHO, "option", self.options, options)
        if not self.contenders():
            raise OptionError(
                f"{WHO} needs a parametrization with precision {' or '.join(self.precisions)}, got none of those."
            )

    def contenders(self) -> dict[str, Contender]:
        """Returns name to parametrization, in each precision asked for; with --apart by itself and grouped, too."""
        from stiefelkit.measuring.races.contenders import our_contenders
        from stiefelkit.weights.attach import available

        names, apart = self.parametrizations or available(), isinstance(self, TimedPlan) and self.apart
        return our_contenders(names, self.precisions, self.options, apart)

    def racing_peers(self) -> dict[str, Contender]:
        """Returns name to peer, none unless asked for."""
        missing = {name for names in self.missing_peers().values() for name in names}
        return {name: peer for name, peer in self._asked_peers().items() if name not in missing}

    def missing_peers(self) -> dict[str, list[str]]:
        """Returns package to the peers that are left out for want of it."""
        from stiefelkit.measuring.races.peers import missing_packages

        return missing_packages(self._asked_peers())

    def _asked_peers(self) -> dict[str, Contender]:
        from stiefelkit.measuring.races.peers import peers

        installed, families = peers.available() if self.peers else {}, self.parametrizations
        return {name: peer for name, peer in installed.items() if not families or peer.family in families}


@dataclass(frozen=True)
class ParametrizationRace(EntrantPlan, TimedPlan):
    """Which parametrizations race, beside their peers.

    Args:
        operations: forward, forward_backward, step, separated by commas.
        peers: race torch's own maps, geoopt, and geotorch if it is installed.
    """

    operations: tuple[str, ...] = ("forward_backward", "step")

    def __post_init__(self) -> None:
        from stiefelkit.measuring.races.contenders import OPERATIONS

        known_words(WHO, "operation", self.operations, OPERATIONS)
        if not self.operations:
            raise OptionError(f"{WHO} needs one operation or more, got none.")
        super().__post_init__()


@dataclass(frozen=True)
class NormPlan(EntrantPlan):
    """Whose errors at large coordinates are measured: parametrizations and peers, drawn as in their race.

    Args:
        batch: number of frames; the worst of them is shown.
        parametrizations: names, separated by commas; all if left out.
        factors: integers, separated by commas.
        peers: show the peers of the parametrizations too.
    """

    sizes: tuple[tuple[int, int], ...] = ((64, 64),)
    factors: tuple[float, ...] = (1.0, 10.0, 100.0, 1e3, 1e4)

    def __post_init__(self) -> None:
        super().__post_init__()
        for factor in self.factors:
            above(0).require(WHO, "factor", factor)


@dataclass(frozen=True)
class OptimizerRace(TimedPlan):
    """Which optimizers of frames race.

    Args:
        dtype: float32, float64, complex64 or complex128.
        optimizers: names, separated by commas, peers' among them; all of ours that move frames, plugins too, if left
            out. Peers that are named race, and no others.
        precisions: exact, fast, or both, separated by commas.
        step_length: of the first step, at most 100.
        peers: race geoopt's RiemannianSGD and RiemannianAdam, and pogo-torch's POGO if it is installed, or those of
            them that --optimizers names; what takes over 20 s for a step is left out.
    """

    sizes: tuple[tuple[int, int], ...] = ((64, 64), (256, 256), (512, 512), (1024, 64), (2048, 32))
    optimizers: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("exact", "fast")
    step_length: float = 0.1

    dtypes: ClassVar[Collection[str]] = WIDE_DTYPES

    def __post_init__(self) -> None:
        from stiefelkit.measuring.moved_frames import own_optimizers, peer_optimizers
        from stiefelkit.optim.settings import PRECISIONS

        super().__post_init__()
        STEP_LENGTH.require(WHO, "step_length", self.step_length)
        known_words(WHO, "optimizer of frames", self.optimizers, [*own_optimizers(), *peer_optimizers.names()])
        known_words(WHO, "precision", self.precisions, PRECISIONS)
        if self._own() and not self.contenders():
            raise OptionError(f"{WHO} needs an optimizer in precision exact or fast, got none.")

    def contenders(self) -> dict[str, str]:
        """Returns name in the table to method, for ours in each precision that they have."""
        from stiefelkit.measuring.moved_frames import check_method
        from stiefelkit.optim.settings import PRECISIONS

        methods = {}
        for name in self._own():
            for precision in self.precisions or PRECISIONS:
                try:
                    check_method(f"{name}:{precision}")
                except OptionError:
                    continue
                methods[f"{name} ({precision})"] = f"{name}:{precision}"
        return methods

    def racing_peers(self) -> dict[str, str]:
        """Returns the same for peers: those that are named, else all or none."""
        from stiefelkit.measuring.moved_frames import peer_optimizers

        named = [name for name in self.optimizers if name in peer_optimizers.names()]
        return {name: name for name in named or (peer_optimizers.available() if self.peers else ())}

    def _own(self) -> list[str]:
        from stiefelkit.measuring.moved_frames import own_optimizers

        return [name for name in own_optimizers() if name in self.optimizers or not self.optimizers]
