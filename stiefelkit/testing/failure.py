"""What a broken law says: where, with what, by how much, and how to see it again."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stiefelkit.testing import seeds

__all__ = ["Draw", "Failure", "LawBroken", "drawing", "last_draw", "machine", "record"]

_PRINTED = 16


@dataclass(frozen=True)
class Failure:
    """One law that does not hold in one case.

    Attributes:
        law: its name.
        where: the case, as tests are named.
        found: what was found, in words and figures.
        figure: what was measured, where it is a number.
        bound: what the law permits it to be.
        details: class, shape, dtype, options, seed and coordinates, a line each.
        line: Python that raises the same again.
    """

    law: str
    where: str
    found: str
    figure: float | None = None
    bound: float | None = None
    details: tuple[str, ...] = ()
    line: str = ""

    def with_details(self, details: Iterable[str], line: str) -> "Failure":
        """The same failure, with where it was found and how to find it again."""
        return replace(self, details=tuple(details), line=line)

    def __str__(self) -> str:
        lines = [f"{self.law}: {self.where}: {self.found.rstrip('.')}."]
        if self.figure is not None and self.bound is not None:
            lines.append(f"figure {self.figure!r}, bound {self.bound!r}")
        lines += self.details
        if self.line:
            lines.append(f"again: {self.line}")
        return "\n    ".join(lines)


class LawBroken(AssertionError):
    """A parametrization does not keep one of the laws, or several.

    Attributes:
        failures: all that were found, one for each law and case.
    """

    def __init__(self, *failures: Failure):
        super().__init__("\n".join(map(str, failures)))
        self.failures = failures


@dataclass(frozen=True)
class Draw:
    """Tensors that a law was run on, and the words that draw them again."""

    how: str
    tensors: tuple[tuple[str, Tensor], ...]

    def __str__(self) -> str:
        small = sum(value.numel() for _, value in self.tensors) <= _PRINTED
        values = "; ".join(f"{name} = {_exactly(value)}" for name, value in self.tensors if value.numel())
        return f"coordinates: {self.how}" + (f": {values}" if small and values else "")


_draws: ContextVar[list[Draw] | None] = ContextVar("_draws", default=None)


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Context in which the last draw is remembered."""
    token = _draws.set([])
    try:
        yield
    finally:
        _draws.reset(token)


def record(how: str, names: Iterable[str], tensors: Sequence[Tensor]) -> None:
    """Remembers a draw, if anybody asks."""
    draws = _draws.get()
    if draws is not None:
        draws[:] = [
            Draw(how, tuple((name, value.detach().clone()) for name, value in zip(names, tensors, strict=True)))
        ]


def last_draw() -> Draw | None:
    """The last draw in the innermost `drawing`."""
    draws = _draws.get()
    return draws[-1] if draws else None


def machine() -> str:
    """What the figures depend on beside the law: seed, threads, kernels and precision of products."""
    flags: Any = torch.backends
    return (
        f"seed: {seeds.OFFSET}={seeds.seed()}; {torch.get_num_threads()} threads,"
        f" {torch.backends.cpu.get_cpu_capability()}, float32 products {flags.mkldnn.matmul.fp32_precision}"
    )


def _exactly(value: Tensor) -> str:
    # repr of a Python float is exact, of a tensor it is four digits.
    return f"torch.tensor({value.tolist()!r}, dtype={value.dtype})"
