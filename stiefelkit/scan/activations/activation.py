"""Activations in place, and their derivatives from what they leave behind: the hidden states and little else.

A pre-activation is a row of N real numbers; complex ones are [Re | Im]. The derivative of an activation is a diagonal
(or the identity), or, where the two halves of a row are pairs, a symmetric 2 x 2 matrix for each pair.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.functional._activations import split_activation

__all__ = ["Pointwise", "activate", "saved_like"]

Step = Callable[..., object]
"""Turns z (batch, N) into h in place, and writes what the derivative needs besides h; takes a row of `views`."""

ILL = 1e9
"""A complex bias over the modulus above which the square of the modulus may have underflowed."""
STEEPEST = 1e18
"""The largest ratio of a complex bias to the modulus whose derivative is told apart."""


class Pointwise(ABC):
    """An activation.

    Args:
        n: units of the state.
        bias: real bias of shape (n,), only of activations that have it inside.
        slope: of those that have one.
    """

    saved: ClassVar[tuple[int, torch.dtype | None] | None] = None
    """What is kept besides the states: so many numbers per n units as a divisor, and their dtype (None: that of z)."""

    def __init__(self, n: int, bias: Tensor | None, slope: float):
        self.n, self.bias, self.slope = n, bias, slope

    @abstractmethod
    def step(self, batch: int, like: Tensor) -> Step:
        """The activation of rows (batch, N)."""

    def views(self, z: Tensor, saved: Tensor) -> list[tuple[Tensor, ...]]:
        """What `step` takes at each step of a chunk: z (batch, N) first, and the room for what is saved."""
        return list(zip(z.unbind(0), saved.unbind(0), strict=True))

    @abstractmethod
    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        """The derivative over a chunk of states (k, batch, N).

        Nothing for the identity; the diagonal (k, batch, N); or the diagonal and the other diagonal (k, batch, N/2).
        """

    def bias_gradient(self, h: Tensor, delta: Tensor) -> Tensor:
        """Sum over rows of the gradient by the bias, from states and gradients by z, both (rows, N)."""
        raise NotImplementedError

    def is_ill(self, saved: Tensor) -> bool:
        """Whether `step` was not accurate on this chunk, and `careful` has to take its place."""
        return False

    def careful(self, batch: int, like: Tensor) -> Step:
        """`step`, slower and accurate for every z."""
        return self.step(batch, like)


class Identity(Pointwise):
    """z."""

    def step(self, batch: int, like: Tensor) -> Step:
        return lambda z, saved: None

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return ()


class Tanh(Pointwise):
    """tanh z."""

    def step(self, batch: int, like: Tensor) -> Step:
        return lambda z, saved: torch.tanh(z, out=z)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return ((h * h).neg_().add_(1),)


class Relu(Pointwise):
    """max(z, 0)."""

    def step(self, batch: int, like: Tensor) -> Step:
        return lambda z, saved: z.clamp_min_(0)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return (h.sign(),)


class LeakyRelu(Pointwise):
    """z where it is positive, else slope z; the sign of z is that of h."""

    def step(self, batch: int, like: Tensor) -> Step:
        return lambda z, saved: torch.nn.functional.leaky_relu_(z, self.slope)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return (torch.where(h > 0, h.new_ones(()), h.new_full((), self.slope)),)


class Abs(Pointwise):
    """|z|; the sign is kept."""

    saved = (1, torch.int8)

    def step(self, batch: int, like: Tensor) -> Step:
        sign = torch.empty_like(like)

        def apply(z: Tensor, saved: Tensor) -> None:
            torch.sign(z, out=sign)
            saved.copy_(sign)
            z.abs_()

        return apply

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return (saved.to(h.dtype),)


class Oplu(Pointwise):
    """The pair (z_i, z_{i + n/2}) in falling order; whether it was turned is kept."""

    saved = (2, torch.int8)

    def step(self, batch: int, like: Tensor) -> Step:
        larger = like.new_empty(batch, self.n // 2)

        def apply(z: Tensor, saved: Tensor, first: Tensor, second: Tensor) -> None:
            saved.copy_(first < second)
            torch.maximum(first, second, out=larger)
            torch.minimum(first, second, out=second)
            first.copy_(larger)

        return apply

    def views(self, z: Tensor, saved: Tensor) -> list[tuple[Tensor, ...]]:
        return list(zip(*(part.unbind(0) for part in (z, saved, *z.chunk(2, -1))), strict=True))

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        turned = saved.to(h.dtype)
        return (1 - turned).repeat(1, 1, 2), turned


class ModRelu(Pointwise):
    """sign(z) relu(|z| + b): z less the part of it that lies in [b, -b]; where b > 0, z + b sign(z)."""

    def __init__(self, n: int, bias: Tensor | None, slope: float):
        super().__init__(n, bias, slope)
        assert bias is not None
        self.low = bias.clamp(max=0)
        rises = bias.device.type != "cpu" or bool((bias > 0).any())
        self.rise = bias.clamp(min=0) if rises else None

    def step(self, batch: int, like: Tensor) -> Step:
        low = self.low.expand(batch, -1).contiguous()
        high, part = -low, torch.empty_like(low)
        if self.rise is None:

            def falling(z: Tensor, saved: Tensor) -> None:
                torch.clamp(z, low, high, out=part)
                z.sub_(part)

            return falling
        rise = self.rise.expand(batch, -1).contiguous()

        def mixed(z: Tensor, saved: Tensor) -> None:
            torch.clamp(z, low, high, out=part)
            z.sub_(part)
            torch.sign(z, out=part)
            z.addcmul_(part, rise)

        return mixed

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return (h.sign().abs_(),)

    def bias_gradient(self, h: Tensor, delta: Tensor) -> Tensor:
        return h.sign().mul_(delta).sum(0)


class ComplexModRelu(Pointwise):
    """z (1 + q), q = max(b / |z|, -1), and 0 at z = 0; q is kept."""

    saved = (1, None)

    def __init__(self, n: int, bias: Tensor | None, slope: float):
        super().__init__(n, bias, slope)
        assert bias is not None
        # A bias of zero would meet 1 / |z| = inf at z = 0; one that is tiny and negative gives q = -1 there, else 0.
        self.bias = torch.where(bias == 0, -torch.finfo(bias.dtype).tiny, bias)

    def step(self, batch: int, like: Tensor) -> Step:
        assert self.bias is not None
        if like.device.type != "cpu":
            return self.careful(batch, like)
        bias = self.bias.expand(batch, -1).contiguous()
        ratio = torch.empty_like(bias)

        def apply(z: Tensor, saved: Tensor, re: Tensor, im: Tensor, pairs: Tensor, scale: Tensor) -> None:
            torch.mul(re, re, out=ratio)
            ratio.addcmul_(im, im).rsqrt_().mul_(bias)
            torch.clamp_min(ratio, -1, out=saved)
            pairs.addcmul_(pairs, scale)

        return apply

    def views(self, z: Tensor, saved: Tensor) -> list[tuple[Tensor, ...]]:
        parts = (z, saved, *z.chunk(2, -1), z.unflatten(-1, (2, -1)), saved.unsqueeze(-2))
        return list(zip(*(part.unbind(0) for part in parts), strict=True))

    def careful(self, batch: int, like: Tensor) -> Step:
        tiny = torch.finfo(like.dtype).tiny

        def apply(z: Tensor, saved: Tensor, re: Tensor, im: Tensor, pairs: Tensor, scale: Tensor) -> None:
            modulus = torch.hypot(re, im)
            q = torch.where(modulus < tiny, -1, (self.bias / modulus).clamp_(-1, STEEPEST))
            saved.copy_(q)
            unit = pairs / modulus.clamp_min(tiny).unsqueeze(-2)
            # b / |z| may overflow, z / |z| + b does not.
            length = torch.where(q == -1, 0, modulus + self.bias)
            torch.mul(unit, length.unsqueeze(-2), out=pairs)

        return apply

    def is_ill(self, saved: Tensor) -> bool:
        # Zeros whose bias is positive have given inf, and NaN a step later.
        return saved.device.type == "cpu" and saved.numel() > 0 and not bool(saved.amax() <= ILL)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        # The Jacobian of z (1 + b / |z|) is (1 + q) I - q e e^T, e = h / |h|: 1 + q (Im e)^2, 1 + q (Re e)^2 and
        # -q Re e Im e. With the smallest normal number added to both squares and to their sum, h = 0 gives 1 + q = 0.
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
        re, im = h.chunk(2, -1)
        first, second = delta.chunk(2, -1)
        # At h = 0 delta is 0.
        inverse = torch.mul(re, re).addcmul_(im, im).add_(torch.finfo(h.dtype).tiny).rsqrt_()
        return torch.mul(re, first).addcmul_(im, second).mul_(inverse).sum(0)


KINDS: dict[str, type[Pointwise]] = {
    "identity": Identity,
    "tanh": Tanh,
    "relu": Relu,
    "leaky_relu": LeakyRelu,
    "abs": Abs,
    "oplu": Oplu,
    "modrelu": ModRelu,
}


def activate(name: str, n: int, bias: Tensor | None, is_complex: bool) -> Pointwise:
    """The activation of that name, for real rows or for [Re | Im]."""
    kind, slope = split_activation(name)
    cls = ComplexModRelu if is_complex and kind == "modrelu" else KINDS[kind]
    return cls(n, bias, slope)


def saved_like(name: str, n: int, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Width and dtype of what is kept for each row besides the states; width 0 for nothing."""
    kind, _ = split_activation(name)
    cls: Any = ComplexModRelu if dtype.is_complex and kind == "modrelu" else KINDS[kind]
    if cls.saved is None:
        return 0, dtype.to_real()
    share, kept = cls.saved
    return n // share, dtype.to_real() if kept is None else kept
