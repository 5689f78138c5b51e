"""Small Cayley maps and their gradients."""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import add_product, entry_of_skew, of_parts


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
    """Returns the entry of D at a place, in float64: 1 or -1 of a sign of any dtype, 0 read as 1, and 1 of no signs."""
    if d is None:
        value = at * 0.0 + tl.full((1, 1), 1.0, dtype=tl.float64)
    elif PARTS == 2:
        value = tl.load(d + at, mask=inside, other=0.0)
    else:
        sign = tl.load(d + at, mask=inside, other=1).to(tl.float64) + 0.5
        value = sign / tl.abs(sign)
    return value


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
    line = tl.arange(0, E)
    turns = (batch - 1 - tl.program_id(0)) // tl.num_programs(0) + 1
    for index in tl.range(turns, num_stages=1):
        matrix = tl.program_id(0).to(tl.int64) + index * tl.num_programs(0)
        for i in range(0, N, E):
            for j in range(0, N, E):
                row = (i + line)[:, None]
                column = (j + line)[None, :]
                in_lower = row >= n
                in_right = column >= n
                inside = (row < n * PARTS) & (column < n * PARTS)
                a = row - n * in_lower.to(tl.int32)
                b = column - n * in_right.to(tl.int32)
                re, im = entry_of_skew(v + matrix * size, a, b, inside, n, PARTS)
                entry = of_parts(re, im, in_lower, in_right) if PARTS == 2 else re
                tl.store(m + row * N + column, tl.where(row == column, entry + 1.0, entry))
        tl.debug_barrier()
        invert(m, x, r, N, T, K)
        for i in range(0, N, E):
            for j in range(0, N, E):
                row = (i + line)[:, None]
                column = (j + line)[None, :]
                inside = (row < n) & (column < n)
                out = w + matrix * n * n * PARTS + (row * n + column) * PARTS
                re = 2.0 * tl.load(m + row * N + column, mask=inside, other=0.0)
                re = tl.where(row == column, re - 1.0, re)
                d_re = _diagonal(d, matrix * apart + column * PARTS, column < n, PARTS)
                if PARTS == 1:
                    tl.store(out, re * d_re, mask=inside)
                else:
                    im = 2.0 * tl.load(m + (row + n) * N + column, mask=inside, other=0.0)
                    d_im = _diagonal(d, matrix * apart + column * PARTS + 1, column < n, PARTS)
                    tl.store(out, re * d_re - im * d_im, mask=inside)
                    tl.store(out + 1, re * d_im + im * d_re, mask=inside)
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
    line = tl.arange(0, E)
    turns = (batch - 1 - tl.program_id(0)) // tl.num_programs(0) + 1
    for index in tl.range(turns, num_stages=1):
        matrix = tl.program_id(0).to(tl.int64) + index * tl.num_programs(0)
        frame = w + matrix * n * n * PARTS
        gradient = g + matrix * n * n * PARTS
        entries = matrix * apart
        for i in range(0, N, E):
            for j in range(0, N, E):
                row = (i + line)[:, None]
                column = (j + line)[None, :]
                in_lower = row >= n
                in_right = column >= n
                inside = (row < n * PARTS) & (column < n * PARTS)
                a = row - n * in_lower.to(tl.int32)
                b = column - n * in_right.to(tl.int32)
                there = (b * n + a) * PARTS
                here = (a * n + b) * PARTS
                on_diagonal = inside & (a == b)
                re = tl.load(frame + there, mask=inside, other=0.0)
                d_re = _diagonal(d, entries + a * PARTS + b * 0, on_diagonal, PARTS)
                re += tl.where(on_diagonal, d_re, 0.0).to(re.dtype)
                value = tl.load(gradient + here, mask=inside, other=0.0).to(re.dtype)
                if PARTS == 2:
                    im = tl.load(frame + there + 1, mask=inside, other=0.0)
                    im += _diagonal(d, entries + a * PARTS + b * 0 + 1, on_diagonal, PARTS).to(im.dtype)
                    re = of_parts(re, -im, in_lower, in_right)
                    other = tl.load(gradient + here + 1, mask=inside, other=0.0).to(value.dtype)
                    value = of_parts(value, other, in_lower, in_right)
                tl.store(adjoint + row * N + column, re)
                tl.store(between + row * N + column, value)
        tl.debug_barrier()
        add_product(between, adjoint, between, inner, 1.0, 0.0, N, T, K, N)
        add_product(inner, inner, adjoint, between, 1.0, 0.0, N, T, K, N)
        for i in range(0, N, E):
            for j in range(0, N, E):
                row = (i + line)[:, None]
                column = (j + line)[None, :]
                inside = (row < n) & (column < n)
                d_row = _diagonal(d, entries + row * PARTS, row < n, PARTS) * -0.5
                d_column = _diagonal(d, entries + column * PARTS, column < n, PARTS) * -0.5
                ours = tl.load(between + row * N + column, mask=inside, other=0.0)
                theirs = tl.load(between + column * N + row, mask=inside, other=0.0)
                if PARTS == 1:
                    skew = ours * d_row.to(ours.dtype) - theirs * d_column.to(ours.dtype)
                    tl.store(gv + matrix * size + row * (row - 1) // 2 + column, skew, mask=inside & (row > column))
                else:
                    d_row_im = _diagonal(d, entries + row * PARTS + 1, row < n, PARTS) * -0.5
                    d_column_im = _diagonal(d, entries + column * PARTS + 1, column < n, PARTS) * -0.5
                    ours_im = tl.load(between + (row + n) * N + column, mask=inside, other=0.0)
                    theirs_im = tl.load(between + (column + n) * N + row, mask=inside, other=0.0)
                    re = ours * d_row.to(ours.dtype) - ours_im * d_row_im.to(ours.dtype)
                    im = ours * d_row_im.to(ours.dtype) + ours_im * d_row.to(ours.dtype)
                    re -= theirs * d_column.to(ours.dtype) - theirs_im * d_column_im.to(ours.dtype)
                    im += theirs * d_column_im.to(ours.dtype) + theirs_im * d_column.to(ours.dtype)
                    im = tl.where(row == column, 0.5 * im, im)
                    tl.store(gv + matrix * size + row * n + column, tl.where(row > column, re, im), mask=inside)
        tl.debug_barrier()
