"""Matrices of a chart as buffers."""

import torch
from torch import Tensor

from stiefelkit.param import coordinate_dtype

__all__ = ["are_signs", "from_buffer", "identity_buffer", "to_buffer"]


def are_signs(choice: Tensor) -> bool:
    """Whether every entry is 1 or -1; no bool is."""
    return choice.dtype != torch.bool and bool(((choice == 1) | (choice == -1)).all())


def to_buffer(matrix: Tensor) -> Tensor:
    """A real tensor, [Re, Im] last if the matrix is complex: `.to(torch.bfloat16)` would drop an imaginary part."""
    return (torch.view_as_real(matrix) if matrix.is_complex() else matrix).clone()


def from_buffer(stored: Tensor, is_complex: bool) -> Tensor:
    """The matrix in float64 or complex128."""
    return torch.view_as_complex(stored.double().contiguous()) if is_complex else stored.double()


def identity_buffer(batch: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """The identity for frames of a dtype, as a buffer of shape (*, n, n) or (*, n, n, 2)."""
    kind = torch.complex128 if dtype.is_complex else torch.float64
    eye = torch.eye(n, dtype=kind, device="cpu").expand(*batch, n, n)
    return to_buffer(eye).to(device=device, dtype=coordinate_dtype(dtype))
