"""Functions that programs share: products in scratch memory, entries of packed or complex matrices; skew matrices."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def add_product(
    c, a, b, out,
    SCALE: constexpr, SIGN: constexpr, N: constexpr, T: constexpr, K: constexpr, SIZE: constexpr,
    TURNED: constexpr = False,
):  # fmt: skip
    """OUT = SIGN C + SCALE A B of SIZE rows, N numbers apart, in tiles of T, or A^T B if it is TURNED.

    C is not read if SIGN is 0. OUT may be C, and is neither A nor B.
    """
    down: constexpr = 1 if TURNED else N
    across: constexpr = N if TURNED else 1
    line = tl.arange(0, T)
    strip = tl.arange(0, K)
    for i in range(0, SIZE, T):
        for j in range(0, SIZE, T):
            here = (i + line)[:, None] * N + (j + line)[None, :]
            total = tl.full((T, T), 0.0, dtype=out.dtype.element_ty)
            for k in range(0, SIZE, K):
                left = tl.load(a + (i + line)[:, None] * down + (k + strip)[None, :] * across)
                right = tl.load(b + (k + strip)[:, None] * N + (j + line)[None, :])
                total = tl.dot(left, right, total, input_precision="ieee", out_dtype=out.dtype.element_ty)
            total = SCALE * total
            if SIGN != 0:
                total += SIGN * tl.load(c + here)
            tl.store(out + here, total)
    tl.debug_barrier()


@triton.jit
def tile_of(tile, N: constexpr, E: constexpr):
    """Returns rows (E, 1) and columns (1, E) of one of the (N / E)^2 tiles of a matrix."""
    line = tl.arange(0, E)
    return (tile // (N // E) * E + line)[:, None], (tile % (N // E) * E + line)[None, :]


@triton.jit
def fill_skew(v, m, n, SHIFT: constexpr, SIGN: constexpr, PARTS: constexpr, N: constexpr, E: constexpr):
    """M = SHIFT I + SIGN A of packed coordinates, padded by SHIFT I."""
    for tile in range((N // E) ** 2):
        row, column = tile_of(tile, N, E)
        inside = (row < n * PARTS) & (column < n * PARTS)
        re, im = entry_of_skew(
            v, tl.where(row < n, row, row - n), tl.where(column < n, column, column - n), inside, n, PARTS
        )
        entry = SIGN * of_parts(re, im, row >= n, column >= n)
        tl.store(m + row * N + column, tl.where(row == column, entry + SHIFT, entry))
    tl.debug_barrier()


@triton.jit
def store_skew(gv, row, column, re, im, n, PARTS: constexpr):
    """Writes to packed coordinates their gradient by entries of a matrix that is skew."""
    if PARTS == 1:
        tl.store(gv + row * (row - 1) // 2 + column, re, mask=(row < n) & (column < row))
    else:
        im = tl.where(row == column, 0.5 * im, im)
        tl.store(gv + row * n + column, tl.where(row > column, re, im), mask=(row < n) & (column < n))


@triton.jit
def entry_of_skew(v, i, j, inside, n, PARTS: constexpr):
    """Returns real and imaginary parts of a skew matrix at i, j, in float64, from its packed coordinates."""
    high = tl.maximum(i, j)
    low = tl.minimum(i, j)
    if PARTS == 1:
        re = tl.load(v + high * (high - 1) // 2 + low, mask=inside & (i != j), other=0.0).to(tl.float64)
        im = re * 0.0
    else:
        re = tl.load(v + high * n + low, mask=inside & (i != j), other=0.0).to(tl.float64)
        im = tl.load(v + low * n + high, mask=inside, other=0.0).to(tl.float64)
    return tl.where(i > j, re, -re), im


@triton.jit
def of_parts(re, im, in_lower, in_right):
    """Returns the entry of [[Re, -Im], [Im, Re]] in a lower or upper, right or left block."""
    return tl.where(in_lower == in_right, re, tl.where(in_lower, im, -im))


@triton.jit
def entry_of(m, row, column, n, p, PARTS: constexpr):
    """Returns the entries of [[Re, -Im], [Im, Re]] of a matrix (n, p, PARTS), and zeros beyond."""
    inside = (row < n * PARTS) & (column < p * PARTS)
    at = m + (tl.where(row < n, row, row - n) * p + tl.where(column < p, column, column - p)) * PARTS
    value = tl.load(at, mask=inside, other=0.0)
    if PARTS == 2:
        value = of_parts(value, tl.load(at + 1, mask=inside, other=0.0), row >= n, column >= p)
    return value


@triton.jit
def load_parts(x, inside, PARTS: constexpr):
    """Returns real and imaginary parts of numbers in float64, the real ones twice if there are no others."""
    re = tl.load(x, mask=inside, other=0.0).to(tl.float64)
    im = re
    if PARTS == 2:
        im = tl.load(x + 1, mask=inside, other=0.0).to(tl.float64)
    return re, im


@triton.jit
def store_parts(x, re, im, inside, PARTS: constexpr):
    tl.store(x, re, mask=inside)
    if PARTS == 2:
        tl.store(x + 1, im, mask=inside)


@triton.jit
def times(a_re, a_im, b_re, b_im):
    """Returns real and imaginary parts of a product."""
    return a_re * b_re - a_im * b_im, a_re * b_im + a_im * b_re


@triton.jit
def plus(a, b):
    """Returns what a reduction sums by: tl.sum is compiled, also where programs are interpreted."""
    return a + b


@triton.jit
def _place(n, E: constexpr):
    """Returns which matrix of any size this program works on, and rows and columns of its tile."""
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
