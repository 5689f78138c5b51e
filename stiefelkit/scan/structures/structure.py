"""Base of structures, which apply a recurrent matrix in factors to rows of states."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factored:
    """A recurrent matrix W that `scan` takes in factors, and never forms.

    Args:
        structure: which of `stiefelkit.scan.structures` makes W of the factors.
        factors: all of them in one tensor, real or complex as W is, laid out as the structure says.
    """

    structure: str
    factors: Tensor


class Structure(ABC):
    """W in factors, as rows of real numbers, [Re h | Im h] of complex states, meet it; factors are rows of n numbers.

    Each chunk back takes `start`, then `back` for every step, then `accumulate`, which finds what `back` has left.
    """

    @abstractmethod
    def __init__(self, factors: Tensor): ...

    @abstractmethod
    def add_(self, z: Tensor, h: Tensor) -> None:
        """Adds the rows of h W^T to z, both (batch, N)."""

    @abstractmethod
    def start(self, steps: int, batch: int) -> None:
        """Makes room for what `back` leaves of a chunk."""

    @abstractmethod
    def back(self, d: Tensor, t: int) -> Tensor:
        """Returns the rows of d conj(W), the gradient by h from that by h W^T at step t; stays until `start`."""

    @abstractmethod
    def accumulate(self, h: Tensor, d: Tensor) -> None:
        """Adds the share of a chunk, states and gradients (steps, batch, N), to the gradient by the factors."""

    @abstractmethod
    def gradient(self) -> Tensor:
        """Returns the gradient by the factors since the last call; of unit numbers, the part along the circle."""


def along_circle(factor: Tensor, turned: Tensor) -> Tensor:
    """Returns the gradient by numbers e^{it} from that by t."""
    return torch.complex(-factor.imag * turned, factor.real * turned)
