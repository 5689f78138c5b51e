"""Exponentials of small skew matrices by scaling and squaring, and their gradients, in float64.

With W = exp A and Omega the skew part of W^H G, the gradient of A is the mean of e^{tA} Omega e^{-tA} over 0 <= t <= 1.
With B = 2^-s A that of e^{tB} is a series in commutators with B, and each of s turns X <- (X + e^B X e^-B) / 2,
B <- 2 B doubles the interval: X stays skew, no turn enlarges it, and nothing of the way forward is kept.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import add_product, entry_of, fill_skew, plus, store_skew, tile_of

SQUARINGS = tl.constexpr(20)  # at most so many, and one more backward: a longer A than some 2e5 is scaled to that norm
COMMUTATORS = tl.constexpr(10)


@triton.jit
def _power_of_two(k):
    return ((k.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _scaled_exponential(a, w, table, EXTRA: constexpr, N: constexpr, T: constexpr, K: constexpr, E: constexpr):
    """W = exp(2^-k A), by Taylor's polynomial of degree 12, with five more matrices behind W; returns k.

    The error of the polynomial, after k squarings, is below 2^-36. `table` are its coefficients, of `_exponential/`.
    """
    left = w + N * N
    a6 = left + N * N
    b3 = a6 + N * N
    a2 = b3 + N * N
    a3 = a2 + N * N
    add_product(a, a, a, a2, 1.0, 0.0, N, T, K, N)
    add_product(a, a2, a, a3, 1.0, 0.0, N, T, K, N)
    sums = tl.full((E,), 0.0, dtype=tl.float64)
    for tile in range((N // E) ** 2):
        row, column = tile_of(tile, N, E)
        entries = tl.load(a3 + row * N + column)
        sums += tl.reduce(entries * entries, 1, plus)
    # ||A||^6 <= ||A^3||_F^2 < 2^bound, 2048 and more of what is not finite; then (2^-k ||A||)^13 / 13! <= 2^(-36 - k).
    bound = ((tl.reduce(sums, 0, plus).to(tl.int64, bitcast=True) >> 52) & 2047) - 1022
    halvings = (tl.maximum(13 * bound + 24, 0) + 71) // 72 + EXTRA
    scale = _power_of_two(-halvings)
    for tile in range((N // E) ** 2):
        row, column = tile_of(tile, N, E)
        at = row * N + column
        one = tl.where(row == column, 1.0, 0.0)
        x = tl.load(a + at) * scale
        y = tl.load(a2 + at) * scale * scale
        z = tl.load(a3 + at) * scale * scale * scale
        for k in tl.static_range(4):
            c = table + 4 * k
            rest = tl.load(c + 1) * x + tl.load(c + 2) * y + tl.load(c + 3) * z
            tl.store(w + k * N * N + at, tl.load(c) * one + rest)
    tl.debug_barrier()
    add_product(a6, b3, b3, a6, 1.0, 1.0, N, T, K, N)
    for tile in range((N // E) ** 2):
        row, column = tile_of(tile, N, E)
        at = row * N + column
        tl.store(left + at, tl.load(left + at) + tl.load(a6 + at))
    tl.debug_barrier()
    add_product(w, left, a6, w, 1.0, 1.0, N, T, K, N)
    return halvings


@triton.jit(do_not_specialize=["n", "batch"])
def run_exponential(
    v, w, table, scratch, n, batch, PARTS: constexpr, N: constexpr, T: constexpr, K: constexpr, E: constexpr
):
    """W = exp A, rounded once.

    `v` are packed coordinates (batch, n (n - 1) / 2), or (batch, n n) of a complex A, `w` frames (batch, n, n, PARTS),
    `scratch` float64 (programs, 7, N, N). The others are as in `run_forward`.
    """
    size = n * (n - 1) // 2 if PARTS == 1 else n * n
    a = scratch + tl.program_id(0).to(tl.int64) * 7 * N * N
    for matrix in tl.range(tl.program_id(0).to(tl.int64), batch, tl.num_programs(0), num_stages=1):
        fill_skew(v + matrix * size, a, n, 0.0, 1.0, PARTS, N, E)
        count = tl.minimum(_scaled_exponential(a, a + N * N, table, 0, N, T, K, E), SQUARINGS)
        for k in tl.range(count, num_stages=1):
            before = a + (1 + k % 2) * (N * N)
            add_product(a, before, before, a + (2 - k % 2) * (N * N), 1.0, 0.0, N, T, K, N)
        result = a + (1 + count % 2) * (N * N)
        for tile in range((N // E) ** 2):
            row, column = tile_of(tile, N, E)
            inside = (row < n) & (column < n)
            out = w + (matrix * n * n + row * n + column) * PARTS
            for part in tl.static_range(PARTS):
                value = tl.load(result + (row + part * n) * N + column, mask=inside, other=0.0)
                tl.store(out + part, value, mask=inside)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["n", "batch"])
def run_exponential_back(
    v, g, gv, table, scratch, n, batch, PARTS: constexpr, N: constexpr, T: constexpr, K: constexpr, E: constexpr
):
    """The gradient of packed coordinates from `v` and from `g`, that of W = exp A, (batch, n, n, PARTS), of any dtype.

    All but `g` and `gv` is as in `run_exponential`.
    """
    size = n * (n - 1) // 2 if PARTS == 1 else n * n
    a = scratch + tl.program_id(0).to(tl.int64) * 7 * N * N
    first = a + N * N
    omega = first + N * N
    x = omega + N * N
    powers = x + N * N
    product = a + 6 * N * N
    for matrix in tl.range(tl.program_id(0).to(tl.int64), batch, tl.num_programs(0), num_stages=1):
        # A is the adjoint here, and powers are those of W^H.
        fill_skew(v + matrix * size, a, n, 0.0, -1.0, PARTS, N, E)
        halvings = _scaled_exponential(a, first, table, 1, N, T, K, E)
        count = tl.minimum(halvings, SQUARINGS + 1)
        for k in tl.range(count, num_stages=1):
            power = a + tl.where(k == 0, 1, 4 + (k + 1) % 2) * (N * N)
            add_product(a, power, power, powers + k % 2 * (N * N), 1.0, 0.0, N, T, K, N)
        for tile in range((N // E) ** 2):
            row, column = tile_of(tile, N, E)
            tl.store(x + row * N + column, entry_of(g + matrix * n * n * PARTS, row, column, n, n, PARTS))
        tl.debug_barrier()
        add_product(a, powers + (count - 1) % 2 * (N * N), x, product, 0.5, 0.0, N, T, K, N)
        _skew_part(product, x, omega, 0.0, 1.0, N, E)
        for k in tl.range(COMMUTATORS, num_stages=1):
            before = a + tl.where(k == 0, 2, 3) * (N * N)
            add_product(a, a, before, product, 1.0, 0.0, N, T, K, N)
            _skew_part(product, omega, x, 1.0, -_power_of_two(-halvings) / (COMMUTATORS + 1 - k), N, E)
        for k in tl.range(count, num_stages=1):
            power = a + tl.where(k == 0, 1, 4 + (k + 1) % 2) * (N * N)
            add_product(a, x, power, product, 0.5, 0.0, N, T, K, N)
            add_product(x, power, product, x, 1.0, 0.5, N, T, K, N, True)
            add_product(a, power, power, powers + k % 2 * (N * N), 1.0, 0.0, N, T, K, N)
        less = _power_of_two(count - halvings)
        for tile in range((N // E) ** 2):
            row, column = tile_of(tile, N, E)
            inside = (row < n) & (column < n)
            re = tl.load(x + row * N + column, mask=inside, other=0.0)
            re = less * (re - tl.load(x + column * N + row, mask=inside, other=0.0))
            im = re
            if PARTS == 2:
                im = tl.load(x + (row + n) * N + column, mask=inside, other=0.0)
                im = less * (im + tl.load(x + (column + n) * N + row, mask=inside, other=0.0))
            store_skew(gv + matrix * size, row, column, re, im, n, PARTS)
        tl.debug_barrier()


@triton.jit
def _skew_part(m, c, out, SHARE: constexpr, scale, N: constexpr, E: constexpr):
    """OUT = SHARE C + scale (M - M^T); C is not read if SHARE is 0."""
    for tile in range((N // E) ** 2):
        row, column = tile_of(tile, N, E)
        value = scale * (tl.load(m + row * N + column) - tl.load(m + column * N + row))
        if SHARE != 0:
            value += SHARE * tl.load(c + row * N + column)
        tl.store(out + row * N + column, value)
    tl.debug_barrier()
