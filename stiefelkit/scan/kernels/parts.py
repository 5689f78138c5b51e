"""Elementwise steps between two products, and the row of states that programs hold as vectors in registers.

A row is a tuple of BLOCKS vectors, of SIZE, SIZE / 2, ... numbers; of complex units, first of their real parts, then as
many of their imaginary parts. Real units that are activated in pairs stand side by side, i and i + N/2.
"""

import triton.language as tl
from triton.language import constexpr

from .products import inline, start_of

# Powers of two, so that scaling by them is exact and squares neither overflow nor underflow.
SMALL = constexpr(2.0**-60)
LARGE = constexpr(2.0**60)
UP = constexpr(2.0**100)
DOWN = constexpr(2.0**-100)
NOTHING = constexpr((2.0**-126 * 2.0**100) ** 2)
STEEPEST = constexpr(1e18)


@inline
def activate(x, y, b, slope, ACTIVATION: constexpr):
    """Activates pre-activations x and, of pairs, partners y; returns both, and what the derivative needs besides."""
    kept = x
    if ACTIVATION == "tanh":
        # (1 - e) / (1 + e) cancels near 0, where five terms of the series have all digits.
        square = x * x
        odd = 1.0 + square * (
            -0.3333333333333333
            + square * (0.13333333333333333 + square * (-0.05396825396825397 + square * 0.021869488536155203))
        )
        e = tl.exp(-2.0 * tl.abs(x))
        size = tl.div_rn(1.0 - e, 1.0 + e)
        x = tl.where(square < 0.0625, x * odd, tl.where(x < 0, -size, size))
    elif ACTIVATION == "relu":
        x = tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "leaky_relu":
        x = tl.where(x > 0, x, x * slope)
    elif ACTIVATION == "abs":
        kept = (x > 0).to(tl.int8) - (x < 0).to(tl.int8)
        x = tl.abs(x)
    elif ACTIVATION == "modrelu":
        size = tl.maximum(tl.abs(x) + b, 0.0, propagate_nan=tl.PropagateNan.ALL)
        sign = x.to(tl.int32, bitcast=True) & -0x80000000
        x = tl.where(x == 0, x, (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True))
    elif ACTIVATION == "oplu":
        swap = x < y
        kept = swap.to(tl.int8)
        larger = tl.where(swap, y, x)
        y = tl.where(swap, x, y)
        x = larger
    elif ACTIVATION == "complex_modrelu":
        largest = tl.maximum(tl.abs(x), tl.abs(y))
        up = tl.where(largest < SMALL, UP, tl.where(largest > LARGE, DOWN, 1.0))
        down = tl.where(largest < SMALL, DOWN, tl.where(largest > LARGE, UP, 1.0))
        x = x * up
        y = y * up
        square = x * x + y * y
        is_zero = (largest < SMALL) & (square < NOTHING)
        # A root r and half its inverse, from r h = 1/2: to the last digit but one, without a division.
        inverse = tl.rsqrt(tl.where(is_zero, 1.0, square))
        scaled = square * inverse
        half = 0.5 * inverse
        rest = tl.fma(-half, scaled, 0.5)
        inverse = 2 * tl.fma(half, rest, half)
        size = tl.fma(scaled, rest, scaled) * down + b
        is_off = is_zero | (size <= 0)
        size = inverse * tl.where(is_off, 0.0, size)
        q = tl.minimum(b * inverse * up, STEEPEST, propagate_nan=tl.PropagateNan.ALL)
        kept = tl.where(is_off, -1.0, q)
        x *= size
        y *= size
    else:
        tl.static_assert(ACTIVATION == "identity", "an activation without a branch")
    return x, y, kept


@inline
def derive(c, d, x, y, kept, slope, ACTIVATION: constexpr):
    """Takes gradients c by states x, and for pairs d by y, back to those by pre-activations; `kept` is `activate`'s."""
    if ACTIVATION == "abs":
        c *= kept.to(tl.float32)
    elif ACTIVATION == "oplu":
        swap = kept != 0
        larger = c
        c = tl.where(swap, d, c)
        d = tl.where(swap, larger, d)
    elif ACTIVATION == "complex_modrelu":
        # The Jacobian of z (1 + b / |z|) is I + q e e^T, e across h of length 1; it is 0 where q = -1.
        largest = tl.maximum(tl.abs(x), tl.abs(y))
        up = tl.where(largest < SMALL, UP, tl.where(largest > LARGE, DOWN, 1.0))
        x = x * up
        y = y * up
        square = x * x + y * y
        across = kept * ((x * d - y * c) / tl.where(square == 0, 1.0, square))
        c = tl.where(kept == -1, 0.0, c - across * y)
        d = tl.where(kept == -1, 0.0, d + across * x)
    elif ACTIVATION == "tanh":
        c *= 1.0 - x * x
    elif ACTIVATION == "leaky_relu":
        c = tl.where(x > 0, c, c * slope)
    elif ACTIVATION == "relu" or ACTIVATION == "modrelu":
        # The derivative is 1 where the state is not 0.
        c = tl.where(x == 0, 0.0, c)
    else:
        tl.static_assert(ACTIVATION == "identity", "an activation without a branch")
    return c, d


