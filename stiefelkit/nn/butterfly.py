"""Orthogonal butterfly fine-tuning: a rotation as a product of block-diagonal ones between permutations."""

from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit.contract.param import Parametrization
from stiefelkit.errors import OptionError, needs
from stiefelkit.nn.adapter import Adapter, OrthogonalAdapter, Rotation
from stiefelkit.nn.recurrent import require_options
from stiefelkit.numbers import as_python_number, integer


class Butterfly(Rotation):
    """:math:`R = B_1 B_2 ... B_m`, each :math:`B_i = P_i diag(Q_{i1}, ..., Q_{ik}) P_i^T`.

    The frame `weight` holds all blocks :math:`Q_{ij}`. :math:`P_1` is the identity; :math:`B_i` mixes the features of
    :math:`2^{i-1}` neighbouring blocks.
    """

    def __init__(self, n: int, block_size: int, factors: int, inner: Parametrization, factory: Any, **options: Any):
        shape = factors, n // block_size, block_size, block_size
        super().__init__(shape, inner, options.pop("init", "identity"), factory, options)
        self.blocks = shape[1] if factors == 1 else 1

    @property
    def matrix(self) -> Tensor:
        w = self.weight
        return self._turned(torch.eye(w.shape[1] * w.shape[2], dtype=w.dtype, device=w.device)).mT

    def _turned(self, x: Tensor) -> Tensor:
        w = self.weight
        y = x.to(w.dtype)
        for i in reversed(range(len(w))):
            rows = _halves_swapped(y, w.shape[-1], i, 2, 2**i).unflatten(-1, w.shape[1:3])
            y = _halves_swapped(torch.einsum("...kc,kbc->...kb", rows, w[i]).flatten(-2), w.shape[-1], i, 2**i, 2)
        return y.to(x.dtype)


class ButterflyAdapter(OrthogonalAdapter):
    """A frozen layer, a trained rotation R and a trained scale of each output: :math:`y = diag(s) W R x + b` (BOFT).

    :math:`R = B_1 ... B_m` with block-diagonal rotations between permutations, so that m factors of blocks of b rows
    mix :math:`2^{m-1} b` features, by :math:`m n (b - 1) / 2` numbers. R is the identity at first, and s are ones.

    Args:
        layer: a linear layer, a convolution, or any other that `OrthogonalAdapter` takes with these sides.
        inner: the map of all blocks, a registered name or a class.
        block_size: b, which divides the features; with several factors it is even.
        factors: m; :math:`2^{m-1}` divides the number of blocks.
        scaled: whether there is s; the layer has no other gain.
        side: "in", or "patches" for what stands under the kernel of a convolution.
        name, dropout: as in `OrthogonalAdapter`; with several factors R is left out as a whole.
        **options: of the map of the blocks.

    References:
        Liu et al., Parameter-efficient orthogonal finetuning via butterfly factorization, ICLR 2024.

    >>> adapter = ButterflyAdapter(nn.Linear(8, 3), block_size=2, factors=3)
    >>> sum(p.numel() for p in adapter.parameters() if p.requires_grad)
    15
    """

    def __init__(
        self,
        layer: nn.Module,
        inner: Parametrization = "cayley",
        *,
        block_size: int = 4,
        factors: int = 1,
        scaled: bool = True,
        side: str = "in",
        name: str = "default",
        dropout: float = 0.0,
        **options: object,
    ):
        Adapter.__init__(self, layer, name)
        who, options = "ButterflyAdapter", as_python_number(options)
        require_options(ButterflyAdapter, inner, options)
        needs(side != "out", OptionError, who, "a side of 'in' or 'patches'", side)
        n = self._turned_features(side)
        block_size, factors = (integer(1).require(who, "block_size or factors", k) for k in (block_size, factors))
        fits = n % block_size == 0
        fits &= factors == 1 or (block_size % 2 == 0 and n // block_size % 2 ** (factors - 1) == 0)
        wanted = f"{n} features to be a multiple of 2^(factors - 1) blocks, of an even size for several factors"
        needs(fits, OptionError, who, wanted, f"block_size={block_size}, factors={factors}")
        self._turn_by(Butterfly(n, block_size, factors, inner, self.factory, **options), dropout)
        self.scale = nn.Parameter(torch.ones(self.out_features, **self.factory)) if scaled else None

    def changed(self, w: Tensor) -> Tensor:
        w, s = super().changed(w), self.scale
        axis = self._layout.axes[1] - w.dim()
        return w if s is None else w * s.to(w.dtype).view(-1, *[1] * (-1 - axis))

    def unmerged(self, x: Tensor, *args: object, **options: object) -> Tensor:
        y, b = super().unmerged(x, *args, **options), self.bias
        if self.scale is None:
            return y
        shape = (-1, *[1] * (-1 - self._layout.dim))
        s = self.scale.to(y.dtype).view(shape)
        return y * s if b is None else (y - b.to(y.dtype).view(shape)) * s + b.to(y.dtype).view(shape)


def _halves_swapped(x: Tensor, block_size: int, factor: int, *sizes: int) -> Tensor:
    """Returns features in the order that P of a factor, counted from 0, gives them, or its transpose.

    Of 2^factor neighbouring blocks, sizes 2^factor and 2, P puts half blocks of even number first, then those of odd.
    """
    if factor == 0:
        return x
    return x.unflatten(-1, (-1, *sizes, block_size // 2)).transpose(-3, -2).flatten(-4)
