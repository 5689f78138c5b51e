"""Sylvester's matrix between two diagonals or layers of rotations, as Triton programs that take rows in registers."""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import load_parts, plus, store_parts, times


@triton.jit
def _halves(x, S: constexpr, R: constexpr, N: constexpr):
    """Returns the entries at even and at odd multiples of S and the S - 1 behind each."""
    return tl.split(tl.permute(tl.reshape(x, (R, N // (2 * S), 2, S)), (0, 1, 3, 2)))


@triton.jit
def _whole(low, high, R: constexpr, N: constexpr):
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (R, N))


@triton.jit
def _transformed(x, R: constexpr, N: constexpr, LOG: constexpr):
    """Multiplies rows by H / sqrt(N), layer by layer of butterflies."""
    for bit in tl.static_range(LOG):
        low, high = _halves(x, 1 << bit, R, N)
        x = _whole(low + high, low - high, R, N)
    return x / tl.sqrt(tl.full((1, 1), N, tl.float64))


@triton.jit
def _partner(x, R: constexpr, N: constexpr):
    """Returns the entries half a row away."""
    low, high = _halves(x, N // 2, R, N)
    return _whole(high, low, R, N)


@triton.jit
def _turned(re, im, c, s, line, PARTS: constexpr, R: constexpr, N: constexpr):
    """Multiplies rows by c + i s, or rotates the entries i and i + N / 2 of real ones."""
    if PARTS == 2:
        return times(re, im, c, s)
    other = _partner(re, R, N)
    return c * re + tl.where(line < N // 2, -s, s) * other, im


@triton.jit
def _slope(re, im, g_re, g_im, line, PARTS: constexpr, R: constexpr, N: constexpr):
    """Returns what each entry adds to the gradient of the angle that has turned it, from it and its gradient."""
    if PARTS == 2:
        return re * g_im - im * g_re
    return tl.where(line < N // 2, -g_re, g_re) * _partner(re, R, N)


@triton.jit
def _rows_of(x, at, inside, row, line, PARTS: constexpr):
    if x is None:
        re = tl.where(row == line, 1.0, 0.0).to(tl.float64)
        im = re * 0.0
    else:
        re, im = load_parts(x + at, inside, PARTS)
    return re, im


@triton.jit
def _diagonals(c, s, signs, matrix, side, line, PARTS: constexpr, N: constexpr):
    """Returns cosines and sines of one side of H, and the signs before the first or behind the last rotation."""
    size: constexpr = N * PARTS // 2
    at = (2 * matrix + side) * size + line % size
    sign = tl.full((1, N), 1.0, tl.float64)
    if PARTS == 1:
        sign = tl.where(tl.load(signs + (2 * matrix + side) * N + line) < 0, -sign, sign)
    return tl.load(c + at), tl.load(s + at), sign


@triton.jit(do_not_specialize=["rows"])
def rows_transform(x, out, rows, COUNT: constexpr, PARTS: constexpr, R: constexpr, N: constexpr, LOG: constexpr):
    """OUT = X H / sqrt(N) for rows X (rows, N, PARTS), by COUNT programs; see `rows_forward`."""
    line = tl.arange(0, N)[None, :]
    for start in tl.range(tl.program_id(0) * R, rows, COUNT * R, num_stages=1):
        row = start + tl.arange(0, R)[:, None]
        at = (row.to(tl.int64) * N + line) * PARTS
        for part in tl.static_range(PARTS):
            y = tl.load(x + at + part, mask=row < rows, other=0.0).to(tl.float64)
            tl.store(out + at + part, _transformed(y, R, N, LOG), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def rows_forward(
    x, c, s, signs, out, rows, COUNT: constexpr, PARTS: constexpr, R: constexpr, N: constexpr, LOG: constexpr
):
    """OUT = X W^T for W = D2 H D1, or S2 R2 H R1 S1 if real, worked out in float64 and rounded once.

    `x` are rows (batch, rows, N, PARTS), None those of the identity; `c` and `s` cosines and sines, float64 (batch, 2,
    N), of rotations (batch, 2, N / 2); `signs` (batch, 2, N) of real matrices; COUNT programs take a matrix, R rows
    each at a time. N is 2 to the power LOG.
    """
    matrix = (tl.program_id(0) // COUNT).to(tl.int64)
    line = tl.arange(0, N)[None, :]
    c1, s1, sign1 = _diagonals(c, s, signs, matrix, 0, line, PARTS, N)
    c2, s2, sign2 = _diagonals(c, s, signs, matrix, 1, line, PARTS, N)
    for start in tl.range(tl.program_id(0) % COUNT * R, rows, COUNT * R, num_stages=1):
        row = start + tl.arange(0, R)[:, None]
        inside = (row < rows) & (line < N)
        at = ((matrix * rows + row) * N + line) * PARTS
        re, im = _rows_of(x, at, inside, row, line, PARTS)
        re, im = _turned(sign1 * re, im, c1, s1, line, PARTS, R, N)
        re = _transformed(re, R, N, LOG)
        if PARTS == 2:
            im = _transformed(im, R, N, LOG)
        re, im = _turned(re, im, c2, s2, line, PARTS, R, N)
        store_parts(out + at, sign2 * re, im, inside, PARTS)


@triton.jit(do_not_specialize=["rows", "matrix_stride", "row_stride", "line_stride"])
def rows_backward(
    x, c, s, signs, g, gx, turns, rows, matrix_stride, row_stride, line_stride,
    COUNT: constexpr, PARTS: constexpr, R: constexpr, N: constexpr, LOG: constexpr,
):  # fmt: skip
    """Returns the gradients GX of rows by those of `rows_forward`, G, and what each program adds to those of angles.

    `g` may have any strides, in numbers; `turns` is float64 (batch, COUNT, 2, N): of rotations, both of a pair add.
    The others are as in `rows_forward`; `gx` is not written without them.
    """
    matrix = (tl.program_id(0) // COUNT).to(tl.int64)
    line = tl.arange(0, N)[None, :]
    c1, s1, sign1 = _diagonals(c, s, signs, matrix, 0, line, PARTS, N)
    c2, s2, sign2 = _diagonals(c, s, signs, matrix, 1, line, PARTS, N)
    first = tl.full((R, N), 0.0, tl.float64)
    last = tl.full((R, N), 0.0, tl.float64)
    for start in tl.range(tl.program_id(0) % COUNT * R, rows, COUNT * R, num_stages=1):
        row = start + tl.arange(0, R)[:, None]
        inside = (row < rows) & (line < N)
        at = ((matrix * rows + row) * N + line) * PARTS
        re, im = _rows_of(x, at, inside, row, line, PARTS)
        re, im = _turned(sign1 * re, im, c1, s1, line, PARTS, R, N)
        there = matrix * matrix_stride + row * row_stride + line * line_stride
        g_re, g_im = load_parts(g + there, inside, PARTS)
        g_re *= sign2
        y_re = _transformed(re, R, N, LOG)
        y_im = _transformed(im, R, N, LOG) if PARTS == 2 else im
        y_re, y_im = _turned(y_re, y_im, c2, s2, line, PARTS, R, N)
        last += _slope(y_re, y_im, g_re, g_im, line, PARTS, R, N)
        g_re, g_im = _turned(g_re, g_im, c2, -s2, line, PARTS, R, N)
        g_re = _transformed(g_re, R, N, LOG)
        g_im = _transformed(g_im, R, N, LOG) if PARTS == 2 else g_im
        first += _slope(re, im, g_re, g_im, line, PARTS, R, N)
        if x is not None:
            g_re, g_im = _turned(g_re, g_im, c1, -s1, line, PARTS, R, N)
            store_parts(gx + at, sign1 * g_re, g_im, inside, PARTS)
    place = turns + tl.program_id(0).to(tl.int64) * 2 * N + tl.arange(0, N)
    tl.store(place, tl.reduce(first, 0, plus))
    tl.store(place + N, tl.reduce(last, 0, plus))
