"""Activations of one real number: relu, tanh, abs, the identity, leaky relu and OPLU."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from stiefelkit.functional import leaky_relu, oplu
from stiefelkit.scan.activations import Activation, Loop, Views, in_place, step_by_step


class ReLU(Activation):
    """max(z, 0); the derivative is the sign of h."""

    kernel = "relu"
    function = staticmethod(torch.relu)  # type: ignore[assignment]

    def loop(self, like: Tensor, bias: Tensor | None) -> Loop:
        return in_place(partial(Tensor.clamp_min_, min=0))

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return (h.sign(),)


class Tanh(Activation):
    """tanh z; the derivative is 1 - h^2."""

    kernel = "tanh"
    function = staticmethod(torch.tanh)  # type: ignore[assignment]

    def loop(self, like: Tensor, bias: Tensor | None) -> Loop:
        return in_place(Tensor.tanh_)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return ((h * h).neg_().add_(1),)


class Abs(Activation):
    """|z|; the sign is kept."""

    kernel = "abs"
    saved = (1, torch.int8)
    function = staticmethod(torch.abs)  # type: ignore[assignment]

    def loop(self, like: Tensor, bias: Tensor | None) -> Loop:
        sign = torch.empty_like(like)

        def apply(z, saved):
            torch.sign(z, out=sign)
            saved.copy_(sign)
            z.abs_()

        return step_by_step(apply)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return (saved.to(h.dtype),)


class Identity(Activation):
    """z."""

    kernel = "identity"

    @classmethod
    def of_complex(cls) -> type[Activation]:
        return cls

    @staticmethod
    def function(z: Tensor) -> Tensor:
        return z

    def loop(self, like: Tensor, bias: Tensor | None) -> Loop:
        return in_place(Tensor.detach)

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return ()


class LeakyReLU(Activation):
    """Leaky ReLU: z where it is positive, else slope z; the sign of z is that of h."""

    kernel = "leaky_relu"
    default_slope = 0.1

    def function(self, z: Tensor) -> Tensor:
        return leaky_relu(z, self.slope)

    def loop(self, like: Tensor, bias: Tensor | None) -> Loop:
        return in_place(partial(F.leaky_relu_, negative_slope=self.slope))

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        return (torch.where(h > 0, h.new_ones(()), h.new_full((), self.slope)),)


class OPLU(Activation):
    """The pair (z_i, z_{i + n/2}) in descending order; whether it was swapped is kept."""

    kernel = "oplu"
    is_paired = True
    saved = (2, torch.int8)
    function = staticmethod(oplu)  # type: ignore[assignment]

    def loop(self, like: Tensor, bias: Tensor | None) -> Loop:
        larger = like.new_empty(like.shape[0], like.shape[1] // 2)

        def apply(z, saved, first, second):
            saved.copy_(first < second)
            torch.maximum(first, second, out=larger)
            torch.minimum(first, second, out=second)
            first.copy_(larger)

        return step_by_step(apply)

    def views(self, z: Tensor, saved: Tensor) -> list[Views]:
        return list(zip(*(part.unbind(0) for part in (z, saved, *z.chunk(2, -1))), strict=True))

    def factors(self, h: Tensor, saved: Tensor) -> tuple[Tensor, ...]:
        turned = saved.to(h.dtype)
        return (1 - turned).repeat(1, 1, 2), turned
