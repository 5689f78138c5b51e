"""Skew matrices of any size from their packed coordinates, and the gradient of these; a program takes a tile."""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import entry_of_skew, store_skew


@triton.jit
def _place(n, E: constexpr):
    """Returns which matrix this program works on, and rows and columns of its tile."""
    tiles = (n + E - 1) // E
    tile = tl.program_id(0) % (tiles * tiles)
    row = tile // tiles * E + tl.arange(0, E)[:, None]
    return (tl.program_id(0) // (tiles * tiles)).to(tl.int64), row, tile % tiles * E + tl.arange(0, E)[None, :]


@triton.jit(do_not_specialize=["n"])
def run_skew(v, a, shift, n, E: constexpr):
    """A + shift I in float64, (batch, n, n), from `v`, (batch, n (n - 1) / 2)."""
    matrix, row, column = _place(n, E)
    inside = (row < n) & (column < n)
    entry, _ = entry_of_skew(v + matrix * (n * (n - 1) // 2), row, column, inside, n, 1)
    entry = tl.where(row == column, shift, entry)
    tl.store(a + (matrix * n + row) * n + column, entry, mask=inside)


@triton.jit(do_not_specialize=["n"])
def run_skew_back(g, gv, scale, n, E: constexpr):
    """The entries of scale (G - G^T) below the diagonal, (batch, n (n - 1) / 2), from `g`, (batch, n, n)."""
    matrix, row, column = _place(n, E)
    inside = (row < n) & (column < row)
    ours = tl.load(g + (matrix * n + row) * n + column, mask=inside, other=0.0)
    theirs = tl.load(g + (matrix * n + column) * n + row, mask=inside, other=0.0)
    store_skew(gv + matrix * (n * (n - 1) // 2), row, column, scale * (ours - theirs), ours, n, 1)
