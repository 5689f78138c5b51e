"""Two Fourier transforms, three diagonals, a permutation, and a matrix of rank two: `fourier`."""

from typing import ClassVar

import torch
from torch import Tensor

from stiefelkit.scan.blocks import read_blocks
from stiefelkit.scan.structures.low_rank import LowRank
from stiefelkit.scan.structures.structure import along_circle


class FourierAndLowRank(LowRank):
    """W = D3 F^-1 D2 P F D1 + A B^H, complex, (P x)_i = x_{p_i}. Factors of M: D1, D2, D3, the numbers p_i.

    Reflectors between the transforms are of rank one, and what they do to W is A B^H.
    """

    heads: ClassVar[int] = 4

    @staticmethod
    def matrix(factors: Tensor) -> Tensor:
        """Column by column of the identity."""
        d1, d2, d3, order = factors[:4]
        a, b = FourierAndLowRank.columns(factors)
        eye = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
        spectrum = torch.fft.fft(eye * d1, norm="ortho")[:, order.real.detach().round().long()]
        return (torch.fft.ifft(spectrum * d2, norm="ortho") * d3).mT + a @ b.mH

    def __init__(self, factors: Tensor):
        super().__init__(factors)
        # The transforms are unscaled, as 1 / n stands in the inverse one.
        self.d = list(factors[:3].unbind())
        self.conjugate = [d.conj().resolve_conj() for d in self.d]
        self.order = factors[3].real.round().long()
        self.order_back = self.order.argsort()
        self.turned = torch.zeros_like(factors[:3].real)
        self.rooms: list[Tensor] = []
        self.stages = factors.new_empty(3, 0, 0, self.n)

    def start(self, steps: int, batch: int) -> None:
        """Room for the gradients behind D3, at D2 and at D1."""
        if self.stages.shape[1] < steps or self.stages.shape[2] != batch:
            self.stages = self.factors.new_empty(3, steps, batch, self.n)
            self.rows = self.into.new_empty(batch, 2 * self.n)

    def _room(self, batch: int) -> list[Tensor]:
        if not self.rooms or len(self.rooms[0]) != batch:
            self.rooms = [self.factors.new_empty(batch, self.n) for _ in range(2)]
        return self.rooms

    def add_main_(self, z: Tensor, h: Tensor) -> None:
        """Two transforms, a gather, three products and a sum."""
        one, two = self._room(len(h))
        d1, d2, d3 = self.d
        torch.complex(*h.chunk(2, -1), out=one)
        torch.fft.fft(one.mul_(d1), out=two)
        torch.fft.ifft(_gathered(two, self.order, one).mul_(d2), out=two)
        z.add_(read_blocks(two.mul_(d3), torch.view_as_real(one).view(z.shape)))

    def back_main(self, d: Tensor, t: int) -> Tensor:
        """Returns the same from the right to the left, with conjugates."""
        one, _ = self._room(len(d))
        behind, middle, front = self.stages[:, t]
        c1, c2, c3 = self.conjugate
        torch.complex(*d.chunk(2, -1), out=behind)
        torch.fft.fft(torch.mul(behind, c3, out=one), out=middle)
        torch.mul(middle, c2, out=front)
        torch.fft.ifft(_gathered(front, self.order_back, one), out=front)
        return read_blocks(torch.mul(front, c1, out=one), self.rows)

    def accumulate_main(self, h: Tensor, d: Tensor) -> None:
        """The way forward once more, and at each diagonal Im(conj(x) g) of what is behind it."""
        d1, d2, d3 = self.d
        behind, middle, front = self.stages[:, : len(h)].flatten(1, 2).unbind()
        x = torch.complex(*h.flatten(0, 1).chunk(2, -1)).mul_(d1)
        self.turned[0] += _angle_gradient(x, front)
        x = _gathered(torch.fft.fft(x), self.order, x).mul_(d2)
        # The transform of the gradient is n times too small there.
        self.turned[1] += _angle_gradient(x, middle) / self.n
        x = torch.fft.ifft(x).mul_(d3)
        self.turned[2] += _angle_gradient(x, behind)

    def gradient_main(self) -> Tensor:
        """Along the circle; the permutation has none."""
        g = along_circle(self.factors[:3], self.turned)
        self.turned = torch.zeros_like(self.turned)
        return torch.cat([g, torch.zeros_like(g[:1])])


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
