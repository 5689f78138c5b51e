"""Pairs in falling order."""

import torch
from torch import Tensor

from stiefelkit.functional import oplu
from stiefelkit.scan.activations.activation import Activation, Step

__all__ = ["OPLU"]


class OPLU(Activation):
    """The pair (z_i, z_{i + n/2}) in falling order; whether it was turned is kept."""

    kernel = "oplu"
    is_paired = True
    saved = (2, torch.int8)
    function = staticmethod(oplu)  # type: ignore[assignment]

    def step(self, like: Tensor, bias: Tensor | None) -> Step:
        """Keeps whether a pair was turned."""
        larger = like.new_empty(like.shape[0], like.shape[1] // 2)

        def apply(z: Tensor, saved: Tensor, first: Tensor, second: Tensor) -> None:
            saved.copy_(first < second)
            torch.maximum(first, second, out=larger)
            torch.minimum(first, second, out=second)
            first.copy_(larger)

        return apply

    def views(self, z: Tensor, saved: Tensor) -> list[tuple[Tensor, ...]]:
        """With both halves."""
        return list(zip(*(part.unbind(0) for part in (z, saved, *z.chunk(2, -1))), strict=True))

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """A permutation of each pair."""
        turned = saved.to(h.dtype)
        return (1 - turned).repeat(1, 1, 2), turned
