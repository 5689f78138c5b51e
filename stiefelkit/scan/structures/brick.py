"""Layers of rotations of neighbours, and a diagonal: `givens` with few layers."""

import torch
from torch import Tensor

from stiefelkit.scan.structures.low_rank import along_circle
from stiefelkit.scan.structures.structure import Structure

__all__ = ["Brick", "pairs_first", "pairs_in_order"]

BLOCK = 128 * 1024
"""Numbers of the rows that a gradient is worked out for at a time."""


def pairs_first(rows: Tensor) -> Tensor:
    """Units 0, 2, 4, ..., then 1, 3, 5, ..., of rows (*, n)."""
    return rows.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def pairs_in_order(rows: Tensor) -> Tensor:
    """Undoes `pairs_first`."""
    return rows.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


class Brick(Structure):
    """W = D F_L ... F_1 for even n. Layer l rotates (0, 1), (2, 3), ..., or for even l (1, 2), (3, 4), ... .

    A rotation is [[c, -f s], [s, f c]], f of modulus one, and 1 in a real one. Factors (2L + 2, n / 2). Complex: a row
    c + is for each layer, then a row f, then D, even units before odd ones. Real: a row c for each, then a row s, then
    D. The last numbers of a layer with n / 2 - 1 rotations mean nothing.

    With even units before odd ones in every row, both kinds of layers join stretches of n / 2 neighbours.
    """

    is_paired = True

    @staticmethod
    def size(factors: Tensor) -> int:
        """Twice the width of the factors."""
        return 2 * factors.shape[-1]

    @staticmethod
    def matrix(factors: Tensor) -> Tensor:
        """Layer by layer, of the identity."""
        layers, n = (len(factors) - 2) // 2, 2 * factors.shape[-1]
        first, second, d = factors.split([layers, layers, 2])
        w = torch.eye(n, dtype=factors.dtype, device=factors.device)
        for i in range(layers):
            start = i % 2
            end = n - start
            a, b = w[start:end:2], w[start + 1 : end : 2]
            one, two = (row[: len(a)].unsqueeze(-1) for row in (first[i], second[i]))
            c, s = (one.real, one.imag) if factors.is_complex() else (one, two)
            b = b * two if factors.is_complex() else b
            middle = torch.stack([c * a - s * b, s * a + c * b], 1).flatten(0, 1)
            w = torch.cat([w[:start], middle, w[end:]])
        return w * d.mT.reshape(n, 1)

    def __init__(self, factors: Tensor):
        self.factors, self.layers = factors, (len(factors) - 2) // 2
        self.half, self.parts = factors.shape[-1], 1 + factors.is_complex()
        first, second, d = factors.split([self.layers, self.layers, 2])
        if factors.is_complex():
            self.c, self.s, self.p, self.q = (
                m.contiguous() for m in (first.real, first.imag, second.real, second.imag)
            )
            self.d_re, self.d_im = d.real.contiguous(), d.imag.contiguous()
        else:
            self.c, self.s, self.d_re = first, second, d
        self.scratch: Tensor | None = None
        self.stages: Tensor | None = None
        self.block = max(1, BLOCK // (2 * self.parts * self.half))
        self._restart()

    def _restart(self) -> None:
        empty, block, m = self.c.new_empty, self.block, self.half
        self.turned = empty(self.layers, block, self.parts, m).zero_()
        if self.parts == 2:
            self.phased = empty(self.layers, block, m).zero_()
            self.d_turned = empty(block, 2, m).zero_()

    def _view(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), self.parts, 2, self.half)

    def _room(self, batch: int) -> Tensor:
        """Two rows of units and one of halves for each row of a batch."""
        if self.scratch is None or self.scratch.shape[1] < batch:
            self.scratch = self.c.new_empty(3, batch, self.parts, 2, self.half)
        return self.scratch[:, :batch]

    def _pair(self, x: Tensor, i: int) -> tuple[Tensor, Tensor]:
        """The first and the second units of a layer's rotations."""
        return (x[:, :, 1, :-1], x[:, :, 0, 1:]) if i % 2 else (x[:, :, 0], x[:, :, 1])

    def _ends(self, x: Tensor, y: Tensor, i: int) -> None:
        """Copies the two units that no rotation of the layer has."""
        if i % 2:
            y[:, :, 0, 0] = x[:, :, 0, 0]
            y[:, :, 1, -1] = x[:, :, 1, -1]

    def _coefficients(self, m: Tensor, i: int) -> Tensor:
        return m[i, :-1] if i % 2 else m[i]

    def _forward(self, x: Tensor, y: Tensor, u: Tensor, i: int) -> None:
        """Writes layer i of x into y; u is room for its second units."""
        (a, b), (ya, yb), (c, s) = (
            self._pair(x, i),
            self._pair(y, i),
            (self._coefficients(m, i) for m in (self.c, self.s)),
        )
        if self.parts == 2:
            p, q = (self._coefficients(m, i) for m in (self.p, self.q))
            u = u[..., 0, : b.shape[-1]]
            torch.mul(b, p, out=u)
            u[:, 0].addcmul_(b[:, 1], q, value=-1)
            u[:, 1].addcmul_(b[:, 0], q)
            b = u
        torch.mul(a, c, out=ya)
        ya.addcmul_(b, s, value=-1)
        torch.mul(a, s, out=yb)
        yb.addcmul_(b, c)
        self._ends(x, y, i)

    def _back(self, g: Tensor, y: Tensor, u: Tensor, i: int) -> None:
        """Writes the adjoint of layer i of g into y."""
        (a, b), (ya, yb), (c, s) = (
            self._pair(g, i),
            self._pair(y, i),
            (self._coefficients(m, i) for m in (self.c, self.s)),
        )
        torch.mul(a, c, out=ya)
        ya.addcmul_(b, s)
        v = u[..., 0, : b.shape[-1]] if self.parts == 2 else yb
        torch.mul(b, c, out=v)
        v.addcmul_(a, s, value=-1)
        if self.parts == 2:
            p, q = (self._coefficients(m, i) for m in (self.p, self.q))
            torch.mul(v, p, out=yb)
            yb[:, 0].addcmul_(v[:, 1], q)
            yb[:, 1].addcmul_(v[:, 0], q, value=-1)
        self._ends(g, y, i)

    def add_(self, z: Tensor, h: Tensor) -> None:
        """Layer by layer, and the diagonal in the sum."""
        x, room = self._view(h), self._room(len(h))
        for i in range(self.layers):
            y = room[i % 2]
            self._forward(x, y, room[2], i)
            x = y
        z = self._view(z).addcmul_(x, self.d_re)
        if self.parts == 2:
            z[:, 0].addcmul_(x[:, 1], self.d_im, value=-1)
            z[:, 1].addcmul_(x[:, 0], self.d_im)

    def start(self, steps: int, batch: int) -> None:
        """Room for the gradients in front of the diagonal and of every layer."""
        shape = (self.layers + 1, steps, batch, self.parts, 2, self.half)
        if self.stages is None or self.stages.shape != shape:
            self.stages = self.c.new_empty(shape)

    def back(self, d: Tensor, t: int) -> Tensor:
        """The diagonal first."""
        assert self.stages is not None
        g, u = self._view(d), self._room(len(d))[2]
        y = self.stages[-1, t]
        torch.mul(g, self.d_re, out=y)
        if self.parts == 2:
            y[:, 0].addcmul_(g[:, 1], self.d_im)
            y[:, 1].addcmul_(g[:, 0], self.d_im, value=-1)
        for i in reversed(range(self.layers)):
            g, y = y, self.stages[i, t]
            self._back(g, y, u, i)
        return y.flatten(1)

    def accumulate(self, h: Tensor, d: Tensor) -> None:
        """The way forward once more. The gradient by an angle is a product of rows behind its rotation."""
        assert self.stages is not None
        stages = self.stages.flatten(1, 2)
        for start in range(0, h.shape[0] * h.shape[1], self.block):
            part = slice(start, start + self.block)
            self._accumulate(self._view(h.flatten(0, 1)[part]), stages[:, part])

    def _accumulate(self, x: Tensor, gradients: Tensor) -> None:
        rows = len(x)
        room = self._room(rows)
        for i in range(self.layers):
            y, g = room[i % 2], gradients[i + 1]
            self._forward(x, y, room[2], i)
            (a, b), (ga, gb) = self._pair(y, i), self._pair(g, i)
            turned = self.turned[i, :rows, :, : a.shape[-1]]
            turned.addcmul_(gb, a)
            turned.addcmul_(ga, b, value=-1)
            if self.parts == 2:
                # In front of the phase, where its gradient is the same.
                (_, b), (_, gb) = self._pair(x, i), self._pair(gradients[i], i)
                phased = self.phased[i, :rows, : b.shape[-1]]
                phased.addcmul_(gb[:, 1], b[:, 0])
                phased.addcmul_(gb[:, 0], b[:, 1], value=-1)
            x = y
        if self.parts == 2:
            g, turned = gradients[-1], self.d_turned[:rows]
            turned.addcmul_(g[:, 1], x[:, 0])
            turned.addcmul_(g[:, 0], x[:, 1], value=-1)

    def gradient(self) -> Tensor:
        """Along the circle; signs have none."""
        turned = self.turned.sum((1, 2))
        if self.parts == 2:
            g = along_circle(self.factors, torch.cat([turned, self.phased.sum(1), self.d_turned.sum(0)]))
        else:
            g = torch.cat([-self.s * turned, self.c * turned, torch.zeros_like(self.d_re)])
        self._restart()
        return g
