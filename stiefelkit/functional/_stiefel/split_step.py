r"""The split step of Kong, Wang and Tao along the Stiefel manifold, and what it does to a momentum.

A frame moves along -U, U = W Omega + P, first within its columns, W1 = W R, R = (I + t Omega / 2)^-1 (I - t Omega / 2),
then out of them, W' = (W1 - t P) (I + E)^(-1/2), E = t^2 P^H P. A momentum W Y + V, V^H W = 0, keeps its Y, in the
columns of the new frame, and of V is kept what is normal to W', V + t W' (I + E)^(-1/2) P^H V; a V along P gets back
the length that it loses by that, which is a factor of (I + E)^(1/2).
"""

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._arithmetic.reads import reads_are_free
from stiefelkit.functional._cayley.quotient import quotient_of_skew
from stiefelkit.functional._stiefel.polar_step import inverse_root_less_one
from stiefelkit.functional._stiefel.tangents import Tangent
from stiefelkit.metrics import working_dtype

_LONG = 1e6
"""Factor from which a float32 transform is worked out in float64."""


def turn(direction: Tangent, step: float | Tensor) -> Tensor:
    """Returns R - I, to relative rounding; of long steps in float64, which has the range for them."""
    a = direction.rotation
    if isinstance(step, Tensor):
        return quotient_of_skew(a * step, 0.5, [], None)
    if not reads_are_free(a):
        return quotient_of_skew(a, 0.5 * step, [], None)
    if not any(direction.rotation_norms):  # as of one real column
        return torch.zeros_like(a)
    wide = a.to(working_dtype(a.dtype)) if step > _LONG else a
    return quotient_of_skew(wide, 0.5 * step, direction.rotation_norms, None).to(a.dtype)


def split_increment(
    w: Tensor, direction: Tangent, step: float | Tensor, *, defect: Tensor | None = None, unscaled: bool = False
) -> Tensor:
    """Returns what is to be added to W to move it by -step along a tangent vector.

    A defect as in `cayley_increment`; unscaled is without (I + E)^(-1/2), for a polar factor that follows.
    """
    along = turn(direction, step)
    if direction.rest is None:
        return w @ (along if defect is None else along.add_(defect, alpha=-0.5))
    rest = direction.rest * step
    if unscaled:
        return w @ along - rest
    square = rest.mH @ rest
    less = inverse_root_less_one(square if defect is None else square + defect)
    along = plus_product(along + less, along, less)
    return plus_product(w @ along, rest, less, -1).sub_(rest)


def carried_momentum(
    moved: Tensor, direction: Tangent, step: float | Tensor, momentum: Tangent, share: float
) -> Tensor:
    """Returns share W' Y + V', what becomes of a momentum Y and V by such a step, whose end W' is `moved`.

    One that is the direction itself keeps its length.
    """
    within = momentum.rotation * share
    if direction.rest is None or momentum.rest is None:
        return moved @ within
    rest = direction.rest * step
    square = rest.mH @ rest
    less = inverse_root_less_one(square)
    inner = rest.mH @ momentum.rest
    inner = plus_product(inner, less, inner)
    if momentum is not direction:
        return plus_product(momentum.rest, moved, within + inner)
    lengthened = square + plus_product(less, square, less)  # (I + E)^(1/2) - I
    within = within + plus_product(inner, inner, lengthened)
    return plus_product(plus_product(momentum.rest, momentum.rest, lengthened), moved, within)


def leapt_momentum(w: Tensor, moved: Tensor, direction: Tangent, step: float | Tensor, share: float) -> Tensor:
    """The same for a momentum that is the direction itself, of any length, in the dtype of W', which is a wide one.

    V' = (V + t W1 V^H V) (I + t^2 V^H V)^(-1/2), from which nothing cancels.
    """
    within = moved @ (direction.rotation.to(moved.dtype) * share)
    if direction.rest is None:
        return within
    first = w.to(moved.dtype) + w.to(moved.dtype) @ turn(direction, step).to(moved.dtype)
    rest, step = direction.rest.to(moved.dtype), step.to(moved.real.dtype) if isinstance(step, Tensor) else step
    _, sizes, vectors = torch.linalg.svd(rest, full_matrices=False)
    sizes = sizes.unsqueeze(-2)
    shrunk = torch.hypot(torch.ones_like(sizes), step * sizes).reciprocal()
    turned = rest @ vectors.mH * shrunk + first @ vectors.mH * (step * sizes * shrunk * sizes)
    return within + turned @ vectors
