"""modReLU, of real and of complex states, and that with an epsilon of scuRNN's paper."""

import torch
from torch import Tensor

from stiefelkit.functional import modrelu
from stiefelkit.functional._activations import modrelu_of_parts
from stiefelkit.scan.activations import Activation, Loop, Views, step_by_step

STEEPEST = 1e18  # the largest ratio of a complex bias to the modulus whose derivative is told apart


class ModReLU(Activation):
    """sign(z) relu(|z| + b): z less the part of it that lies in [b, -b]; where b > 0, z + b sign(z)."""

    kernel = "modrelu"
    bias_inside = True
    function = staticmethod(modrelu)  # type: ignore[assignment]

    @classmethod
    def of_complex(cls) -> type[Activation]:
        return ComplexModReLU

    def loop(self, like: Tensor, bias: Tensor | None) -> Loop:
        """Takes a clamp and a difference, and two calls more where the bias rises; reads the bias on a CPU."""
        assert bias is not None
        low = bias.clamp(max=0).expand(len(like), -1).contiguous()
        high, part = -low, torch.empty_like(low)
        is_falling = bias.device.type == "cpu" and not bool((bias > 0).any())
        rise = None if is_falling else bias.clamp(min=0).expand(len(like), -1).contiguous()

        def apply(z, _):
            torch.clamp(z, low, high, out=part)
            z.sub_(part)
            if rise is not None:
                torch.sign(z, out=part)
                z.addcmul_(part, rise)

        return step_by_step(apply)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return (h.sign().abs_(),)

    def bias_gradient(self, h: Tensor, saved: Tensor, delta: Tensor) -> Tensor:
        return h.sign().mul_(delta)


class _OfPairs(Activation):
    """An activation of pairs [Re z | Im z], which scales each."""

    is_paired = True

    def views(self, z: Tensor, saved: Tensor) -> list[Views]:
        parts = (z, saved, *z.chunk(2, -1), z.unflatten(-1, (2, -1)), saved.unsqueeze(-2))
        return list(zip(*map(torch.unbind, parts), strict=True))


class ComplexModReLU(_OfPairs):
    """z (1 + q), q = max(b / |z|, -1), and 0 at z = 0; q is kept."""

    kernel = "complex_modrelu"
    bias_inside = True
    saved = (1, None)
    function = staticmethod(modrelu)  # type: ignore[assignment]

    @staticmethod
    def of_rows(z: Tensor, b: Tensor) -> Tensor:
        pairs = z.unflatten(-1, (2, -1))
        # ONNX has no hypot: of the pair divided by the larger one the squares neither overflow nor vanish.
        largest = pairs.abs().amax(-2, keepdim=True)
        unit = pairs / torch.where(largest > 0, largest, 1.0)
        length = unit.square().sum(-2, keepdim=True).sqrt().clamp_min(1)
        modulus = largest * length
        size = torch.where(modulus < torch.finfo(z.dtype).tiny, 0.0, torch.relu(modulus + b.unsqueeze(-2)))
        return (unit / length * size).flatten(-2)

    def loop(self, like: Tensor, bias: Tensor | None) -> Loop:
        """By b / |z| on a CPU, which may overflow."""
        if like.device.type != "cpu":
            return self.careful(like, bias)
        assert bias is not None
        tiny, eps = torch.finfo(bias.dtype).tiny, torch.finfo(bias.dtype).eps
        # A zero would meet 1 / |z| = inf at z = 0: the least negative number gives -1 there, and no more than a
        # rounding anywhere else.
        bias = torch.where(bias == 0, -tiny * eps, bias).expand(len(like), -1).contiguous()
        ratio, below = torch.empty_like(bias), tiny * (1 - eps)

        def apply(z, saved, re, im, pairs, scale):
            torch.hypot(re, im, out=ratio)
            torch.threshold_(ratio, below, 0)
            torch.div(bias, ratio, out=ratio)
            torch.clamp(ratio, -1, STEEPEST, out=saved)
            pairs.addcmul_(pairs, scale)

        return step_by_step(apply)

    def careful(self, like: Tensor, bias: Tensor | None) -> Loop:
        assert bias is not None
        tiny = torch.finfo(like.dtype).tiny

        def apply(z, saved, re, im, pairs, _):
            modulus = torch.hypot(re, im)
            q = torch.where(modulus < tiny, -1, (bias / modulus).clamp_(-1, STEEPEST))
            saved.copy_(q)
            unit = pairs / modulus.clamp_min(tiny).unsqueeze(-2)
            # b / |z| may overflow, z / |z| + b does not.
            length = torch.where(q == -1, 0, modulus + bias)
            torch.mul(unit, length.unsqueeze(-2), out=pairs)

        return step_by_step(apply)

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

    def bias_gradient(self, h: Tensor, saved: Tensor, delta: Tensor) -> Tensor:
        """Returns the part of the gradient in the direction of h."""
        re, im = _directions(h).chunk(2, -1)
        first, second = delta.chunk(2, -1)
        # At h = 0 delta is 0.
        inverse = torch.mul(re, re).addcmul_(im, im).add_(torch.finfo(h.dtype).tiny).rsqrt_()
        return torch.mul(re, first).addcmul_(im, second).mul_(inverse)


