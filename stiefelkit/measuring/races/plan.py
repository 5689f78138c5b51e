"""Plans of the races: where, how long, of what, and who takes part. Read for help, so torch comes in functions."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from cyclopts import Parameter, Token

from stiefelkit.errors import OptionError
from stiefelkit.measuring.races import SUBJECT
from stiefelkit.measuring.races.scan_cases import CASES, ScanCase, cases_of, read_case
from stiefelkit.numbers import PRECISIONS, above, integer, validate_fields_
from stiefelkit.training.checks import (
    STEP_LENGTH,
    Sizes,
    known_parametrizations,
    known_words,
    tall_sizes,
    usable_place,
)
from stiefelkit.training.recipes import Option

if TYPE_CHECKING:
    from stiefelkit.measuring.races.contenders import Contender, FrameProblem
    from stiefelkit.measuring.races.recurrences import Sequences

WIDE_DTYPES = ("complex128", "complex64", "float32", "float64")
"""Names of the dtypes in which frames may be stored while an optimizer moves them."""
DTYPES = (*WIDE_DTYPES, "bfloat16", "float16")


@dataclass(frozen=True)
class Site:
    """The place of a measurement.

    Args:
        device: cpu or cuda.
        threads: CPU threads.
        seed: fixes what is drawn.
        quick: end in under a minute: fewer steps and samples, small sizes first, and what does not fit is left out by
            name.
    """

    device: str = "cpu"
    threads: int = 1
    seed: int = 0
    quick: bool = False

    subject: ClassVar[str] = SUBJECT
    """The first words of error messages."""

    def __post_init__(self) -> None:
        validate_fields_(self)
        usable_place(self.subject, self.device, self.threads, self.seed)


@dataclass(frozen=True)
class Rules(Site):
    """The place and the length of a race, whatever takes part.

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
        validate_fields_(self, SUBJECT, repeats=integer(1), seconds=above(0))
        if self.replay and not self.device.startswith("cuda"):
            raise OptionError(f"{SUBJECT} needs a CUDA device for replays, got {self.device!r}.")


@dataclass(frozen=True)
class FramePlan(Site):
    """The frames that are measured.

    Args:
        sizes: n, or n x p for tall frames (2048x32), separated by commas.
        batch: number of frames.
        dtype: float32, float64, complex64, complex128, bfloat16 or float16.
        peers: race other implementations too.
    """

    sizes: Sizes = ((64, 64), (256, 256), (512, 512))
    batch: int = 1
    dtype: str = "float32"
    peers: bool = False

    dtypes: ClassVar[Collection[str]] = DTYPES
    """Those that can be raced."""

    def __post_init__(self) -> None:
        super().__post_init__()
        integer(1).require(SUBJECT, "batch", self.batch)
        tall_sizes(SUBJECT, self.sizes)
        known_words(SUBJECT, "dtype", [self.dtype], self.dtypes)
        if self.quick:
            object.__setattr__(self, "sizes", tuple(sorted(self.sizes, key=lambda size: size[0] * size[1] ** 2)))

    def problem(self, n: int, p: int, options: dict[str, Any] | None = None) -> FrameProblem:
        """Returns the problem of one size."""
        import torch

        from stiefelkit.measuring.races.contenders import FrameProblem

        dtype, device = getattr(torch, self.dtype), torch.device(self.device)
        return FrameProblem(n, p, self.batch, dtype, device, dict(options or {}), self.seed)


@dataclass(frozen=True)
class TimedPlan(FramePlan, Rules):
    """A race of frames for time.

    Args:
        apart: race the batch also as so many weights or parameters of their own.
        launches: count what a device has to launch, and how often it is waited for, instead of timing.
    """

    apart: bool = False
    launches: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.apart and self.batch < 2:
            raise OptionError(f"{SUBJECT} needs a batch of two frames or more to take them apart, got {self.batch}.")


