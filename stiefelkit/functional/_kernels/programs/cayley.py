"""Small Cayley maps and their gradients."""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import add_product, entry_of, fill_skew, of_parts, store_parts, store_skew, tile_of, times


@triton.jit
def _invert_leaf(m, x, N: constexpr, SIZE: constexpr):
    """X = M^-1 of SIZE rows, N numbers apart, by Gauss-Jordan elimination in place, without pivoting."""
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    line = tl.arange(0, SIZE)
    at = row * N + column
    values = tl.load(m + at)
    tl.store(x + at, values, mask=(row == 0) | (column == 0))
    tl.debug_barrier()
    for k in tl.range(SIZE, num_stages=1):
        across = tl.load(x + k * N + line)
        down = tl.load(x + line * N + k)
        inverse = 1.0 / tl.load(x + k * N + k)
        tl.debug_barrier()
        scaled = tl.where(line == k, inverse, across * inverse)
        down = tl.where(line == k, 0.0, down)
        rest = tl.where(column == k, 0.0, values) - down[:, None] * scaled[None, :]
        values = tl.where(row == k, scaled[None, :], rest)
        tl.store(x + at, values, mask=(row == k + 1) | (column == k + 1))
        tl.debug_barrier()
    tl.store(x + at, values)
    tl.debug_barrier()


@triton.jit
def invert(m, x, r, N: constexpr, T: constexpr, K: constexpr):
    """M <- M^-1 of N rows with Hermitian part at least I, by 2 x 2 blocks and a Newton step; overwrites X and R."""
    if N == T:
        _invert_leaf(m, x, N, T)
    else:
        # [[P, B], [C, D]], S = D - C P^-1 B.
        upper: constexpr = T
        lower: constexpr = T * N
        last: constexpr = T * N + T
        _invert_leaf(m, x, N, T)
        add_product(m, m + lower, x, r + lower, 1.0, 0.0, N, T, K, T)
        add_product(m, x, m + upper, r + upper, 1.0, 0.0, N, T, K, T)
        add_product(m + last, r + lower, m + upper, r + last, -1.0, 1.0, N, T, K, T)
        _invert_leaf(r + last, x + last, N, T)
        add_product(m, r + upper, x + last, x + upper, -1.0, 0.0, N, T, K, T)
        add_product(m, x + last, r + lower, x + lower, -1.0, 0.0, N, T, K, T)
        add_product(x, x + upper, r + lower, x, -1.0, 1.0, N, T, K, T)
    # R = X - X (M X) is what the step adds.
    add_product(m, m, x, r, 1.0, 0.0, N, T, K, N)
    add_product(x, x, r, m, -1.0, 2.0, N, T, K, N)


@triton.jit
def _diagonal(d, at, inside, PARTS: constexpr):
    """Returns parts of entries of D, in float64: 1 or -1 of a sign of any dtype, 0 read as 1, and 1 of no signs."""
    if d is None:
        re = at * 0.0 + tl.full((1, 1), 1.0, dtype=tl.float64)
        im = re * 0.0
    elif PARTS == 2:
        re = tl.load(d + at, mask=inside, other=0.0)
        im = tl.load(d + at + 1, mask=inside, other=0.0)
    else:
        sign = tl.load(d + at, mask=inside, other=1).to(tl.float64) + 0.5
        re = sign / tl.abs(sign)
        im = re * 0.0
    return re, im


@triton.jit
def _with_diagonal(m, d, entries, row, column, n, PARTS: constexpr, N: constexpr):
    """Returns parts of entries of -D M / 2."""
    inside = (row < n) & (column < n)
    d_re, d_im = _diagonal(d, entries + row * PARTS, row < n, PARTS)
    re = tl.load(m + row * N + column, mask=inside, other=0.0)
    im = re * 0.0
    if PARTS == 2:
        im = tl.load(m + (row + n) * N + column, mask=inside, other=0.0)
    return times(re, im, (d_re * -0.5).to(re.dtype), (d_im * -0.5).to(re.dtype))


