"""Sparse gradients, as `torch.nn.Embedding(sparse=True)` gives them, which maps do not read."""

from typing import Any

from torch import Tensor

from stiefelkit.functional._function import Function

__all__ = ["with_dense_gradient"]


def with_dense_gradient(w: Tensor) -> Tensor:
    """Returns W itself, whose gradient, if it comes sparse, is passed on as a dense one."""
    return _Dense.apply(w)  # type: ignore[return-value]


class _Dense(Function):
    @staticmethod
    def forward(w: Tensor) -> Tensor:  # type: ignore[override]
        return w.view_as(w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g.to_dense() if g.is_sparse else g

    @staticmethod
    def tangent(ctx: Any, t: Tensor) -> Tensor:  # type: ignore[override]
        return t.view_as(t)
