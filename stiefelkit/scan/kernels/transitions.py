"""The weights of a linear transition, worked out in float64 by a program a head, and their gradients."""

import triton
import triton.language as tl
from triton.language import constexpr

from .products import total


@triton.jit
def _decay(rates, head):
    """Returns exp(q), 0 without rates, and whether its gradient passes; beyond the bounds g is 0 or 1 in float64."""
    if rates is None:
        return 0.0, False
    q = tl.load(rates + head).to(tl.float64)
    is_free = (q >= -600.0) & (q <= 100.0)
    return tl.exp(tl.where(q < -600.0, -600.0, tl.where(q > 100.0, 100.0, q))), is_free


@triton.jit
def _turn(angle):
    """Returns cosine and sine, in registers alone: less a multiple of pi / 2 in three parts, by their series."""
    count = tl.floor(angle * 0.6366197723675814 + 0.5)
    rest = tl.fma(-count, tl.full(angle.shape, 1.5707963267948966, tl.float64), angle)
    rest = tl.fma(-count, tl.full(angle.shape, 6.123233995736766e-17, tl.float64), rest)
    rest = tl.fma(-count, tl.full(angle.shape, -1.4973849048591698e-33, tl.float64), rest)
    cos, sin = rest * 0.0 + 1.0, rest * 0.0 + 1.0
    z = rest * rest
    for i in tl.static_range(9):
        cos = 1.0 - z * (1.0 / ((18 - 2 * i) * (17 - 2 * i))) * cos
        sin = 1.0 - z * (1.0 / ((18 - 2 * i) * (19 - 2 * i))) * sin
    sin = sin * rest
    quarter = count - 4.0 * tl.floor(count * 0.25)
    is_odd = (quarter == 1.0) | (quarter == 3.0)
    re, im = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    return tl.where((quarter == 1.0) | (quarter == 2.0), -re, re), tl.where(quarter >= 2.0, -im, im)


@triton.jit
def _size(rate):
    """Returns the root of 1 - g^2, with all digits where g is next to one."""
    y = 2.0 * rate
    small = y * (1.0 - y * (1.0 / 2.0) * (1.0 - y * (1.0 / 3.0) * (1.0 - y * (1.0 / 4.0) * (1.0 - y * (1.0 / 5.0)))))
    return tl.sqrt(tl.where(y < 1e-3, small, 1.0 - tl.exp(-y)))


@triton.jit
def _product(a, b, row, of_a, of_b, width, size, BLOCK: constexpr):
    """Returns the sum of a b over the rows of a head; `of_a` and `of_b` are strides (row, column)."""
    sums = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        r, c, is_there = row + i // width, i % width, i < size
        u = tl.load(a + r * of_a[0] + c * of_a[1], is_there, 0.0).to(tl.float64)
        sums += u * tl.load(b + r * of_b[0] + c * of_b[1], is_there, 0.0).to(tl.float64)
    return total(sums, 0)


@triton.jit
def prepare(
    u, angles, bias, rates, scales, rows, factor, width, stride, planes,
    NORMALIZE: constexpr, LOGARITHMS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Writes `plain_weights` of `stiefelkit.scan.transition`: rows of U and its bias, of a stride, and factors."""
    head = tl.program_id(0)
    rate, _ = _decay(rates, head)
    g = tl.exp(-rate)
    for start in range(0, planes, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at, is_there = head * planes + i, i < planes
        angle = tl.load(angles + at, is_there, 0.0).to(tl.float64)
        if LOGARITHMS:
            angle = tl.exp(angle)
        cos, sin = _turn(angle)
        tl.store(factor + 2 * at, g * cos, is_there)
        tl.store(factor + 2 * at + 1, g * sin, is_there)
    row, count = head * 2 * planes, 2 * planes
    share = 1.0
    if scales is not None:
        share = tl.exp(tl.load(scales + head).to(tl.float64))
    elif NORMALIZE:
        square = _product(u, u, row, (width, 1), (width, 1), width, count * width, BLOCK)
        share = _size(rate) / tl.sqrt(tl.where(square == 0.0, 1.0, square))
    for start in range(0, count * stride, BLOCK):
        i = start + tl.arange(0, BLOCK)
        r, c, is_there = row + i // stride, i % stride, i < count * stride
        value = share * tl.load(u + r * width + c, is_there & (c < width), 0.0)
        if bias is not None:
            value += tl.load(bias + r, is_there & (c == width), 0.0)
        tl.store(rows + r * stride + c, value, is_there)


@triton.jit
def prepare_back(
    u, angles, rates, scales, g_rows, pull, g_u, g_angles, g_bias, g_rates, g_scales, width, of_row, of_column, planes,
    NORMALIZE: constexpr, LOGARITHMS: constexpr, BLOCK: constexpr,
):  # fmt: skip
    """Writes the gradients by what `prepare` takes, from those by rows, which have strides, and by factors."""
    head = tl.program_id(0)
    rate, is_free = _decay(rates, head)
    g = tl.exp(-rate)
    along = tl.full([BLOCK], 0.0, tl.float64)
    for start in range(0, planes, BLOCK):
        i = start + tl.arange(0, BLOCK)
        at, is_there = head * planes + i, i < planes
        angle = tl.load(angles + at, is_there, 0.0).to(tl.float64)
        if LOGARITHMS:
            angle = tl.exp(angle)
        re, im = tl.load(pull + 2 * at, is_there, 0.0), tl.load(pull + 2 * at + 1, is_there, 0.0)
        cos, sin = _turn(angle)
        along += tl.where(is_there, re * cos + im * sin, 0.0)
        turn = g * (im * cos - re * sin)
        if LOGARITHMS:
            turn *= angle
        tl.store(g_angles + at, turn, is_there)
    row, size = head * 2 * planes, 2 * planes * width
    share, inward, by_rate = 1.0, 0.0, -g * total(along, 0)
    if scales is not None:
        share = tl.exp(tl.load(scales + head).to(tl.float64))
        inner = _product(u, g_rows, row, (width, 1), (of_row, of_column), width, size, BLOCK)
        tl.store(g_scales + head, share * inner)
    elif NORMALIZE:
        square = _product(u, u, row, (width, 1), (width, 1), width, size, BLOCK)
        square = tl.where(square == 0.0, 1.0, square)
        inner = _product(u, g_rows, row, (width, 1), (of_row, of_column), width, size, BLOCK)
        share, inward = _size(rate) / tl.sqrt(square), inner / square
        by_rate += inner / tl.sqrt(square) * tl.exp(-2.0 * rate) / _size(rate)
    if rates is not None:
        tl.store(g_rates + head, tl.where(is_free, by_rate * rate, 0.0))
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        r, c, is_there = row + i // width, i % width, i < size
        value = tl.load(g_rows + r * of_row + c * of_column, is_there, 0.0).to(tl.float64)
        value -= inward * tl.load(u + r * width + c, is_there, 0.0)
        tl.store(g_u + r * width + c, share * value, is_there)
    if g_bias is not None:
        for start in range(0, 2 * planes, BLOCK):
            i = start + tl.arange(0, BLOCK)
            value = tl.load(g_rows + (row + i) * of_row + width * of_column, i < 2 * planes, 0.0)
            tl.store(g_bias + row + i, value, i < 2 * planes)
