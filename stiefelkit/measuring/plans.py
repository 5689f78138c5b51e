"""Plans of measurements: where, how long, of what, and who takes part. Read for help, so torch comes in functions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from cyclopts import Parameter, Token

from stiefelkit import checks
from stiefelkit.checks import STEP_LENGTH, Option, Sizes, known_words, tall_sizes, usable_device, words_of
from stiefelkit.errors import OptionError, needs
from stiefelkit.numbers import PRECISIONS, above, integer, one_of, validate_fields_
from stiefelkit.optim import names_in_words, optimizers

if TYPE_CHECKING:
    import torch

    from stiefelkit.measuring.implementations import Implementation

SUBJECT = "The race"  # the first words of error messages
WIDE_DTYPES = ("complex128", "complex64", "float32", "float64")
"""Names of the dtypes in which frames may be stored while an optimizer moves them."""
UNCONSTRAINED = "unconstrained"  # the reference of drift: a weight that starts orthogonal and is held by nothing
FACTORS = "factors"  # the name under which W in factors races beside the backends of the scan


def torch_dtype(name: str) -> torch.dtype:
    """Returns the dtype of a name."""
    import torch

    return getattr(torch, name)


@dataclass(frozen=True)
class Machine:
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

    def __post_init__(self) -> None:
        validate_fields_(self, self.subject, seed=checks.SEED, threads=checks.THREADS)
        usable_device(self.subject, self.device)

    def _set(self, **fields: object) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def _check_sizes(self, sizes: Sizes) -> None:
        tall_sizes(self.subject, sizes)
        if self.quick:
            self._set(sizes=tuple(sorted(sizes, key=lambda size: size[0] * size[1] ** 2)))


@dataclass(frozen=True)
class TimingConfig(Machine):
    """The place and the length of a race, whatever takes part.

    Args:
        repeats: samples of each implementation at most.
        seconds: time for the samples of each implementation; one whose single call takes longer gets one sample.
        cold: write over the device's last cache before every call.
        replay: capture each implementation in a CUDA graph, and time its replays; what cannot be captured is left out.
    """

    repeats: int = 200
    seconds: float = 1.0
    cold: bool = False
    replay: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_fields_(self, SUBJECT, repeats=integer(1), seconds=above(0))
        needs(not self.replay or self.device.startswith("cuda"), OptionError, SUBJECT, "CUDA for replays", self.device)


@dataclass(frozen=True)
class FramePlan(TimingConfig):
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

    dtypes: ClassVar[Collection[str]] = (*WIDE_DTYPES, "bfloat16", "float16")

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_fields_(self, SUBJECT, batch=integer(1), dtype=one_of(*self.dtypes))
        self._check_sizes(self.sizes)


@dataclass(frozen=True)
class ParametrizationRace(FramePlan):
    """The parametrizations that race, beside their peers.

    Args:
        parametrizations: names, separated by commas; all if left out. Their peers race alone with them. One that is
            complex only is measured in the complex dtype of that size.
        precisions: exact, fast, or both, separated by commas; each that a parametrization has if left out.
        operations: forward, forward_backward, step, separated by commas.
        options: options of parametrizations, as in --options.reflections 16, for those that have them.
        peers: race torch's own maps, and geotorch if it is installed.
        scale: what drawn coordinates are multiplied by; the error shows what large ones cost.
        memory: measure peak memory too.
    """

    parametrizations: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    operations: tuple[str, ...] = ("forward_backward", "step")
    options: dict[str, Option] = field(default_factory=dict)
    scale: float = 1.0
    memory: bool = False

    def __post_init__(self) -> None:
        from stiefelkit.contract.table import option_names
        from stiefelkit.measuring.implementations import OPERATIONS
        from stiefelkit.weights.attach import available

        super().__post_init__()
        above(0).require(SUBJECT, "scale", self.scale)
        known_words(SUBJECT, "operation", self.operations, OPERATIONS)
        needs(bool(self.operations), OptionError, SUBJECT, "one operation or more", "none")
        known_words(SUBJECT, "parametrization", self.parametrizations, available())
        classes = [cls for name, cls in available().items() if name in (self.parametrizations or available())]
        known_words(SUBJECT, "precision", self.precisions, {*PRECISIONS}.union(*(cls.precisions for cls in classes)))
        known_words(
            SUBJECT, "option", self.options, {name for cls in classes for name in option_names(cls)} - {"precision"}
        )
        wanted = f"a parametrization with precision {' or '.join(self.precisions)}"
        needs(bool(self.implementations()), OptionError, SUBJECT, wanted, "none of those")

    def implementations(self) -> dict[str, Implementation]:
        """Returns name to parametrization, in each precision asked for."""
        from stiefelkit.measuring.implementations import own_implementations

        return own_implementations(self.parametrizations, self.precisions, self.options)

    def racing_peers(self) -> dict[str, Implementation]:
        """Returns name to peer of these parametrizations, none unless asked for."""
        from stiefelkit.measuring.implementations import peers

        families = self.parametrizations or {peer.family for peer in peers.values()}
        return {name: peer for name, peer in peers.items() if self.peers and peer.family in families}


@dataclass(frozen=True)
class OptimizerRace(FramePlan):
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
        known_words(SUBJECT, "optimizer of frames", self.optimizers, [*own_optimizers(), *peer_optimizers])
        known_words(SUBJECT, "precision", self.precisions, PRECISIONS)
        has_some = bool(self.implementations() or self.racing_peers())
        needs(has_some, OptionError, SUBJECT, "an optimizer in precision exact or fast", "none")

    def implementations(self) -> dict[str, str]:
        """Returns name in the table to method, for ours in each precision that they have."""
        from stiefelkit.measuring.moved_frames import methods

        both = [(name, precision) for name, _, precision in (method.partition(":") for method in methods())]
        return {
            f"{name} ({precision})": f"{name}:{precision}"
            for name, precision in both
            if precision in (self.precisions or PRECISIONS) and name in (self.optimizers or [name])
        }

    def racing_peers(self) -> list[str]:
        """Returns the peers that race: those that are named, else all or none."""
        from stiefelkit.measuring.moved_frames import peer_optimizers

        named = [name for name in self.optimizers if name in peer_optimizers]
        return named or list(peer_optimizers if self.peers else ())


@dataclass(frozen=True)
class ScanCase:
    """The sizes of one recurrence."""

    name: str
    T: int
    n: int
    B: int
    m: int = 1
    is_complex: bool = False
    matched: int | None = None
    map: str = ""
    map_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        validate_fields_(self, SUBJECT, **dict.fromkeys("TnBm", integer(1)))

    def __str__(self) -> str:
        states = "complex, " if self.is_complex else ""
        options = "".join(f" {key}={value}" for key, value in self.map_options.items())
        drawn = f", {self.map}{options}" if self.map else ""
        return f"{self.name}: {states}T = {self.T}, n = {self.n}, B = {self.B}, m = {self.m}{drawn}"


CASES = {
    "A": ScanCase("A", T=784, n=170, B=128, m=1, matched=128),
    "B": ScanCase("B", T=1020, n=190, B=20, m=10, matched=68),
    "C": ScanCase("C", T=200, n=512, B=50, m=129),
    "D": ScanCase("D", T=784, n=116, B=50, m=1, is_complex=True, matched=128),
    "E": ScanCase("E", T=784, n=512, B=50, m=1, is_complex=True, map="fourier"),
    "F": ScanCase("F", T=784, n=1024, B=128, m=1, is_complex=True, map="givens", map_options={"layers": 2}),
    "G": ScanCase("G", T=784, n=256, B=128, m=1, map="householder", map_options={"reflections": 32}),
}
"""The papers' pixel-by-pixel MNIST (A: scoRNN, D: scuRNN) and copying problem (B), a wide net (C), and, on pixels too,
maps that have factors (E: restricted-capacity uRNN, F: EURNN, G: oRNN)."""


def read_case(words: str) -> ScanCase:
    """Returns the case of words such as "T=784,n=170,B=128,m=1,complex", where m may be missing, or raises OptionError.

    >>> read_case("T=10,n=4,B=2,complex").is_complex
    True
    """
    sizes = {key.strip(): size for key, _, size in (word.partition("=") for word in words.split(","))}
    is_complex = sizes.pop("complex", None) == ""
    is_whole = {*"TnB"} <= sizes.keys() <= {*"TnBm"} and all(map(str.isdigit, sizes.values()))
    needs(is_whole, OptionError, SUBJECT, "a case such as T=784,n=170,B=128,m=1,complex", repr(words))
    T, n, B, m = (int(sizes.get(name, "1")) for name in "TnBm")
    return ScanCase("custom", T, n, B, m, is_complex)


def _cases(_: type, tokens: Sequence[Token]) -> tuple[ScanCase, ...]:
    cases: list[ScanCase] = []
    for value in (token.value for token in tokens):
        names = () if "=" in value else words_of(value)
        known_words(SUBJECT, "case", names, CASES)
        cases += [CASES[name] for name in names] or [read_case(value)]
    return tuple(cases)


@dataclass(frozen=True)
class ScanRace(TimingConfig):
    """The recurrences that race.

    Args:
        cases: out of A to G, separated by commas, or sizes of your own, T=784,n=170,B=128,m=1, with "complex" behind
            them if states are; of A, B, C and D all that the activation can do if left out.
        activation: of the scan and of the loop.
        backends: of the scan, separated by commas, and "factors", W in factors in E, F and G; all fast ones that can do
            the case if left out.
        peers: race the eager loop, torch's RNN and LSTM.
        named_peers: the peers that race, whether all are asked for or not; all if empty and asked for.
        memory: measure peak memory too.
        dtype: float32 or float64; complex states are complex64 or complex128.
    """

    cases: Annotated[
        tuple[ScanCase, ...], Parameter(name=("--cases", "--case"), converter=_cases, accepts_keys=False, n_tokens=1)
    ] = ()
    activation: str = "modrelu"
    backends: tuple[str, ...] = ()
    peers: bool = False
    named_peers: Annotated[tuple[str, ...], Parameter(parse=False)] = ()
    memory: bool = False
    dtype: str = "float32"
    repeats: int = 30
    seconds: float = 4.0

    def __post_init__(self) -> None:
        from stiefelkit.scan import BACKENDS, find_activation

        super().__post_init__()
        known_words(SUBJECT, "dtype", [self.dtype], ("float32", "float64"))
        known_words(SUBJECT, "backend", self.backends, (*BACKENDS, FACTORS))
        of_complex = find_activation(self.activation, False).of_complex()
        able = [case for case in CASES.values() if not case.map and (not case.is_complex or of_complex)]
        cases = list(self.cases or able)
        if self.quick:
            cases.sort(key=lambda case: case.T * case.B * (case.n * (1 + case.is_complex)) ** 2)
        self._set(cases=tuple(cases))
        for case in cases:
            find_activation(self.activation, case.is_complex)


@dataclass(frozen=True)
class DriftPlan(Machine):
    """The weights, optimizers and gradients of a drift experiment.

    Args:
        steps: optimizer steps; 100000 for what adds up slowly.
        methods: separated by commas: parametrizations, "unconstrained", optimizers of frames ({of_frames}) and
            geoopt's; all if left out, those of frames in precision exact.
        sizes: n, or n x p for tall frames (1024x64), separated by commas.
        dtype: float32, float64, complex64 or complex128; bfloat16 for parametrizations. A parametrization that is
            complex only is measured as such.
        gradients: random draws one for each step, fixed keeps the first, rotation turns the weight steadily, by
            G = A W with one random skew A, digits trains it to tell handwritten digits apart.
        optimizer: of the parametrizations: {free}, one that moves frames, or the name of an installed plugin;
            multiplicative_cayley where a coordinate is a frame and it moves none. An import path,
            my.module:MyOptimizer, is a method more: any torch optimizer, which moves a plain weight;
            parametrizations get adam then.
        map: import path of a method more, my.module:MyMap: a parametrization, or a module for
            torch.nn.utils.parametrize that needs no arguments.
        lr: its learning rate.
        step_length: lr ||B||_2, B = G W^H - W G^H, of the first step of a frame; at most 100.
        look_every: the error is looked at after one step, at random, out of so many in a row; more is faster, and may
            miss a peak.
        autocast: make the steps under autocast to bfloat16.
        tf32: let a GPU lower float32 products to TF32.
        replay: after 100 steps replay a CUDA graph of one, which has to come to the same bits; gradients that are
            drawn on the host are refused.
    """

    steps: int = 1000
    methods: tuple[str, ...] = ()
    sizes: Sizes = ((64, 64),)
    dtype: str = "float32"
    gradients: str = "random"
    optimizer: str = "adam"
    map: str = ""
    lr: float = 1e-3
    step_length: float = 1e-2
    look_every: int = 1
    autocast: bool = False
    tf32: bool = False
    replay: bool = False

    subject: ClassVar[str] = "The drift experiment"

    def __post_init__(self) -> None:
        import torch

        from stiefelkit.measuring.moved_frames import imported, methods, own_optimizers, peer_optimizers
        from stiefelkit.weights.attach import available

        super().__post_init__()
        who = self.subject
        words = {
            "dtype": one_of(*WIDE_DTYPES, "bfloat16"),
            "gradients": one_of("random", "fixed", "rotation", "digits"),
        }
        numbers = {"steps": integer(1), "look_every": integer(1), "lr": above(0), "step_length": STEP_LENGTH}
        validate_fields_(self, who, **words, **numbers)
        is_cuda = self.device.startswith("cuda")
        needs(is_cuda or not self.tf32, OptionError, who, "a CUDA device for TF32", self.device)
        needs(is_cuda or not self.replay, OptionError, who, "a CUDA device for replays", self.device)
        is_drawn = self.replay and self.gradients in ("random", "digits")
        needs(not is_drawn, OptionError, who, "fixed or rotation gradients for replays", self.gradients)
        self._check_sizes(self.sizes)
        maps = [*available(), UNCONSTRAINED]
        known_words(who, "parametrization or optimizer of frames", self.methods, [*maps, *methods(), *self.imported])
        for path in self.imported:
            imported(who, path, torch.optim.Optimizer if path == self.optimizer else torch.nn.Module)
        if self.optimizer not in self.imported:
            optimizers.get(self.optimizer)
        known = self.methods or (*maps, *own_optimizers(), *peer_optimizers)
        self._set(methods=tuple(dict.fromkeys((*known, *self.imported))))

    @property
    def imported(self) -> tuple[str, ...]:
        """The methods that are given by import path."""
        return tuple(path for path in (self.map, self.optimizer if ":" in self.optimizer else "") if path)


_free, _of_frames = names_in_words()
DriftPlan.__doc__ = (DriftPlan.__doc__ or "").replace("{free}", _free).replace("{of_frames}", _of_frames)

SECTIONS = ("drift", "time", "scan")  # the sections of a report, in the order of measurement
Scale = Mapping[str, Mapping[str, Any]]  # section to fields of its plan, which say how much is measured
SQUARES = ((64, 64), (128, 128), (256, 256), (512, 512))
USUAL: Scale = {
    "drift": {"steps": 1000, "look_every": 2},
    "time": {"sizes": SQUARES, "repeats": 8, "seconds": 0.2, "precisions": ("exact",)},
    "scan": {"repeats": 3, "seconds": 0.3},
}
"""A few minutes on two cores."""
QUICK: Scale = {name: {**fields, "quick": True} for name, fields in USUAL.items()} | {
    "time": {**USUAL["time"], "sizes": SQUARES[:3]}
}
"""Under a minute: as much of it as fits."""


@dataclass(frozen=True)
class ReportPlan(Machine):
    """The sections of a report, and the parametrizations in them.

    Args:
        parametrizations: names, separated by commas; all if left out.
        sections: some of drift, time and scan, separated by commas; all if left out.
        peers: measure other implementations too.
        dtype: float32, float64, complex64 or complex128; maps that are complex only are measured as such.
    """

    parametrizations: tuple[str, ...] = ()
    sections: tuple[str, ...] = ()
    peers: bool = True
    dtype: str = "float32"

    subject: ClassVar[str] = "The report"

    def __post_init__(self) -> None:
        from stiefelkit.weights.attach import available

        super().__post_init__()
        known_words(self.subject, "parametrization", self.parametrizations, available())
        known_words(self.subject, "section", self.sections, SECTIONS)
        known_words(self.subject, "dtype", [self.dtype], WIDE_DTYPES)
        self._set(sections=self.sections or SECTIONS)

    def plan(self, section: str) -> DriftPlan | ParametrizationRace | ScanRace:
        """Returns the plan of a section."""
        from stiefelkit.measuring.moved_frames import peer_optimizers

        scale = (QUICK if self.quick else USUAL)[section]
        place: dict[str, Any] = {"device": self.device, "threads": self.threads, "seed": self.seed, **scale}
        if section == "scan":
            dtype = "float64" if self.dtype in ("float64", "complex128") else "float32"
            return ScanRace(peers=self.peers, dtype=dtype, **place)
        named, place = self.parametrizations, {"dtype": self.dtype, **place}
        if section == "time":
            place |= {"parametrizations": named, "peers": self.peers, "operations": ("forward_backward",)}
            return ParametrizationRace(**place)
        methods = (*named, UNCONSTRAINED) if named else DriftPlan(dtype=self.dtype).methods
        methods = tuple(name for name in methods if self.peers or name not in peer_optimizers)
        return DriftPlan(gradients="rotation", step_length=0.1, methods=methods, **place)
