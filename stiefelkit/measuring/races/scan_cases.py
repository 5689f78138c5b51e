"""The sizes at which the scan is raced."""

from dataclasses import dataclass, field
from typing import Any

from stiefelkit.errors import OptionError
from stiefelkit.measuring.races import SUBJECT
from stiefelkit.numbers import integer, validate_fields_
from stiefelkit.training.checks import known_words, words_of


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
        map: draws W, if its factors race beside it; a Haar frame if empty.
        map_options: of the map.
    """

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

    @property
    def flops(self) -> float:
        """Operations of the products that no scan can do without, in real numbers."""
        return 6.0 * self.T * self.B * (self.n * (1 + self.is_complex)) ** 2

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
    sizes: dict[str, Any] = {}
    for word in (word.strip() for word in words.split(",")):
        key, _, value = word.partition("=")
        if word == "complex":
            sizes["is_complex"] = True
        elif key in ("T", "n", "B", "m") and key not in sizes and value.strip().isdigit():
            sizes[key] = int(value)
        else:
            raise OptionError(
                f"{SUBJECT} needs a case such as T=784,n=170,B=128,m=1,complex, got {word!r} in {words!r}."
            )
    missing = [key for key in ("T", "n", "B") if key not in sizes]
    if missing:
        raise OptionError(
            f"{SUBJECT} needs {' and '.join(missing)} in a case such as T=784,n=170,B=128, got {words!r}."
        )
    return ScanCase("custom", **sizes)


def cases_of(words: str) -> tuple[ScanCase, ...]:
    """Returns the cases of some names, separated by commas."""
    names = words_of(words)
    known_words(SUBJECT, "case", names, CASES)
    return tuple(CASES[name] for name in names)
