"""Products of rows of states with a matrix that stays in registers.

A matrix is a tuple of blocks, each for a vector and a vector of `parts`. Threads share a block by columns, and few of
them by rows: what is left of a product to be added across threads takes a shuffle or three within a warp, and no
barrier. States go through shared memory to all threads, two vectors at once where there are two.
"""

import triton
import triton.language as tl
from triton import knobs
from triton.language import constexpr

# tl.sum is compiled code, which the interpreter does not call where triton was imported without it.
from triton.language.standard import _sum_combine


def inline(function):
    """Makes a function known to triton's compiler; its interpreter takes it as it is, for its calls take long."""
    return function if knobs.runtime.interpret else triton.jit(function)


def constant(function):
    """Makes a function of constants, whose value is one, known to triton's compiler."""
    return function if knobs.runtime.interpret else triton.constexpr_function(function)


@constant
def start_of(i, SIZE):
    """Where vector i begins in a padded row."""
    return 2 * SIZE - (2 * SIZE >> i)


@inline
def load_block(at, stride: constexpr, ROWS: constexpr, COLUMNS: constexpr, DEEP: constexpr):
    """A block of a matrix whose columns are contiguous: row k and column c at [k // DEEP, k % 4, 0, c, k % DEEP // 4].

    The last dimension belongs to neighbours, the columns to threads and warps, the first two to one thread. Triton 3.6
    takes the first and 3.7 the last of equally contiguous dimensions to be the denser one: so more is claimed of those.
    """
    k = tl.arange(0, ROWS // DEEP)[:, None, None, None, None] * DEEP + tl.arange(0, 4)[None, :, None, None, None]
    k += tl.arange(0, DEEP // 4)[None, None, None, None, :] * 4
    c = tl.arange(0, COLUMNS)[None, None, None, :, None]
    return tl.load(tl.max_contiguous(at + c * stride + k, [1, 8, 1, 2, 4]))


@inline
def load_blocks(matrix, BLOCKS: constexpr, SIZE: constexpr, DEEP: constexpr):
    """The blocks of a square matrix that is transposed and padded; BLOCKS of them for each vector on the left."""
    WIDTH: constexpr = start_of(BLOCKS, SIZE)
    blocks = ()
    for i in tl.static_range(BLOCKS):
        for j in tl.static_range(BLOCKS):
            at = matrix + start_of(j, SIZE) * WIDTH + start_of(i, SIZE)
            blocks = blocks + (load_block(at, WIDTH, SIZE >> i, SIZE >> j, DEEP),)
    return blocks


@inline
def stacked(first, second):
    """Returns two vectors on top of each other."""
    return tl.trans(tl.join(first, second))


@inline
def unstacked(stack):
    """Undoes `stacked`."""
    return tl.split(tl.trans(stack))


@inline
def spread(h, COUNT: constexpr, LENGTH: constexpr, DEEP: constexpr):
    """A stack of COUNT vectors as they are multiplied with blocks: all go through shared memory at once."""
    return tl.trans(tl.reshape(h, (COUNT, LENGTH // DEEP, DEEP // 4, 4)), (1, 3, 0, 2))[:, :, :, None, :]


@inline
def total(p, AXIS: constexpr):
    """Returns the sum over an axis."""
    return tl.reduce(p, AXIS, _sum_combine)


@inline
def product(block, wide):
    """Vectors that are spread times a block, but for the sum over the last dimension: of a thread's own numbers."""
    p = block * wide
    return total(tl.reshape(p, (p.shape[0] * p.shape[1], p.shape[2], p.shape[3], p.shape[4])), 0)


@inline
def times(x, h, blocks, BLOCKS: constexpr, SIZE: constexpr, DEEP: constexpr):
    """Returns X + h m."""
    ys = ()
    # Vector after vector: each goes through shared memory, and waits in registers no longer than it is used.
    for i in tl.static_range(BLOCKS):
        wide = spread(h[i], 1, SIZE >> i, DEEP)
        sums = ()
        for j in tl.static_range(BLOCKS):
            p = product(blocks[i * BLOCKS + j], wide)
            y = tl.reshape(p, (p.shape[1], p.shape[2]))
            sums = sums + (ys[j] + y if i > 0 else y,)
        ys = sums
    out = ()
    for j in tl.static_range(BLOCKS):
        out = out + (x[j] + total(ys[j], 1),)
    return out


@inline
def complex_times(x, h, a, b, BLOCKS: constexpr, SIZE: constexpr, DEEP: constexpr):
    """Returns X + h [[a, b], [-b, a]]."""
    first = ()
    second = ()
    for j in tl.static_range(BLOCKS):
        for i in tl.static_range(BLOCKS):
            wide = spread(stacked(h[i], h[BLOCKS + i]), 2, SIZE >> i, DEEP)
            re, im = tl.split(tl.trans(product(a[i * BLOCKS + j], wide), (1, 2, 0)))
            re_b, im_b = tl.split(tl.trans(product(b[i * BLOCKS + j], wide), (1, 2, 0)))
            if i == 0:
                y0, y1 = re - im_b, im + re_b
            else:
                y0, y1 = y0 + (re - im_b), y1 + (im + re_b)
        first = first + (x[j] + total(y0, 1),)
        second = second + (x[BLOCKS + j] + total(y1, 1),)
    return first + second
