"""Base of structures, which apply a recurrent matrix in factors to rows of states; complex rows as real, [Re | Im]."""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Self

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


class Diagonal(NamedTuple):
    """Numbers of modulus one, or real signs."""

    re: Tensor
    im: Tensor | None

    @classmethod
    def of(cls, d: Tensor) -> Self:
        """Takes complex or real numbers apart."""
        return cls(d.real.contiguous(), d.imag.contiguous()) if d.is_complex() else cls(d, None)

    def signed(self, signs: Tensor) -> Self:
        return type(self)(self.re * signs, None if self.im is None else self.im * signs)

    def times(self, x: Tensor, y: Tensor, is_conjugate: bool = False) -> None:
        """Writes the product with x, or that of the conjugate, into y, both (rows, parts, n)."""
        torch.mul(x, self.re, out=y)
        self._turn(x, y, -1 if is_conjugate else 1)

    def plus_times(self, x: Tensor, z: Tensor) -> None:
        z.addcmul_(x, self.re)
        self._turn(x, z, 1)

    def _turn(self, x: Tensor, y: Tensor, sign: int) -> None:
        if self.im is not None:
            re, im = x.unbind(1)
            y_re, y_im = y.unbind(1)
            y_re.addcmul_(im, self.im, value=-sign)
            y_im.addcmul_(re, self.im, value=sign)


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


def matrix_blocks(m: Tensor) -> Tensor:
    """Returns the real matrix by which rows [Re h | Im h] become those of h m^T, shape (2 columns, 2 rows)."""
    re, im = m.real.mT, m.imag.mT
    return torch.cat([torch.cat([re, im], 1), torch.cat([-im, re], 1)])


def row_blocks(rows: Tensor) -> Tensor:
    """Returns [Re | Im] of rows (*, n): a new contiguous tensor (*, 2n); real rows as they are."""
    return torch.cat([rows.real, rows.imag], -1) if rows.is_complex() else rows.contiguous()


def from_blocks(rows: Tensor) -> Tensor:
    """Undoes `row_blocks`, for complex rows."""
    return torch.complex(*rows.chunk(2, -1))


def read_blocks(rows: Tensor, blocks: Tensor) -> Tensor:
    """Writes complex rows (*, n) into `blocks` (*, 2n), which is contiguous."""
    numbers = torch.view_as_real(rows.resolve_conj())
    if numbers.is_contiguous():
        # A gather of columns takes half the time of a strided copy.
        order = _real_first(rows.shape[-1], rows.device)
        torch.index_select(numbers.view(-1, 2 * rows.shape[-1]), 1, order, out=blocks.view(-1, blocks.shape[-1]))
    else:
        blocks.unflatten(-1, (2, -1)).copy_(numbers.transpose(-1, -2))
    return blocks


@functools.lru_cache(maxsize=32)
def _real_first(n: int, device: torch.device) -> Tensor:
    return torch.arange(2 * n, device=device).view(n, 2).mT.flatten()


def fold(g: Tensor) -> Tensor:
    """Returns the gradient by a complex m from g = d^T h, both [Re | Im], d behind m."""
    n, k = g.shape[0] // 2, g.shape[1] // 2
    return torch.complex(g[:n, :k] + g[n:, k:], g[n:, :k] - g[:n, k:])