@triton.jit(do_not_specialize=["apart", "n", "batch"])
def run_forward(
    v, d, w, scratch, apart, n, batch, PARTS: constexpr, N: constexpr, T: constexpr, K: constexpr, E: constexpr
):
    """W = (2 (I + A)^-1 - I) D, rounded once.

    `v` are packed coordinates (batch, n (n - 1) / 2), or (batch, n n) of a complex A; `d` signs, None of them, or
    entries of D, float64 (n, 2), of complex matrices, those of the next one so many numbers `apart`, or the same; `w`
    frames (batch, n, n, PARTS); `scratch` float64 (programs, 3, N, N). N, a power of two, pads n PARTS; tiles of
    products have T rows and K columns, those of what is no product E rows.
    """
    size = n * (n - 1) // 2 if PARTS == 1 else n * n
    m = scratch + tl.program_id(0).to(tl.int64) * 3 * N * N
    x = m + N * N
    r = x + N * N
    for matrix in tl.range(tl.program_id(0).to(tl.int64), batch, tl.num_programs(0), num_stages=1):
        fill_skew(v + matrix * size, m, n, 1.0, 1.0, PARTS, N, E)
        invert(m, x, r, N, T, K)
        for tile in range((N // E) ** 2):
            row, column = tile_of(tile, N, E)
            inside = (row < n) & (column < n)
            out = w + (matrix * n * n + row * n + column) * PARTS
            re = 2.0 * tl.load(m + row * N + column, mask=inside, other=0.0)
            re = tl.where(row == column, re - 1.0, re)
            im = re * 0.0
            if PARTS == 2:
                im = 2.0 * tl.load(m + (row + n) * N + column, mask=inside, other=0.0)
            d_re, d_im = _diagonal(d, matrix * apart + column * PARTS, column < n, PARTS)
            re, im = times(re, im, d_re, d_im)
            store_parts(out, re, im, inside, PARTS)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["apart", "n", "batch"])
def run_backward(
    w, g, d, gv, scratch, apart, n, batch, PARTS: constexpr, N: constexpr, T: constexpr, K: constexpr, E: constexpr
):
    """The gradient of packed coordinates from W and that of W: of M = -D (W + D)^H G (W + D)^H / 2 what is skew.

    `w` are frames (batch, n, n, PARTS), float64 or float32, which is what all is worked out in; `g` gradients by them,
    of any dtype; `gv` the gradient (batch, n (n - 1) / 2), or (batch, n n); `scratch` is of the dtype of W. The others
    are as in `run_forward`.
    """
    size = n * (n - 1) // 2 if PARTS == 1 else n * n
    adjoint = scratch + tl.program_id(0).to(tl.int64) * 3 * N * N
    inner = adjoint + N * N
    between = inner + N * N
    for matrix in tl.range(tl.program_id(0).to(tl.int64), batch, tl.num_programs(0), num_stages=1):
        place = matrix * n * n * PARTS
        for tile in range((N // E) ** 2):
            row, column = tile_of(tile, N, E)
            on_diagonal = (row < n * PARTS) & (column < n * PARTS) & (row % n == column % n)
            d_re, d_im = _diagonal(d, matrix * apart + row % n * PARTS + column * 0, on_diagonal, PARTS)
            # The adjoint of a matrix is what it is as a real one, transposed.
            entry = tl.where(on_diagonal, of_parts(d_re, d_im, column >= n, row >= n), 0.0)
            value = entry_of(w + place, column, row, n, n, PARTS)
            tl.store(adjoint + row * N + column, value + entry.to(value.dtype))
            tl.store(between + row * N + column, entry_of(g + place, row, column, n, n, PARTS))
        tl.debug_barrier()
        add_product(between, adjoint, between, inner, 1.0, 0.0, N, T, K, N)
        add_product(inner, inner, adjoint, between, 1.0, 0.0, N, T, K, N)
        for tile in range((N // E) ** 2):
            row, column = tile_of(tile, N, E)
            re, im = _with_diagonal(between, d, matrix * apart, row, column, n, PARTS, N)
            other_re, other_im = _with_diagonal(between, d, matrix * apart, column, row, n, PARTS, N)
            store_skew(gv + matrix * size, row, column, re - other_re, im + other_im, n, PARTS)
        tl.debug_barrier()
