"""The gradients of a recurrence that are sums over all of its rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.scan.engines.chunks import Chunk
from stiefelkit.scan.engines.problem import Gradients, Problem

__all__ = ["Sums"]


class Sums:
    """Those by w, u and the biases, as far as they are wanted, added up chunk by chunk."""

    def __init__(self, p: Problem, needs: Sequence[bool]):
        self.p = p
        _, needs_w, _, needs_u, needs_bias, needs_inner = needs
        parts, columns = 1 + p.is_complex, p.x.shape[-1] * (1 + p.x.is_complex())

        def zeros(*shape: int) -> Tensor:
            return p.first.new_zeros(shape)

        self.needs_w = needs_w
        self.w = zeros(parts * len(p.w), p.width) if needs_w and p.structure is None else None
        self.u = zeros(parts * len(p.u), columns) if needs_u and p.u is not None else None
        self.bias = zeros(parts * len(p.bias)) if needs_bias and p.bias is not None else None
        self.inner = zeros(p.n) if needs_inner and p.activation_bias is not None else None
        self.ones = torch.ones_like(p.buffer(1)) if self.bias is not None else None
        self.inputs = p.buffer(columns) if self.u is not None and p.x.is_complex() else None

    def add(
        self, chunk: Chunk, d_w: Tensor, d_u: Tensor, d_z: Tensor, before: Tensor, h: Tensor, saved: Tensor
    ) -> None:
        """Adds a chunk's share.

        Args:
            chunk: the chunk.
            d_w: gradients by the rows w h, (k batch, .); of a w in factors, what has just gone back through it.
            d_u: gradients by the rows u x + bias.
            d_z: gradients by the arguments of the activation.
            before: the states h, (k, batch, N).
            h: what the activation returned, (k, batch, N).
            saved: what it kept besides, (k, batch, .).
        """
        if self.w is not None:
            self.w.addmm_(d_w.mT, before.flatten(0, 1))
        elif self.p.structure is not None and self.needs_w:
            self.p.structure.accumulate(before, d_w.view_as(before))
        if self.u is not None:
            x = self.p.read(self.p.x, chunk, self.inputs)
            self.u.addmm_(d_u.mT, x.flatten(0, 1))
        if self.bias is not None and self.ones is not None:
            self.bias.addmv_(d_u.mT, self.ones[: d_u.shape[0]])
        if self.inner is not None:
            self.inner += self.p.activation.inner_gradient(h.flatten(0, 1), saved.flatten(0, 1), d_z).sum(0)

    def gradients(self, x: Tensor | None, h0: Tensor) -> Gradients:
        """Returns all gradients, with those by x and, as rows, by h0; complex ones put together."""
        p = self.p
        return Gradients(
            x=x,
            w=self._by_w(),
            h0=p.row_gradient(h0),
            u=None if self.u is None else p.matrix_gradient(self.u, p.x.is_complex()),
            bias=None if self.bias is None else p.row_gradient(self.bias),
            activation_bias=self.inner,
        )

    def _by_w(self) -> Tensor | None:
        if self.p.structure is not None:
            return self.p.structure.gradient() if self.needs_w else None
        return None if self.w is None else self.p.matrix_gradient(self.w, True, self.p.half)
