"""Matrices of a chart as buffers."""

import torch
from torch import Tensor

from stiefelkit.dtypes import coordinate_dtype, working_dtype

__all__ = ["from_buffer", "identity_buffer", "to_buffer"]


def to_buffer(matrix: Tensor) -> Tensor:
    """A real tensor, [Re, Im] last if the matrix is complex: `.to(torch.bfloat16)` would drop an imaginary part."""
    return (torch.view_as_real(matrix) if matrix.is_complex() else matrix).clone()


def from_buffer(stored: Tensor, is_complex: bool) -> Tensor:
    """The matrix in float64 or complex128."""
    return torch.view_as_complex(stored.double().contiguous()) if is_complex else stored.double()


def identity_buffer(batch: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """The identity for frames of a dtype, as a buffer of shape (*, n, n) or (*, n, n, 2)."""
    eye = torch.eye(n, dtype=working_dtype(dtype), device="cpu").expand(*batch, n, n)
    return to_buffer(eye).to(device=device, dtype=coordinate_dtype(dtype))
