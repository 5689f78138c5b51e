"""What all programs do with a number between two products: activations and their derivatives."""

import triton.language as tl

from .products import inline

__all__ = ["activate", "derive"]

# Powers of two, so that scaling by them is exact and squares neither overflow nor underflow.
SMALL = tl.constexpr(2.0**-60)
LARGE = tl.constexpr(2.0**60)
UP = tl.constexpr(2.0**100)
DOWN = tl.constexpr(2.0**-100)
NOTHING = tl.constexpr((2.0**-126 * 2.0**100) ** 2)
STEEPEST = tl.constexpr(1e18)


@inline
def activate(x, y, b, slope, ACTIVATION: tl.constexpr):
    """Activates pre-activations x and, of pairs, their partners y; returns both, and what the derivative needs besides.

    `b` is the bias of modReLU, `slope` that of leaky ReLU; "complex_modrelu" takes real parts x and imaginary parts y.
    """
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
def derive(c, d, x, y, kept, slope, ACTIVATION: tl.constexpr):
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
