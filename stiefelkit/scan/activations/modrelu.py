"""modReLU, of real and of complex states."""

import torch
from torch import Tensor

from stiefelkit.functional import modrelu
from stiefelkit.scan.activations.activation import Activation, Step

__all__ = ["ComplexModReLU", "ModReLU"]

ILL = 1e9
"""A complex bias over the modulus above which the square of the modulus may have underflowed."""
STEEPEST = 1e18
"""The largest ratio of a complex bias to the modulus whose derivative is told apart."""


class ModReLU(Activation):
    """sign(z) relu(|z| + b): z less the part of it that lies in [b, -b]; where b > 0, z + b sign(z)."""

    kernel = "modrelu"
    bias_inside = True
    function = staticmethod(modrelu)  # type: ignore[assignment]

    @classmethod
    def of_complex(cls) -> type[Activation]:
        """Shifts the modulus."""
        return ComplexModReLU

    def step(self, like: Tensor, bias: Tensor | None) -> Step:
        """A clamp and a difference, and two calls more where the bias rises; reads the bias on a CPU."""
        assert bias is not None
        low = bias.clamp(max=0).expand(len(like), -1).contiguous()
        high, part = -low, torch.empty_like(low)
        if bias.device.type == "cpu" and not bool((bias > 0).any()):

            def falling(z: Tensor, saved: Tensor) -> None:
                torch.clamp(z, low, high, out=part)
                z.sub_(part)

            return falling
        rise = bias.clamp(min=0).expand(len(like), -1).contiguous()

        def mixed(z: Tensor, saved: Tensor) -> None:
            torch.clamp(z, low, high, out=part)
            z.sub_(part)
            torch.sign(z, out=part)
            z.addcmul_(part, rise)

        return mixed

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """1 where h is not 0."""
        return (h.sign().abs_(),)

    def bias_gradient(self, h: Tensor, delta: Tensor) -> Tensor:
        """The gradient in the direction of h."""
        return h.sign().mul_(delta)


class ComplexModReLU(Activation):
    """z (1 + q), q = max(b / |z|, -1), and 0 at z = 0; q is kept."""

    kernel = "complex_modrelu"
    bias_inside = True
    is_paired = True
    saved = (1, None)
    function = staticmethod(modrelu)  # type: ignore[assignment]

    @staticmethod
    def of_rows(z: Tensor, b: Tensor) -> Tensor:
        """ModReLU of [Re z | Im z]."""
        re, im = z.chunk(2, dim=-1)
        modulus = torch.sqrt(re * re + im * im)
        scale = torch.where(modulus > 0, torch.relu(modulus + b) / modulus, torch.zeros_like(modulus))
        return torch.cat([scale * re, scale * im], dim=-1)

    def step(self, like: Tensor, bias: Tensor | None) -> Step:
        """By the square of the modulus on a CPU, which may underflow."""
        if like.device.type != "cpu":
            return self.careful(like, bias)
        bias = _nonzero(bias).expand(len(like), -1).contiguous()
        ratio = torch.empty_like(bias)

        def apply(z: Tensor, saved: Tensor, re: Tensor, im: Tensor, pairs: Tensor, scale: Tensor) -> None:
            torch.mul(re, re, out=ratio)
            ratio.addcmul_(im, im).rsqrt_().mul_(bias)
            torch.clamp_min(ratio, -1, out=saved)
            pairs.addcmul_(pairs, scale)

        return apply

    def views(self, z: Tensor, saved: Tensor) -> list[tuple[Tensor, ...]]:
        """With the halves, and with pairs beside their scale."""
        parts = (z, saved, *z.chunk(2, -1), z.unflatten(-1, (2, -1)), saved.unsqueeze(-2))
        return list(zip(*(part.unbind(0) for part in parts), strict=True))

    def careful(self, like: Tensor, bias: Tensor | None) -> Step:
        """By the modulus itself."""
        bias, tiny = _nonzero(bias), torch.finfo(like.dtype).tiny

        def apply(z: Tensor, saved: Tensor, re: Tensor, im: Tensor, pairs: Tensor, scale: Tensor) -> None:
            modulus = torch.hypot(re, im)
            q = torch.where(modulus < tiny, -1, (bias / modulus).clamp_(-1, STEEPEST))
            saved.copy_(q)
            unit = pairs / modulus.clamp_min(tiny).unsqueeze(-2)
            # b / |z| may overflow, z / |z| + b does not.
            length = torch.where(q == -1, 0, modulus + bias)
            torch.mul(unit, length.unsqueeze(-2), out=pairs)

        return apply

    def is_ill(self, saved: Tensor) -> bool:
        """Whether a square has underflowed."""
        # Zeros whose bias is positive have given inf, and NaN a step later.
        return saved.device.type == "cpu" and saved.numel() > 0 and not bool(saved.amax() <= ILL)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """The Jacobian (1 + q) I - q e e^T of z (1 + b / |z|), e = h / |h|."""
        # Its entries are 1 + q (Im e)^2, 1 + q (Re e)^2 and -q Re e Im e. With the smallest normal number added to both
        # squares and to their sum, h = 0 gives 1 + q = 0.
        re, im = h.chunk(2, -1)
        tiny = torch.finfo(h.dtype).tiny
        diagonal = torch.empty_like(h)
        across, along = diagonal.chunk(2, -1)
        torch.mul(im, im, out=across).add_(tiny)
        torch.mul(re, re, out=along)
        scale = torch.add(across, along)
        along.add_(tiny)
        torch.div(saved, scale, out=scale)
        across.mul_(scale).add_(1)
        along.mul_(scale).add_(1)
        return diagonal, torch.mul(re, im).mul_(scale).neg_()

    def bias_gradient(self, h: Tensor, delta: Tensor) -> Tensor:
        """The part of the gradient in the direction of h."""
        re, im = h.chunk(2, -1)
        first, second = delta.chunk(2, -1)
        # At h = 0 delta is 0.
        inverse = torch.mul(re, re).addcmul_(im, im).add_(torch.finfo(h.dtype).tiny).rsqrt_()
        return torch.mul(re, first).addcmul_(im, second).mul_(inverse)


def _nonzero(bias: Tensor | None) -> Tensor:
    """The bias without zeros, which would meet 1 / |z| = inf at z = 0: tiny and negative, it gives q = -1 there."""
    assert bias is not None
    return torch.where(bias == 0, -torch.finfo(bias.dtype).tiny, bias)
