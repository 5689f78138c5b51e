"""What a fast backend does."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from stiefelkit.scan.engines.problem import Gradients, Outcome, Problem

__all__ = ["Engine", "PlainEngine"]


class Engine(Protocol):
    """A way to run the recurrence and to go back through it."""

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns all states, the last of each sequence, and (with `keep`) what the derivative needs besides."""
        ...

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        """Gradients by those of x, w, h0, u, bias and activation bias that are wanted."""
        ...


class PlainEngine(Engine, Protocol):
    """One of `scan`, whose maps over samples fold into the batch."""

    def deltas(self, p: Problem, outcome: Outcome) -> tuple[Tensor, Tensor]:
        """Returns the gradients by all pre-activations, like `out`, and by the first states (B, n)."""
        ...
