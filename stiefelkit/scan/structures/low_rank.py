"""A matrix of low rank beside a diagonal, as of few reflectors, or beside Fourier transforms: `fourier`."""

from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.scan.structures.structure import Diagonal, Structure, along_circle, fold, matrix_blocks, read_blocks


class LowRank(Structure):
    """W = M + A B^H. Factors (heads + 2k, n): those of M, then the k columns of A, then those of B."""

    heads: ClassVar[int]  # number of rows of the factors that belong to M
    turning: ClassVar[int]
    """Number of those rows whose entries have modulus one; `turned` sums up their gradients by angles."""

    def __init__(self, factors: Tensor):
        a, b = (columns.mT for columns in factors[self.heads :].chunk(2))
        self.factors, self.n = factors, factors.shape[-1]
        # Rows h meet (B^H)^T, (N, k), then A^T, (k, N); gradients meet conj(A), then B^H. Thin products are several
        # times faster with long rows in memory.
        self.out, self.back_out = self._rows(a), self._rows(b.mH).mT.contiguous()
        self.into, self.back_into = self.back_out.mT, self.out.mT
        self._restart()

    def _rows(self, m: Tensor) -> Tensor:
        m = m.resolve_conj()
        return matrix_blocks(m) if m.is_complex() else m.mT.contiguous()

    def _restart(self) -> None:
        self.g_out, self.g_into = torch.zeros_like(self.out), torch.zeros_like(self.back_out)
        self.turned = torch.zeros_like(self.factors[: self.turning].real)

    def add_(self, z: Tensor, h: Tensor) -> None:
        z.addmm_(torch.mm(h, self.into), self.out)

    def add_back_(self, rows: Tensor, d: Tensor) -> Tensor:
        """Adds the rows of d conj(A B^H)."""
        return rows.addmm_(torch.mm(d, self.back_into), self.back_out)

    def accumulate(self, h: Tensor, d: Tensor) -> None:
        h, d = h.flatten(0, 1), d.flatten(0, 1)
        self.g_out.addmm_(torch.mm(h, self.into).mT, d)
        self.g_into.addmm_(torch.mm(d, self.back_into).mT, h)

    def gradient(self) -> Tensor:
        """Returns the gradient with zeros for the factors of M but for those along the circle, which `turned` has."""
        is_complex = self.factors.is_complex()
        g_a = fold(self.g_out.mT) if is_complex else self.g_out.mT
        g_b = (fold(self.g_into) if is_complex else self.g_into).mH
        g = torch.zeros_like(self.factors[: self.heads])
        if is_complex:
            g[: self.turning] = along_circle(self.factors[: self.turning], self.turned)
        self._restart()
        return torch.cat([g, g_a.mT, g_b.resolve_conj().mT])


class DiagonalAndLowRank(LowRank):
    """W = D + A B^H, the entries of D of modulus one: `householder` with k reflectors."""

    heads = turning = 1

    def __init__(self, factors: Tensor):
        super().__init__(factors)
        self.d = Diagonal.of(factors[0])
        self.room = self.into.new_empty(0, len(self.into))

    def start(self, steps: int, batch: int) -> None:
        if len(self.room) != batch:
            self.room = self.into.new_empty(batch, len(self.into))

    def _view(self, rows: Tensor) -> Tensor:
        return rows if self.d.im is None else rows.view(len(rows), 2, self.n)

    def add_(self, z: Tensor, h: Tensor) -> None:
        self.d.plus_times(self._view(h), self._view(z))
        super().add_(z, h)

    def back(self, d: Tensor, t: int) -> Tensor:
        self.d.times(self._view(d), self._view(self.room), True)
        return self.add_back_(self.room, d)

    def accumulate(self, h: Tensor, d: Tensor) -> None:
        super().accumulate(h, d)
        if self.d.im is not None:  # the part along the circle, Im(conj(D h) d)
            (x, y), (re, im) = h.flatten(0, 1).chunk(2, -1), d.flatten(0, 1).chunk(2, -1)
            # conj(h) d = across + i along
            across, along = (x * re).addcmul_(y, im).sum(0), (x * im).addcmul_(y, re, value=-1).sum(0)
            self.turned += self.d.re * along - self.d.im * across


