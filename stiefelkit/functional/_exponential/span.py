r"""Exponentials of skew matrices of low rank, on the span that they map into itself.

A = [[A11, -A21^H], [A21, 0]] maps the span of the first p unit vectors and of the columns of A21 into itself. With any
invertible C and B = [[I, 0], [0, Z]], Z = A21 C^-1, it does so by A B = B M, M = [[A11, -A21^H Z], [C, 0]], so that
exp(A) B = B exp(M). The Cholesky factor C of I + A21^H A21 makes M nearly skew.
"""

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["on_span", "whole"]


def whole(a11: Tensor, a21: Tensor) -> Tensor:
    """Returns a itself, shape (*, n, n), from its blocks of shape (*, p, p) and (*, n - p, p)."""
    zero = a11.new_zeros(*a11.shape[:-2], a21.shape[-2], a21.shape[-2])
    return torch.cat([torch.cat([a11, a21], dim=-2), torch.cat([-a21.mH, zero], dim=-2)], dim=-1)


def on_span(
    a11: Tensor, a21: Tensor, times: Callable[[Tensor, Tensor], Tensor] = torch.matmul
) -> tuple[Tensor, Tensor, Tensor]:
    """M of shape (*, 2p, 2p), Z of shape (*, n, p), and C, on which exp(A) does not depend: a constant to derivatives.

    Args:
        a11: skew matrices, shape (*, p, p), float64 or complex128.
        a21: matrices of shape (*, n, p).
        times: the product of two matrices.
    """
    # no_grad would leave forward derivatives.
    constant = a21.detach()
    gram = times(constant.mH, constant)
    shift = 1 + 1e-14 * gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)[..., None, None]
    eye = torch.eye(a11.shape[-1], dtype=a11.dtype, device=a11.device)
    c = torch.linalg.cholesky_ex(gram + shift * eye, upper=True)[0]
    z = torch.linalg.solve_triangular(c, a21, upper=True, left=False)
    right = torch.cat([-times(a21.mH, z), torch.zeros_like(c)], dim=-2)
    return torch.cat([torch.cat([a11, c], dim=-2), right], dim=-1), z, c
