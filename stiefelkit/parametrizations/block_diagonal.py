"""Block-diagonal frames: many small ones by any map, as orthogonal fine-tuning has them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.contract.composite import Composite, Inner, of_inner, prefixed
from stiefelkit.contract.param import Parametrization, Position, Traits
from stiefelkit.errors import ImageError, needs
from stiefelkit.functional import nearest_frame
from stiefelkit.metrics import permitted_return, rounding_limit
from stiefelkit.numbers import Check, integer
from stiefelkit.tensors import computing_dtype, working_dtype


class BlockDiagonal(Composite):
    r""":math:`W = diag(Q_1, ..., Q_k)` with frames :math:`Q_j` by any parametrization, all mapped in one batched call.

    The blocks are n/k x p/k, so that k divides n and p; coordinates are those of the inner map for a batch of k.

    Image: block-diagonal frames whose blocks the inner map reaches; with :math:`k = 1`, the default, the inner map's.
    Cost: that of k small maps, and n p numbers to write W; `linear` applies the blocks without it, n p / k a vector.
    Not for weights whose blocks should mix: permute or rotate between two of them.

    Args:
        shape, dtype, device: of the frame, (*, n, p), real or complex, and where the charts live.
        precision: "exact", or "fast" if the inner map has it.
        blocks: k.
        inner: the map of the blocks, a registered name or a class.
        inner_options: its options.

    References:
        Qiu, Liu, Feng, Xue, Feng, Liu, Zhang, Weller, Schölkopf, Controlling text-to-image diffusion by orthogonal
        finetuning, NeurIPS 2023.

    >>> map = BlockDiagonal((4, 4), dtype=torch.float32, blocks=2)
    >>> map(torch.tensor([[0.0], [1.0]]))
    tensor([[ 1.,  0.,  0.,  0.],
            [ 0.,  1.,  0.,  0.],
            [ 0.,  0.,  0.,  1.],
            [ 0.,  0., -1.,  0.]])
    """

    precisions: ClassVar[tuple[str, ...]] = ("exact", "fast")
    coordinate_names: ClassVar[tuple[str, ...]] = ("*",)
    stacks: ClassVar[bool] = True
    schemes = of_inner("schemes")
    coordinates = of_inner("coordinates")
    manifolds = of_inner("manifolds")

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        precision: str = "exact",
        blocks: int = 1,
        inner: Parametrization = "cayley",
        inner_options: Mapping[str, Any] | None = None,
    ):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        self.blocks = _require_blocks(blocks, self.shape)
        self.inner = Inner(inner, inner_options).build(self, _block_shape(self.shape, self.blocks), device)

    @classmethod
    def supports(cls, shape: Sequence[int], dtype: torch.dtype, **options: Any) -> str | None:
        blocks = _require_blocks(options.get("blocks", 1), shape)
        wrapped = Inner(options.get("inner", "cayley"), options.get("inner_options"))
        return wrapped.flaw(_block_shape(shape, blocks), dtype)

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        return [
            ((6, 6), {"blocks": 3}),
            ((4, 4), {"blocks": 4}),
            ((5, 3), {}),
            ((12, 4), {"blocks": 2, "inner": "householder", "inner_options": {"reflections": 1}}),
            ((2, 6, 6), {"blocks": 2, "inner": "matrix_exp"}),
            ((8, 8), {"blocks": 2, "inner": "stiefel"}),
            ((12, 12), {"blocks": 3, "inner": "householder", "precision": "fast"}),
        ]

    @property
    def traits(self) -> Traits:
        inner = self.inner.traits
        return inner if self.blocks == 1 else replace(inner, onto=False, cost_exponent=max(2.0, inner.cost_exponent))

    @property
    def takes_nearest(self) -> bool:
        """The inner map's with one block; the frame nearest to a weight has no more blocks than that."""
        return self.blocks == 1 and self.inner.takes_nearest

    def options(self) -> dict[str, Any]:
        return {"blocks": self.blocks, "inner": self.inner.options()}

    def error_bound(self, *coordinates: Tensor) -> float:
        exact = super().error_bound()
        return exact if self.traits.exact else exact + math.sqrt(self.blocks) * self.inner.error_bound(*coordinates)

    @property
    def return_bound(self) -> float:
        return max(permitted_return(self.shape, self.dtype), math.sqrt(self.blocks) * self.inner.return_bound)

    def forward(self, *coordinates: Tensor) -> Tensor:
        return self._assembled(self.inner(*coordinates)).to(self.dtype)

    def linear(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        if len(self.shape) > 2 or self.blocks == 1 or x.dtype != self.dtype:
            return super().linear(x, *coordinates)
        q = self.inner(*coordinates).to(self.dtype)
        k, b, c = q.shape
        rows = x.reshape(-1, k, c).transpose(0, 1)  # (k, rows, c): one product for each block
        return torch.bmm(rows, q.mT).transpose(0, 1).reshape(*x.shape[:-1], k * b)

    def nearest(self, weight: Tensor) -> Tensor:
        return self.project(weight) if self.blocks == 1 else nearest_frame(weight.to(working_dtype(self.dtype)))

    def project(self, weight: Tensor) -> Tensor:
        """Returns the nearest block-diagonal frame: each block's nearest that the inner map takes."""
        return self._assembled(self.inner.project(self._split(weight.to(working_dtype(self.dtype)))))

    def invert(self, w: Tensor) -> Position:
        """Inverts the inner map at all blocks; what is outside of them must be zero, to rounding."""
        blocks = self._split(w)
        outside = torch.linalg.vector_norm(w - self._assembled(blocks)).item()
        permitted = 4 * rounding_limit(self.shape[-1], computing_dtype(self.dtype))
        got = f"entries of norm {outside:.2g} there; init='project' takes the nearest block-diagonal frame"
        who = f"BlockDiagonal with blocks={self.blocks}"
        needs(outside <= permitted, ImageError, who, "a frame that is zero outside of them", got)
        coordinates, chart = self.inner.invert(nearest_frame(blocks))
        return coordinates, prefixed(inner=chart)

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        coordinates, chart = self.inner.initial(scheme, generator)
        return coordinates, prefixed(inner=chart)

    def _split(self, w: Tensor) -> Tensor:
        """Returns the diagonal blocks, (*, k, b, c)."""
        *batch, n, p = w.shape
        k = self.blocks
        return w.reshape(*batch, k, n // k, k, p // k).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    def _assembled(self, blocks: Tensor) -> Tensor:
        """Puts blocks (*, k, b, c) on the diagonal of zeros."""
        *batch, k, b, c = blocks.shape
        if k == 1:
            return blocks.squeeze(-3)
        # Block j stands at [..., j, j] of (*, b, c, k, k), which becomes (*, k, b, k, c).
        return torch.diag_embed(blocks.movedim(-3, -1)).movedim((-2, -1), (-4, -2)).reshape(*batch, k * b, k * c)


def _block_shape(shape: Sequence[int], blocks: int) -> tuple[int, ...]:
    *batch, n, p = shape
    return (*batch, blocks, n // blocks, p // blocks)


def _require_blocks(blocks: object, shape: Sequence[int]) -> int:
    n, p = shape[-2:]
    divides = Check(f"{{key}} that divide n = {n} and p = {p}", lambda k: integer(1).holds(k) and not (n % k or p % k))
    return divides.require("BlockDiagonal", "blocks", blocks)