class FourierAndLowRank(LowRank):
    """W = D3 F^-1 D2 P F D1 + A B^H, complex, (P x)_i = x_{p_i}. Factors of M: D1, D2, D3, the numbers p_i."""

    heads, turning = 4, 3

    def __init__(self, factors: Tensor):
        super().__init__(factors)
        # The transforms are unscaled, as 1 / n stands in the inverse one.
        self.d = list(factors[:3].unbind())
        self.conjugate = [d.conj().resolve_conj() for d in self.d]
        self.order = factors[3].real.round().long()
        self.order_back = self.order.argsort()
        self.rooms: list[Tensor] = []
        self.stages = factors.new_empty(3, 0, 0, self.n)

    def start(self, steps: int, batch: int) -> None:
        if self.stages.shape[1] < steps or self.stages.shape[2] != batch:
            self.stages = self.factors.new_empty(3, steps, batch, self.n)
            self.rows = self.into.new_empty(batch, 2 * self.n)

    def _room(self, batch: int) -> list[Tensor]:
        if not self.rooms or len(self.rooms[0]) != batch:
            self.rooms = [self.factors.new_empty(batch, self.n) for _ in range(2)]
        return self.rooms

    def add_(self, z: Tensor, h: Tensor) -> None:
        one, two = self._room(len(h))
        d1, d2, d3 = self.d
        torch.complex(*h.chunk(2, -1), out=one)
        torch.fft.fft(one.mul_(d1), out=two)
        torch.fft.ifft(_gathered(two, self.order, one).mul_(d2), out=two)
        z.add_(read_blocks(two.mul_(d3), torch.view_as_real(one).view(z.shape)))
        super().add_(z, h)

    def back(self, d: Tensor, t: int) -> Tensor:
        one, _ = self._room(len(d))
        behind, middle, front = self.stages[:, t]
        c1, c2, c3 = self.conjugate
        torch.complex(*d.chunk(2, -1), out=behind)
        torch.fft.fft(torch.mul(behind, c3, out=one), out=middle)
        torch.mul(middle, c2, out=front)
        torch.fft.ifft(_gathered(front, self.order_back, one), out=front)
        return self.add_back_(read_blocks(torch.mul(front, c1, out=one), self.rows), d)

    def accumulate(self, h: Tensor, d: Tensor) -> None:
        super().accumulate(h, d)
        # Recomputes the forward pass, with Im(conj(x) g) of what is behind each diagonal.
        d1, d2, d3 = self.d
        behind, middle, front = self.stages[:, : len(h)].flatten(1, 2).unbind()
        x = torch.complex(*h.flatten(0, 1).chunk(2, -1)).mul_(d1)
        self.turned[0] += _angle_gradient(x, front)
        x = _gathered(torch.fft.fft(x), self.order, x).mul_(d2)
        # The transform of the gradient is n times too small there.
        self.turned[1] += _angle_gradient(x, middle) / self.n
        x = torch.fft.ifft(x).mul_(d3)
        self.turned[2] += _angle_gradient(x, behind)


def _gathered(x: Tensor, order: Tensor, out: Tensor) -> Tensor:
    """Columns of complex rows in another order; numbers of eight bytes are gathered faster than complex ones."""
    index = order.expand(x.shape)
    if x.dtype == torch.complex64:
        torch.gather(x.view(torch.float64), 1, index, out=out.view(torch.float64))
        return out
    return torch.gather(x, 1, index, out=out)


def _angle_gradient(x: Tensor, g: Tensor) -> Tensor:
    """Returns the gradient by the angles t of e^{it} from x, behind it, and the gradient by x."""
    return torch.conj_physical(x).mul_(g).sum(0).imag