def _directions(h: Tensor) -> Tensor:
    """Returns rows [Re h | Im h] with each pair divided by its larger modulus: squares neither overflow nor vanish."""
    pairs = h.abs()
    re, im = pairs.chunk(2, -1)
    largest = torch.maximum(re, im).clamp_min_(torch.finfo(h.dtype).tiny)
    for of, out in zip(h.chunk(2, -1), (re, im), strict=True):
        torch.div(of, largest, out=out)
    return pairs


class ModReLUEpsilon(Activation):
    """z q, q = relu(s + b) / (s + epsilon), s = (|z|^2 + epsilon)^(1/2); q is kept, and z = h / q."""

    bias_inside = True
    saved = (1, None)
    default_slope = 1e-5

    @classmethod
    def of_complex(cls) -> type[Activation]:
        return _ComplexEpsilon

    def function(self, z: Tensor, b: Tensor) -> Tensor:
        return modrelu(z, b, self.slope)

    def loop(self, like: Tensor, bias: Tensor | None) -> Loop:
        """By the modulus, in the room for q."""
        assert bias is not None
        bias, root, epsilon = bias.expand(len(like), -1), like.new_tensor(self.slope**0.5), self.slope
        size = torch.empty_like(bias, memory_format=torch.contiguous_format)

        def apply(z, saved, *parts):
            re, im, pairs, scale = parts or (z, root, z, saved)
            torch.hypot(re, im, out=size)
            if parts:
                torch.hypot(size, root, out=size)
            torch.add(size, bias, out=saved)
            torch.div(saved.clamp_(min=0), size.add_(epsilon), out=saved)
            pairs.mul_(scale)

        return step_by_step(apply)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """Returns the derivative q + (1 - q) z^2 / (s (s + epsilon))."""
        z, s = self._before(h, saved)
        return (saved + (1 - saved) * (z / s) * (z / (s + self.slope)),)

    def bias_gradient(self, h: Tensor, saved: Tensor, delta: Tensor) -> Tensor:
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


class _ComplexEpsilon(_OfPairs, ModReLUEpsilon):
    def of_rows(self, z: Tensor, b: Tensor) -> Tensor:
        return modrelu_of_parts(z.unflatten(-1, (2, -1)), b, self.slope, -2).flatten(-2)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """Returns the Jacobian q I + (1 - q) z z^T / (s (s + epsilon))."""
        z, s = self._before(h, saved)
        re, im = (z / s.repeat(*(1,) * (s.dim() - 1), 2)).chunk(2, -1)
        rest = (1 - saved) * (s / (s + self.slope))
        return torch.cat([saved + rest * re * re, saved + rest * im * im], -1), rest * re * im