@dataclass(frozen=True)
class EntrantPlan(FramePlan):
    """The parametrizations that take part; their peers are those of the ones named, all of them where none is.

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
        known_words(SUBJECT, "precision", self.precisions, precisions)
        options = {option for name in self.parametrizations or classes for option in options_of(classes[name])}
        known_words(SUBJECT, "option", self.options, options)
        if not self.contenders():
            raise OptionError(
                f"{SUBJECT} needs a parametrization with precision {' or '.join(self.precisions)}, got none of those."
            )

    def contenders(self) -> dict[str, Contender]:
        """Returns name to parametrization, in each precision asked for; with --apart by itself and grouped, too."""
        from stiefelkit.measuring.races.contenders import our_contenders

        return our_contenders(self.parametrizations, self.precisions, self.options, getattr(self, "apart", False))

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
    """The parametrizations that race, beside their peers.

    Args:
        operations: forward, forward_backward, step, separated by commas.
        peers: race torch's own maps, geoopt, and geotorch if it is installed.
    """

    operations: tuple[str, ...] = ("forward_backward", "step")

    def __post_init__(self) -> None:
        from stiefelkit.measuring.races.contenders import OPERATIONS

        known_words(SUBJECT, "operation", self.operations, OPERATIONS)
        if not self.operations:
            raise OptionError(f"{SUBJECT} needs one operation or more, got none.")
        super().__post_init__()


@dataclass(frozen=True)
class NormPlan(EntrantPlan):
    """Whose errors at large coordinates are measured: parametrizations and peers, drawn as in their race.

    Args:
        batch: number of frames; the worst of them is shown.
        factors: integers, separated by commas.
        peers: show the peers of the parametrizations too.
    """

    sizes: Sizes = ((64, 64),)
    factors: tuple[float, ...] = (1.0, 10.0, 100.0, 1e3, 1e4)

    def __post_init__(self) -> None:
        super().__post_init__()
        for factor in self.factors:
            above(0).require(SUBJECT, "factor", factor)


@dataclass(frozen=True)
class OptimizerRace(TimedPlan):
    """The optimizers of frames that race.

    Args:
        dtype: float32, float64, complex64 or complex128.
        optimizers: names, separated by commas, peers' among them; all of ours that move frames, plugins too, if left
            out. Peers that are named race, and no others.
        precisions: exact, fast, or both, separated by commas.
        step_length: of the first step, at most 100.
        peers: race geoopt's RiemannianSGD and RiemannianAdam, and pogo-torch's POGO if it is installed, or those of
            them that --optimizers names; what takes over 20 s for a step is left out.
    """

    sizes: Sizes = ((64, 64), (256, 256), (512, 512), (1024, 64), (2048, 32))
    optimizers: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ("exact", "fast")
    step_length: float = 0.1

    dtypes: ClassVar[Collection[str]] = WIDE_DTYPES

    def __post_init__(self) -> None:
        from stiefelkit.measuring.moved_frames import own_optimizers, peer_optimizers

        super().__post_init__()
        STEP_LENGTH.require(SUBJECT, "step_length", self.step_length)
        known_words(SUBJECT, "optimizer of frames", self.optimizers, [*own_optimizers(), *peer_optimizers.names()])
        known_words(SUBJECT, "precision", self.precisions, PRECISIONS)
        if self._own() and not self.contenders():
            raise OptionError(f"{SUBJECT} needs an optimizer in precision exact or fast, got none.")

    def contenders(self) -> dict[str, str]:
        """Returns name in the table to method, for ours in each precision that they have."""
        from stiefelkit.measuring.moved_frames import check_method

        methods = {}
        for name in self._own():
            for precision in self.precisions or PRECISIONS:
                with contextlib.suppress(OptionError):
                    check_method(f"{name}:{precision}")
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


def _named_cases(_: type, tokens: Sequence[Token]) -> tuple[ScanCase, ...]:
    return cases_of(tokens[0].value)


def _own_case(_: type, tokens: Sequence[Token]) -> tuple[ScanCase, ...]:
    return (read_case(tokens[0].value),)


@dataclass(frozen=True)
class ScanRace(Rules):
    """The recurrences that race.

    Args:
        cases: out of A to G, separated by commas; of A, B, C and D all that the activation can do if left out.
        case: sizes of your own, T=784,n=170,B=128,m=1, with "complex" behind them if states are; races alone, or after
            --cases.
        activation: of the scan and of the loop.
        backends: of the scan, separated by commas, and "factors", W in factors in E, F and G; all fast ones that can do
            the case if left out.
        peers: race the eager loop, torch's RNN and LSTM.
        named_peers: the peers that race, whether all are asked for or not; all if empty and asked for.
        memory: measure peak memory too, each contender in a process of its own, a few seconds each.
        training_step: time a whole training step of scornn too, in the first real case, and the scan within it.
        dtype: float32 or float64; complex states are complex64 or complex128.
    """

    cases: Annotated[tuple[ScanCase, ...], Parameter(converter=_named_cases, accepts_keys=False, n_tokens=1)] = ()
    case: Annotated[tuple[ScanCase, ...], Parameter(converter=_own_case, accepts_keys=False, n_tokens=1)] = ()
    activation: str = "modrelu"
    backends: tuple[str, ...] = ()
    peers: bool = False
    named_peers: Annotated[tuple[str, ...], Parameter(parse=False)] = ()
    memory: bool = False
    training_step: bool = False
    dtype: str = "float32"
    repeats: int = 30
    seconds: float = 4.0

    def __post_init__(self) -> None:
        from stiefelkit.measuring.races.recurrences import FACTORS, recurrence_peers
        from stiefelkit.scan import BACKENDS, find_activation

        super().__post_init__()
        known_words(SUBJECT, "dtype", [self.dtype], ("float32", "float64"))
        known_words(SUBJECT, "backend", self.backends, (*BACKENDS, FACTORS))
        known_words(SUBJECT, "peer", self.named_peers, recurrence_peers.names())
        of_complex = find_activation(self.activation, False).of_complex()
        able = [case for case in CASES.values() if not case.map and (not case.is_complex or of_complex)]
        object.__setattr__(self, "cases", (*self.cases, *self.case) or tuple(able))
        object.__setattr__(self, "case", ())
        if self.quick:
            object.__setattr__(self, "cases", tuple(sorted(self.cases, key=lambda case: case.flops)))
        for case in self.cases:
            find_activation(self.activation, case.is_complex)
        if self.training_step:
            if self.dtype != "float32" or self.activation != "modrelu":
                raise OptionError(
                    f"{SUBJECT} needs float32 and modrelu for the training step, got {self.dtype}, {self.activation}."
                )
            if all(case.is_complex for case in self.cases):
                raise OptionError(f"{SUBJECT} needs a real case for the training step, got complex ones only.")

    def drawn(self, case: ScanCase) -> Sequences:
        """Returns the tensors of a case."""
        import torch

        from stiefelkit.measuring.races.recurrences import Sequences

        return Sequences(case, self.activation, getattr(torch, self.dtype), torch.device(self.device), self.seed)


AXES = {
    "n": "forward and backward of one n x n frame",
    "matrices": "forward and backward of so many frames at once",
    "T": "forward and backward of a recurrent layer over T steps, the map to W within",
    "batch": "the same for so many sequences at once",
    "reflections": "the same for one sequence, 1,024 units and so many reflectors, W in factors",
}
"""Names of what is made larger, and what is measured."""
QUANTITIES = ("time", "memory")
WIDTH = 64
"""Rows and columns of the frames of which there are many, and of the recurrent weight."""
STEPS, BATCH, INPUTS = 64, 16, 8
"""Sizes of the recurrent layer that do not grow."""
WIDE, LONG = 1024, 128
"""Units and steps of the layer whose reflectors grow."""
SERIES = {"n": "sizes", "matrices": "matrices", "T": "steps", "batch": "batches", "reflections": "reflections"}
"""Axis to the field of a plan that has its values."""


@dataclass(frozen=True)
class GrowthPlan(Rules):
    """The quantities that are measured, and the sizes that grow.

    Args:
        parametrizations: names, separated by commas; all if left out. One that is complex only is measured as such.
        what: time, memory, or both, separated by commas.
        against: n, matrices, T, batch, reflections, separated by commas.
        sizes: values of n, separated by commas.
        matrices: numbers of matrices.
        steps: values of T.
        batches: numbers of sequences.
        reflections: numbers of reflectors, of the maps that have them.
        precision: exact or fast; parametrizations without fast are measured as exact.
        dtype: float32, float64, complex64 or complex128.
    """

    parametrizations: tuple[str, ...] = ()
    what: tuple[str, ...] = QUANTITIES
    against: tuple[str, ...] = tuple(AXES)
    sizes: tuple[int, ...] = (64, 128, 256, 512, 1024)
    matrices: tuple[int, ...] = (1, 4, 16, 64)
    steps: Annotated[tuple[int, ...], Parameter(name=("--T", "--steps"))] = (128, 256, 512, 1024)
    batches: tuple[int, ...] = (16, 64, 256, 1024)
    reflections: tuple[int, ...] = (32, 64, 128, 256)
    precision: str = "exact"
    dtype: str = "float32"
    repeats: int = 20
    seconds: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        known_parametrizations(self.parametrizations)
        known_words(SUBJECT, "precision", [self.precision], {"exact", "fast"})
        known_words(SUBJECT, "dtype", [self.dtype], WIDE_DTYPES)
        for kind, words, choice in (("quantity", self.what, QUANTITIES), ("axis", self.against, AXES)):
            known_words(SUBJECT, kind, words, choice)
            if not words:
                raise OptionError(f"{SUBJECT} needs one {kind} or more, got none.")
        for name in SERIES.values():
            for value in getattr(self, name):
                integer(1).require(SUBJECT, name, value)
            ordered = tuple(sorted(set(getattr(self, name))))
            if len(ordered) < 2:
                raise OptionError(f"{SUBJECT} needs two {name} or more to see growth, got {len(ordered)}.")
            object.__setattr__(self, name, ordered)

    def points(self, axis: str) -> tuple[int, ...]:
        """Returns the values of what grows."""
        return getattr(self, SERIES[axis])

    def sizes_at(self, axis: str, x: int) -> tuple[int, int, int, int]:
        """Returns n, the number of frames, and the steps and sequences of the layer (0 without one), at a value x."""
        return {
            "n": (x, 1, 0, 0),
            "matrices": (WIDTH, x, 0, 0),
            "T": (WIDTH, 1, x, BATCH),
            "batch": (WIDTH, 1, STEPS, x),
            "reflections": (WIDE, 1, LONG, 1),
        }[axis]
