"""modReLU with an epsilon, as scuRNN's paper has it."""

import torch
from torch import Tensor

from stiefelkit.functional import modrelu
from stiefelkit.functional._activations import modrelu_of_parts
from stiefelkit.scan.activations.base import Activation, Step

__all__ = ["ModReLUEpsilon"]


class ModReLUEpsilon(Activation):
    """z q, q = relu(s + b) / (s + epsilon), s = (|z|^2 + epsilon)^(1/2); q is kept, and tells z = h / q."""

    bias_inside = True
    saved = (1, None)
    default_slope = 1e-5

    @classmethod
    def of_complex(cls) -> type[Activation]:
        """Of the modulus."""
        return _Complex

    def function(self, z: Tensor, b: Tensor) -> Tensor:
        """With this epsilon."""
        return modrelu(z, b, self.slope)

    def step(self, like: Tensor, bias: Tensor | None) -> Step:
        """By the modulus, in the room for q."""
        assert bias is not None
        bias, root, epsilon = bias.expand(len(like), -1), like.new_tensor(self.slope**0.5), self.slope
        size = torch.empty_like(bias, memory_format=torch.contiguous_format)

        def apply(z: Tensor, saved: Tensor, *parts: Tensor) -> None:
            re, im, pairs, scale = parts or (z, root, z, saved)
            torch.hypot(re, im, out=size)
            if parts:
                torch.hypot(size, root, out=size)
            torch.add(size, bias, out=saved)
            torch.div(saved.clamp_(min=0), size.add_(epsilon), out=saved)
            pairs.mul_(scale)

        return apply

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """Returns the derivative q + (1 - q) z^2 / (s (s + epsilon))."""
        z, s = self._before(h, saved)
        return (saved + (1 - saved) * (z / s) * (z / (s + self.slope)),)

    def inner_gradient(self, h: Tensor, saved: Tensor, delta: Tensor) -> Tensor:
        """Returns the part z / (s + epsilon) of the gradient by h, which is delta over the derivative along z."""
        z, s = self._before(h, saved)
        length = s + self.slope
        if z.shape == s.shape:
            ratio, product = (z / s) * (z / length), z / length * delta
        else:
            ratio = (s - self.slope / s) / length
            pairs = z.unflatten(-1, (2, -1)) / length.unsqueeze(-2)
            product = (pairs * delta.unflatten(-1, (2, -1))).sum(-2)
        # Between q and 1; 0 where all is 0.
        return product / (saved + (1 - saved) * ratio).clamp_min(torch.finfo(h.dtype).tiny)

    def _before(self, h: Tensor, saved: Tensor) -> tuple[Tensor, Tensor]:
        """Z, which is 0 where q is, and s."""
        q = saved.clamp_min(torch.finfo(h.dtype).tiny)
        z = h / (q if h.shape == q.shape else q.repeat(*(1,) * (q.dim() - 1), 2))
        modulus = z.abs() if h.shape == q.shape else torch.hypot(*z.chunk(2, -1))
        return z, torch.hypot(modulus, h.new_tensor(self.slope**0.5))


class _Complex(ModReLUEpsilon):
    """The same of pairs [Re z | Im z]."""

    is_paired = True

    def of_rows(self, z: Tensor, b: Tensor) -> Tensor:
        """Returns the function of [Re z | Im z]."""
        return modrelu_of_parts(z.unflatten(-1, (2, -1)), b, self.slope, -2).flatten(-2)

    def views(self, z: Tensor, saved: Tensor) -> list[tuple[Tensor, ...]]:
        """With the halves, and with pairs beside their scale."""
        parts = (z, saved, *z.chunk(2, -1), z.unflatten(-1, (2, -1)), saved.unsqueeze(-2))
        return list(zip(*(part.unbind(0) for part in parts), strict=True))

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """Returns the Jacobian q I + (1 - q) z z^T / (s (s + epsilon))."""
        z, s = self._before(h, saved)
        re, im = (z / s.repeat(*(1,) * (s.dim() - 1), 2)).chunk(2, -1)
        rest = (1 - saved) * (s / (s + self.slope))
        return torch.cat([saved + rest * re * re, saved + rest * im * im], -1), rest * re * im
