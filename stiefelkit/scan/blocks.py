"""Complex rows as real ones, [Re | Im], and the matrices that act on them."""

import functools

import torch
from torch import Tensor


def matrix_blocks(m: Tensor) -> Tensor:
    """Returns the real matrix by which rows [Re h | Im h] become those of h m^T, shape (2 columns, 2 rows)."""
    re, im = m.real.mT, m.imag.mT
    return torch.cat([torch.cat([re, im], 1), torch.cat([-im, re], 1)])


def row_blocks(rows: Tensor) -> Tensor:
    """Returns [Re | Im] of rows (*, n): a new contiguous tensor (*, 2n); real rows as they are."""
    return torch.cat([rows.real, rows.imag], -1) if rows.is_complex() else rows.contiguous()


def from_blocks(rows: Tensor) -> Tensor:
    """Undoes `row_blocks`, for complex rows."""
    return torch.complex(*rows.chunk(2, -1))


def read_blocks(rows: Tensor, blocks: Tensor) -> Tensor:
    """Writes complex rows (*, n) into `blocks` (*, 2n), which is contiguous."""
    numbers = torch.view_as_real(rows.resolve_conj())
    if numbers.is_contiguous():
        # A gather of columns takes half the time of a strided copy.
        order = _real_first(rows.shape[-1], rows.device)
        torch.index_select(numbers.view(-1, 2 * rows.shape[-1]), 1, order, out=blocks.view(-1, blocks.shape[-1]))
    else:
        blocks.unflatten(-1, (2, -1)).copy_(numbers.transpose(-1, -2))
    return blocks


@functools.lru_cache(maxsize=32)
def _real_first(n: int, device: torch.device) -> Tensor:
    return torch.arange(2 * n, device=device).view(n, 2).mT.flatten()


def fold(g: Tensor) -> Tensor:
    """Returns the gradient by a complex m from g = d^T h, both [Re | Im], d behind m."""
    n, k = g.shape[0] // 2, g.shape[1] // 2
    return torch.complex(g[:n, :k] + g[n:, k:], g[n:, :k] - g[:n, k:])
