"""What the programs share: products of matrices in scratch memory, and entries of packed or complex ones."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def add_product(
    c,
    a,
    b,
    out,
    SCALE: constexpr,
    SIGN: constexpr,
    N: constexpr,
    T: constexpr,
    K: constexpr,
    SIZE: constexpr,
    TURNED: constexpr = False,
):
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
def plus(a, b):
    """Returns what a reduction sums by: tl.sum is compiled, also where programs are interpreted."""
    return a + b
