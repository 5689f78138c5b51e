"""The plan of the race of the scan, and the sizes that it is run at. Read for help, so torch comes in functions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stiefelkit.errors import OptionError
from stiefelkit.measuring.races.rules import WHO, Rules
from stiefelkit.training.checks import at_least, known_words

if TYPE_CHECKING:
    from stiefelkit.measuring.races.recurrence_problem import Sequences

__all__ = ["CASES", "ScanCase", "ScanRace", "read_case"]

DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class ScanCase:
    """The sizes of one recurrence.

    Args:
        name: in tables.
        T: steps.
        n: units, complex numbers if `is_complex`.
        B: sequences of a batch.
        m: width of the input.
        is_complex: whether states are complex.
        matched: units of the LSTM that the papers compare with, because it has about as many parameters; None if they
            have none.
    """

    name: str
    T: int
    n: int
    B: int
    m: int = 1
    is_complex: bool = False
    matched: int | None = None

    def __post_init__(self) -> None:
        """Checks the sizes."""
        for key in ("T", "n", "B", "m"):
            at_least(WHO, key, getattr(self, key), 1)

    def __str__(self) -> str:
        field = "complex, " if self.is_complex else ""
        return f"{self.name}: {field}T = {self.T}, n = {self.n}, B = {self.B}, m = {self.m}"


CASES = {
    "A": ScanCase("A", T=784, n=170, B=128, m=1, matched=128),
    "B": ScanCase("B", T=1020, n=190, B=20, m=10, matched=68),
    "C": ScanCase("C", T=200, n=512, B=50, m=129),
    "D": ScanCase("D", T=784, n=116, B=50, m=1, is_complex=True, matched=128),
}
"""The papers' pixel-by-pixel MNIST (A: scoRNN, D: scuRNN) and copying problem (B), and a wide net (C)."""


def read_case(words: str) -> ScanCase:
    """Returns the case that words such as "T=784,n=170,B=128,m=1,complex" describe; m = 1 if left out.

    Raises:
        OptionError: they do not.

    >>> read_case("T=10,n=4,B=2,complex").is_complex
    True
    """
    sizes: dict[str, int] = {}
    is_complex = False
    for word in (word.strip() for word in words.split(",")):
        key, _, value = word.partition("=")
        if word == "complex":
            is_complex = True
        elif key in ("T", "n", "B", "m") and key not in sizes and value.strip().isdigit():
            sizes[key] = int(value)
        else:
            raise OptionError(f"{WHO} needs a case such as T=784,n=170,B=128,m=1,complex, got {word!r} in {words!r}.")
    missing = [key for key in ("T", "n", "B") if key not in sizes]
    if missing:
        raise OptionError(f"{WHO} needs {' and '.join(missing)} in a case such as T=784,n=170,B=128, got {words!r}.")
    return ScanCase("custom", **sizes, is_complex=is_complex)


def cases_of(words: str) -> tuple[ScanCase, ...]:
    """Returns the cases of some names, separated by commas."""
    names = tuple(dict.fromkeys(word.strip() for word in words.split(",") if word.strip()))
    known_words(WHO, "case", names, CASES)
    return tuple(CASES[name] for name in names)


@dataclass(frozen=True)
class ScanRace(Rules):
    """Which recurrences race.

    Args:
        cases: out of A, B, C and D, separated by commas; all that the activation can do if left out.
        case: sizes of your own, T=784,n=170,B=128,m=1, with "complex" behind them if states are; races alone, or after
            --cases.
        activation: of the scan and of the loop.
        backends: of the scan, separated by commas; all fast ones that can do the case if left out.
        peers: race the eager loop, torch's RNN and LSTM.
        named_peers: the peers that race, whether all are asked for or not; all if empty and asked for.
        memory: measure peak memory too, each contender in a process of its own, a few seconds each.
        training_step: time a whole training step of scornn too, in the first real case, and the scan within it.
        dtype: float32 or float64; complex states are complex64 or complex128.
    """

    cases: tuple[ScanCase, ...] = field(default=(), metadata={"read": cases_of})
    case: tuple[ScanCase, ...] = field(default=(), metadata={"read": lambda words: (read_case(words),) * bool(words)})
    activation: str = "modrelu"
    backends: tuple[str, ...] = ()
    peers: bool = False
    named_peers: tuple[str, ...] = field(default=(), metadata={"hidden": True})
    memory: bool = False
    training_step: bool = False
    dtype: str = "float32"
    repeats: int = 30
    seconds: float = 4.0

    def __post_init__(self) -> None:
        """Checks names and ranges, and puts all cases into `cases`."""
        from stiefelkit.functional import BACKENDS, COMPLEX_ACTIVATIONS, find_activation, split_activation
        from stiefelkit.measuring.races.recurrences import recurrence_peers

        super().__post_init__()
        known_words(WHO, "dtype", [self.dtype], DTYPES)
        known_words(WHO, "backend", self.backends, BACKENDS)
        known_words(WHO, "peer", self.named_peers, recurrence_peers.names())
        kind, _ = split_activation(self.activation)
        able = [case for case in CASES.values() if not case.is_complex or kind in COMPLEX_ACTIVATIONS]
        object.__setattr__(self, "cases", (*self.cases, *self.case) or tuple(able))
        object.__setattr__(self, "case", ())
        for case in self.cases:
            find_activation(self.activation, case.is_complex)
        if self.training_step:
            if self.dtype != "float32" or self.activation != "modrelu":
                raise OptionError(f"{WHO} needs float32 and modrelu for the training step, got {self.dtype}, {kind}.")
            if all(case.is_complex for case in self.cases):
                raise OptionError(f"{WHO} needs a real case for the training step, got complex ones only.")

    def drawn(self, case: ScanCase) -> Sequences:
        """The tensors of a case."""
        import torch

        from stiefelkit.measuring.races.recurrence_problem import Sequences

        return Sequences(case, self.activation, getattr(torch, self.dtype), torch.device(self.device), self.seed)