@inline
def row_at(starts, row, batch, step, length, PACKED: constexpr, FLIP: constexpr):
    """Where the row of a sequence at some step is; of no use for steps beyond its length. FLIP: the last one first."""
    if FLIP:
        t = length - 1 - step
    else:
        t = step
    if PACKED:
        return tl.load(starts + t, mask=step < length, other=0) + row
    else:
        # 64 bits: rows times N may be more than 2^31.
        return batch.to(tl.int64) * t + row


@inline
def row_after(place, starts, row, batch, step, length, PACKED: constexpr, FLIP: constexpr):
    """`row_at`, from where the row of the step before is."""
    if PACKED:
        return row_at(starts, row, batch, step, length, PACKED, FLIP)
    elif FLIP:
        return place - batch
    else:
        return place + batch


@inline
def _units(first, N: constexpr, SIZE: constexpr, PAIRS: constexpr):
    """Where the numbers of a vector stand in a row, and which of them do."""
    u = first + tl.arange(0, SIZE)
    if PAIRS:
        return (u % 2) * (N // 2) + u // 2, u < N
    else:
        return u, u < N


@inline
def masked(fits, is_there):
    """Returns the mask of numbers that fit, of a row that is there or not."""
    return (fits & is_there) != 0  # triton 3.9's interpreter makes integers of a truth value for many


@inline
def load_vector(at, is_there, first, N: constexpr, SIZE: constexpr, PAIRS: constexpr):
    """Returns the numbers of a row from `first` on, zeros if it is not there."""
    u, fits = _units(first, N, SIZE, PAIRS)
    return tl.load(at + u, mask=masked(fits, is_there), other=0.0)


@inline
def store_vector(at, x, is_there, first, N: constexpr, SIZE: constexpr, PAIRS: constexpr, DEEP: constexpr):
    """Writes the numbers of a row from `first` on, if it is there; DEEP is 0 for a number a pair."""
    u, fits = _units(first, N, SIZE, PAIRS)
    if DEEP == 0:
        tl.store(at + u, x, mask=masked(fits, is_there))
    else:
        # As a sum over blocks lies in threads, with a copy in each of the neighbours that added it up: no number goes
        # to another thread. The minimum hides from the compiler that places follow each other, or it would send them;
        # the copies, of which one is stored, follow each other so that their dimension is the denser one.
        copies = tl.arange(0, DEEP // 4)[None, :]
        places = (at + tl.minimum(u, N - 1))[:, None] + copies
        values = tl.broadcast_to(x[:, None], (SIZE, DEEP // 4))
        tl.store(places, values, mask=masked(fits, is_there)[:, None] & (copies == 0))


@inline
def zeros(BLOCKS: constexpr, SIZE: constexpr, COMPLEX: constexpr):
    """Returns vectors of zeros."""
    parts = ()
    for i in tl.static_range(BLOCKS * (1 + COMPLEX)):
        parts = parts + (tl.full((SIZE >> (i % BLOCKS),), 0.0, tl.float32),)
    return parts


@inline
def load_parts(at, is_there, N: constexpr, BLOCKS: constexpr, SIZE: constexpr, PAIRS: constexpr, COMPLEX: constexpr):
    """Returns the vectors of a row, zeros if it is not there."""
    parts = ()
    for half in tl.static_range(1 + COMPLEX):
        for i in tl.static_range(BLOCKS):
            place = at + half * (N // 2)
            x = load_vector(place, is_there, start_of(i, SIZE), N // (1 + COMPLEX), SIZE >> i, PAIRS)
            parts = parts + (x,)
    return parts


@inline
def store_parts(
    at, parts, N: constexpr, BLOCKS: constexpr, SIZE: constexpr, DEEP: constexpr, PAIRS: constexpr, COMPLEX: constexpr
):
    """Writes the vectors of a row."""
    for half in tl.static_range(1 + COMPLEX):
        for i in tl.static_range(BLOCKS):
            place, x = at + half * (N // 2), parts[half * BLOCKS + i]
            store_vector(place, x, True, start_of(i, SIZE), N // (1 + COMPLEX), SIZE >> i, PAIRS, DEEP)


@inline
def load_states(
    at, is_there,
    ACTIVATION: constexpr, N: constexpr, BLOCKS: constexpr, SIZE: constexpr, PAIRS: constexpr, COMPLEX: constexpr,
):  # fmt: skip
    """Returns the vectors of a row of states, for activations whose derivative follows from them; else nothing."""
    if ACTIVATION == "identity" or ACTIVATION == "abs" or ACTIVATION == "oplu":
        return ()
    else:
        return load_parts(at, is_there, N, BLOCKS, SIZE, PAIRS, COMPLEX)


@inline
def load_kept(
    saved, row, is_there,
    ACTIVATION: constexpr, N: constexpr, BLOCKS: constexpr, SIZE: constexpr, PAIRS: constexpr, COMPLEX: constexpr,
):  # fmt: skip
    """What an activation kept of a row, vector by vector; nothing for those that keep nothing."""
    parts = ()
    if ACTIVATION == "abs" or ACTIVATION == "oplu" or ACTIVATION == "complex_modrelu":
        WIDTH: constexpr = N // 2 if PAIRS or COMPLEX else N
        SHARE: constexpr = SIZE // 2 if PAIRS else SIZE
        for i in tl.static_range(BLOCKS):
            x = load_vector(saved + row * WIDTH, is_there, start_of(i, SHARE), WIDTH, SHARE >> i, False)
            parts = parts + (x,)
    return parts


@inline
def store_kept(saved, row, parts, N: constexpr, SIZE: constexpr, DEEP: constexpr, PAIRS: constexpr, COMPLEX: constexpr):
    """Writes what an activation keeps of a row."""
    WIDTH: constexpr = N // 2 if PAIRS or COMPLEX else N
    SHARE: constexpr = SIZE // 2 if PAIRS else SIZE
    for i in tl.static_range(len(parts)):
        store_vector(
            saved + row * WIDTH, parts[i], True, start_of(i, SHARE), WIDTH, SHARE >> i, False, 0 if PAIRS else DEEP
        )


@inline
def added(x, y):
    """Returns the sum of two tuples of vectors."""
    out = ()
    for i in tl.static_range(len(x)):
        out = out + (x[i] + y[i],)
    return out


@inline
def _halves(x, SIZE: constexpr):
    return tl.split(tl.reshape(x, (SIZE // 2, 2)))


@inline
def _whole(x, y, SIZE: constexpr):
    return tl.reshape(tl.join(x, y), (SIZE,))


@inline
def activate_vector(x, b, slope, ACTIVATION: constexpr, SIZE: constexpr, PAIRS: constexpr):
    """`activate` of a vector, whose numbers 2i and 2i + 1 are pairs with PAIRS: states, and what is kept."""
    if PAIRS:
        x0, x1 = _halves(x, SIZE)
        h0, h1, kept = activate(x0, x1, b, slope, ACTIVATION)
        return _whole(h0, h1, SIZE), kept
    else:
        h, _, kept = activate(x, x, b, slope, ACTIVATION)
        return h, kept


@inline
def derive_vector(c, h, kept, slope, ACTIVATION: constexpr, SIZE: constexpr, PAIRS: constexpr):
    """`derive` of a vector."""
    if PAIRS:
        c0, c1 = _halves(c, SIZE)
        h0, h1 = _halves(h, SIZE)
        d0, d1 = derive(c0, c1, h0, h1, kept, slope, ACTIVATION)
        return _whole(d0, d1, SIZE)
    else:
        d, _ = derive(c, c, h, h, kept, slope, ACTIVATION)
        return d


@inline
def activate_parts(x, b, slope, ACTIVATION: constexpr, SIZE: constexpr, PAIRS: constexpr, COMPLEX: constexpr):
    """`activate` of the vectors of a row: the states, and what is kept."""
    h = ()
    kept = ()
    if COMPLEX:
        BLOCKS: constexpr = len(x) // 2
        second = ()
        for i in tl.static_range(BLOCKS):
            re, im, more = activate(x[i], x[BLOCKS + i], b[i], slope, ACTIVATION)
            h = h + (re,)
            second = second + (im,)
            kept = kept + (more,)
        h = h + second
    else:
        for i in tl.static_range(len(x)):
            y, more = activate_vector(x[i], b[i], slope, ACTIVATION, SIZE >> i, PAIRS)
            h = h + (y,)
            kept = kept + (more,)
    return h, kept


@inline
def derive_parts(c, h, kept, slope, ACTIVATION: constexpr, SIZE: constexpr, PAIRS: constexpr, COMPLEX: constexpr):
    """`derive` of the vectors of a row, from those of its states and of what was kept, empty where not needed."""
    d = ()
    if ACTIVATION == "identity":
        d = c
    elif COMPLEX:
        BLOCKS: constexpr = len(c) // 2
        second = ()
        for i in tl.static_range(BLOCKS):
            re, im = derive(c[i], c[BLOCKS + i], h[i], h[BLOCKS + i], kept[i], slope, ACTIVATION)
            d = d + (re,)
            second = second + (im,)
        d = d + second
    else:
        for i in tl.static_range(len(c)):
            y = h[i] if len(h) > 0 else c[i]
            more = kept[i] if len(kept) > 0 else c[i]
            d = d + (derive_vector(c[i], y, more, slope, ACTIVATION, SIZE >> i, PAIRS),)
    return d
