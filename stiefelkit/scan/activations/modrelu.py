"""modReLU, of real and of complex states."""

import torch
from torch import Tensor

from stiefelkit.functional import modrelu
from stiefelkit.scan.activations.base import Activation, Step

__all__ = ["ComplexModReLU", "ModReLU"]

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
        """Returns a clamp and a difference, and two calls more where the bias rises; reads the bias on a CPU."""
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
        """Returns the gradient in the direction of h."""
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
        pairs = z.unflatten(-1, (2, -1))
        # ONNX has no hypot: of the pair divided by the larger one the squares neither overflow nor vanish.
        largest = pairs.abs().amax(-2, keepdim=True)
        unit = pairs / torch.where(largest > 0, largest, 1.0)
        length = unit.square().sum(-2, keepdim=True).sqrt().clamp_min(1)
        modulus = largest * length
        size = torch.where(modulus < torch.finfo(z.dtype).tiny, 0.0, torch.relu(modulus + b.unsqueeze(-2)))
        return (unit / length * size).flatten(-2)

    def step(self, like: Tensor, bias: Tensor | None) -> Step:
        """By b / |z| on a CPU, which may overflow."""
        if like.device.type != "cpu":
            return self.careful(like, bias)
        assert bias is not None
        tiny, eps = torch.finfo(bias.dtype).tiny, torch.finfo(bias.dtype).eps
        # A zero would meet 1 / |z| = inf at z = 0: the least negative number gives -1 there, and no more than a
        # rounding anywhere else.
        bias = torch.where(bias == 0, -tiny * eps, bias).expand(len(like), -1).contiguous()
        ratio, below = torch.empty_like(bias), tiny * (1 - eps)

        def apply(z: Tensor, saved: Tensor, re: Tensor, im: Tensor, pairs: Tensor, scale: Tensor) -> None:
            torch.hypot(re, im, out=ratio)
            torch.threshold_(ratio, below, 0)
            torch.div(bias, ratio, out=ratio)
            torch.clamp(ratio, -1, STEEPEST, out=saved)
            pairs.addcmul_(pairs, scale)

        return apply

    def views(self, z: Tensor, saved: Tensor) -> list[tuple[Tensor, ...]]:
        """With the halves, and with pairs beside their scale."""
        parts = (z, saved, *z.chunk(2, -1), z.unflatten(-1, (2, -1)), saved.unsqueeze(-2))
        return list(zip(*(part.unbind(0) for part in parts), strict=True))

    def careful(self, like: Tensor, bias: Tensor | None) -> Step:
        """By the modulus itself."""
        assert bias is not None
        tiny = torch.finfo(like.dtype).tiny

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
        """Returns whether b / |z| was cut off."""
        # Zeros whose bias is positive have given inf, and zeros without subnormal numbers NaN.
        return saved.device.type == "cpu" and saved.numel() > 0 and not bool(saved.amax() < STEEPEST)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """Returns the Jacobian (1 + q) I - q e e^T of z (1 + b / |z|), e = h / |h|."""
        # Its entries are 1 + q (Im e)^2, 1 + q (Re e)^2 and -q Re e Im e. With the smallest normal number added to both
        # squares and to their sum, h = 0 gives 1 + q = 0.
        re, im = _directions(h).chunk(2, -1)
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
        return diagonal, re.mul_(im).mul_(scale).neg_()

    def bias_gradient(self, h: Tensor, delta: Tensor) -> Tensor:
        """Returns the part of the gradient in the direction of h."""
        re, im = _directions(h).chunk(2, -1)
        first, second = delta.chunk(2, -1)
        # At h = 0 delta is 0.
        inverse = torch.mul(re, re).addcmul_(im, im).add_(torch.finfo(h.dtype).tiny).rsqrt_()
        return torch.mul(re, first).addcmul_(im, second).mul_(inverse)


def _directions(h: Tensor) -> Tensor:
    """Rows [Re h | Im h] with each pair divided by its larger modulus: squares neither overflow nor vanish."""
    pairs = h.abs()
    re, im = pairs.chunk(2, -1)
    largest = torch.maximum(re, im).clamp_min_(torch.finfo(h.dtype).tiny)
    for of, out in zip(h.chunk(2, -1), (re, im), strict=True):
        torch.div(of, largest, out=out)
    return pairs
