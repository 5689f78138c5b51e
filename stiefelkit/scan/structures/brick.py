"""Layers of rotations of neighbours, and a diagonal: `givens` with few layers.

Two neighbours that a real rotation turns are one complex number e^{it} (a + ib), so that a layer is one product, as
long as its pairs lie at even places in memory. Those of every second layer do not; the phases between two layers, which
are multiplied with anyhow, are written one place further on.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from stiefelkit.scan.structures.structure import Diagonal, Structure, along_circle

BLOCK = 128 * 1024  # numbers of the rows that a gradient is worked out for at a time


class _Room(NamedTuple):
    """Rows (rows, parts, n) in memory where a layer's pairs are complex numbers, parts being Re and Im."""

    rows: Tensor
    pairs: Tensor

    @classmethod
    def of(cls, memory: Tensor, n: int, layer: int) -> "_Room":
        """In memory (rows, parts, n), n rounded up to even with a place to spare."""
        first = layer % 2
        count = (n - first) // 2
        pairs = memory[..., 2 * first : 2 * (first + count)].unflatten(-1, (count, 2))
        return cls(memory[..., first : first + n], torch.view_as_complex(pairs))


class Brick(Structure):
    """W = D F_L ... F_1. Layer l rotates the units (0, 1), (2, 3), ..., or for even l (1, 2), (3, 4), ... .

    A rotation is [[c, -f s], [s, f c]], f of modulus one, and 1 in a real one. Factors (2L + 1, n). Complex: a row
    c + is for each layer, then a row f, then D. Real: a row c for each, then a row s, then D.
    """

    def __init__(self, factors: Tensor):
        layers, self.n = len(factors) // 2, factors.shape[-1]
        self.factors, self.layers, self.parts = factors, layers, 1 + factors.is_complex()
        first, second, d = factors.split([layers, layers, 1])
        turns = first if factors.is_complex() else torch.complex(first, second)
        counts = [(self.n - i % 2) // 2 for i in range(layers)]
        self.turns = [turn[:count] for turn, count in zip(turns, counts, strict=True)]
        self.turns_back = [turn.conj().resolve_conj() for turn in self.turns]
        seconds = [row[:count] if factors.is_complex() else 1.0 for row, count in zip(second, counts, strict=True)]
        self.phases = [Diagonal.of(_with_seconds(d[0], i, phases)) for i, phases in enumerate(seconds)]
        self.d = Diagonal.of(d[0])
        # With conjugate pairs, which gradients by angles take: second units have the other sign behind a layer.
        self.signs = [_with_seconds(self.d.re, i, -1.0) for i in range(layers)]
        before = [torch.ones_like(self.d.re), *self.signs]
        products = (a * b for a, b in zip(self.signs, before[:-1], strict=True))
        self.phases_of_conjugates = [phase.signed(s) for phase, s in zip(self.phases, products, strict=True)]
        self.block = max(1, BLOCK // (self.parts * self.n))
        self.rooms: dict[int, list[_Room]] = {}
        self.stages = self.d.re.new_empty(0)
        self.views: list[list[_Room]] = []
        self._restart()

    def _restart(self) -> None:
        real = self.d.re
        self.turned = [turn.new_zeros(self.block, self.parts, len(turn)) for turn in self.turns]
        if self.parts == 2:
            self.phased = real.new_zeros(self.layers + 1, self.block, self.n)

    def _memory(self, *rows: int) -> Tensor:
        return self.d.re.new_empty(*rows, self.parts, (self.n + 2) // 2 * 2)

    def _room(self, rows: int) -> list[_Room]:
        """Returns room for the rows of two layers, by turns."""
        if rows not in self.rooms:
            if len(self.rooms) > 2:
                self.rooms.clear()
            self.rooms[rows] = [_Room.of(memory, self.n, i) for i, memory in enumerate(self._memory(2, rows).unbind())]
        return self.rooms[rows]

    def _view(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), self.parts, self.n)

    def add_(self, z: Tensor, h: Tensor) -> None:
        x, rooms = self._view(h), self._room(len(h))
        for i in range(self.layers):
            room = rooms[i % 2]
            self.phases[i].times(x, room.rows)
            room.pairs.mul_(self.turns[i])
            x = room.rows
        self.d.plus_times(x, self._view(z))

    def start(self, steps: int, batch: int) -> None:
        shape = (self.layers + 1, steps, batch)
        if self.stages.shape[:3] != shape:
            self.stages = self._memory(*shape)
            of = [*range(self.layers), self.layers - 1]
            self.views = [
                [_Room.of(m, self.n, i) for i, m in zip(of, step, strict=True)] for step in self.stages.unbind(1)
            ]
            self.first = self.d.re.new_empty(steps, batch, self.parts, self.n)

    def back(self, d: Tensor, t: int) -> Tensor:
        stages = self.views[t]
        self.d.times(self._view(d), stages[-1].rows, True)
        g = stages[-1].rows
        for i in reversed(range(self.layers)):
            room = stages[i]
            if i == self.layers - 1:
                room.rows.copy_(g)
            else:
                self.phases[i + 1].times(g, room.rows, True)
            room.pairs.mul_(self.turns_back[i])
            g = room.rows
        self.phases[0].times(g, self.first[t], True)
        return self.first[t].flatten(1)

    def accumulate(self, h: Tensor, d: Tensor) -> None:
        # Recomputes the forward pass: the gradient by an angle is a product of rows on one side of its rotation.
        stages, rows = self.stages.flatten(1, 2), self._view(h.flatten(0, 1))
        for start in range(0, len(rows), self.block):
            part = slice(start, start + self.block)
            self._accumulate(rows[part], stages[:, part])

    def _accumulate(self, x: Tensor, gradients: Tensor) -> None:
        count = len(x)
        rooms = self._room(count)
        for i in range(self.layers):
            room, g = rooms[i % 2], _Room.of(gradients[i], self.n, i)
            self.phases_of_conjugates[i].times(x, room.rows)
            self.turned[i][:count].addcmul_(room.pairs, g.pairs)
            self._add_phases(i, room.rows, g.rows)
            room.pairs.mul_(self.turns_back[i])
            x = room.rows
        self._add_phases(self.layers, x, _Room.of(gradients[-1], self.n, self.layers - 1).rows)

    def _add_phases(self, i: int, x: Tensor, g: Tensor) -> None:
        if self.parts == 2:
            (re, im), (g_re, g_im) = x.unbind(1), g.unbind(1)
            phased = self.phased[i, : len(x)]
            phased.addcmul_(g_im, re)
            phased.addcmul_(g_re, im, value=-1)

    def _stacked(self, rows: Iterable[Tensor]) -> Tensor:
        return torch.stack([torch.nn.functional.pad(row, (0, self.n - len(row))) for row in rows])

    def gradient(self) -> Tensor:
        turned = self._stacked(turned.sum((0, 1)).imag for turned in self.turned)
        if self.parts == 1:
            c, s, _ = self.factors.split([self.layers, self.layers, 1])
            g = torch.cat([-s * turned, c * turned, torch.zeros_like(self.factors[:1])])
        else:
            phased = self.phased.sum(1)
            of_layers = self._stacked((phased[i] * s)[i % 2 + 1 :: 2] for i, s in enumerate(self.signs))
            of_d = phased[-1] * self.signs[-1]
            g = along_circle(self.factors, torch.cat([turned, of_layers, of_d.unsqueeze(0)]))
        self._restart()
        return g


def _with_seconds(like: Tensor, i: int, seconds: Tensor | float) -> Tensor:
    """Returns a row of ones, and of other numbers at the second units of the pairs of layer i."""
    row = torch.ones_like(like)
    row[i % 2 + 1 :: 2] = seconds
    return row
