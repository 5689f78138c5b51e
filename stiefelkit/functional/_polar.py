"""The orthogonal polar factor, with its exact derivative."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from stiefelkit.functional._function import Function
from stiefelkit.functional._polish import nearest_frame

__all__ = ["polar_factor"]


def polar_factor(x: Tensor, *, well_conditioned: bool = False) -> Tensor:
    r"""Returns the frame Q of X = Q H with H Hermitian and positive: the frame nearest to X.

    The derivative is dQ = Q Z + (I - Q Q^H) dX H^-1, where the skew Z solves H Z + Z H = Q^H dX - dX^H Q; it is finite
    wherever X has full rank, also at repeated singular values. Once differentiable; asked twice, it raises.

    Args:
        x: matrices of shape (*, n, p), n >= p, float64 or complex128, of full column rank.
        well_conditioned: says that the condition of X is below about 1e6; Q then comes from the p x p eigenvectors of
            X^H X instead of an SVD, and no value is branched on.

    Returns:
        Frames of the same shape and dtype.

    References:
        Higham, Functions of matrices, 2008, chapter 8.
    """
    return _Polar.apply(x, well_conditioned)  # type: ignore[return-value]


class _Polar(Function):
    @staticmethod
    def forward(x: Tensor, well_conditioned: bool) -> Tensor:  # type: ignore[override]
        if not well_conditioned:
            return nearest_frame(x)
        squares, v = torch.linalg.eigh(x.mH @ x)
        return x @ (v * squares.rsqrt().unsqueeze(-2)) @ v.mH

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        x, q = ctx.saved_tensors
        h = q.mH @ x
        s, v = torch.linalg.eigh((h + h.mH) / 2)
        along = q.mH @ g
        skew = v.mH @ (along - along.mH) @ v
        z = v @ (skew / (s.unsqueeze(-1) + s.unsqueeze(-2))) @ v.mH
        across = (g - q @ along) @ (v / s.unsqueeze(-2)) @ v.mH
        return q @ z + across, None
