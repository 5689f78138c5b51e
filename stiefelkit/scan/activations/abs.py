"""The absolute value."""

import torch
from torch import Tensor

from stiefelkit.scan.activations.activation import Activation, Step

__all__ = ["Abs"]


class Abs(Activation):
    """|z|; the sign is kept."""

    kernel = "abs"
    saved = (1, torch.int8)
    function = staticmethod(torch.abs)  # type: ignore[assignment]

    def step(self, like: Tensor, bias: Tensor | None) -> Step:
        """Keeps the sign."""
        sign = torch.empty_like(like)

        def apply(z: Tensor, saved: Tensor) -> None:
            torch.sign(z, out=sign)
            saved.copy_(sign)
            z.abs_()

        return apply

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """The sign."""
        return (saved.to(h.dtype),)
