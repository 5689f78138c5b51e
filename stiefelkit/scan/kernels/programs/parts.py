"""A row of states as vectors in registers, and its products with a matrix that stays in registers.

A row is a tuple of BLOCKS vectors, of SIZE, SIZE / 2, ... numbers; of complex units, first of their real parts, then as
many of their imaginary parts. Real units that are activated in pairs stand side by side, i and i + N/2. A matrix is a
tuple of blocks, each for a vector and a vector. Threads share a block by columns, and few of them by rows: what is left
of a product to be added across threads takes a shuffle or three within a warp, and no barrier.
"""

import triton.language as tl

# tl.sum is compiled code, which the interpreter does not call where triton was imported without it.
from triton.language.standard import _sum_combine

from .activations import activate, derive
from .inline import inline

__all__ = [
    "activate_parts",
    "activate_vector",
    "added",
    "complex_times",
    "derive_parts",
    "derive_vector",
    "load_block",
    "load_blocks",
    "load_kept",
    "load_parts",
    "load_states",
    "load_vector",
    "product",
    "row_after",
    "row_at",
    "spread",
    "stacked",
    "start_of",
    "store_kept",
    "store_parts",
    "store_vector",
    "times",
    "total",
    "unstacked",
    "zeros",
]


@inline
def start_of(i: tl.constexpr, SIZE: tl.constexpr):
    """Where vector i begins in a padded row."""
    return 2 * SIZE - (2 * SIZE >> i)


@inline
def load_block(at, stride: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEEP: tl.constexpr):
    """A block of a matrix whose columns are contiguous, each `stride` numbers behind the one before.

    The number in row k and column c is at [k // DEEP, k % 4, 0, c, k % DEEP // 4] of (ROWS / DEEP, 4, 1, COLUMNS,
    DEEP / 4): the last dimension belongs to neighbours; then threads and warps go on along the columns; so that all of
    the first two are a thread's own.
    """
    k = tl.arange(0, ROWS // DEEP)[:, None, None, None, None] * DEEP + tl.arange(0, 4)[None, :, None, None, None]
    k += tl.arange(0, DEEP // 4)[None, None, None, None, :] * 4
    c = tl.arange(0, COLUMNS)[None, None, None, :, None]
    return tl.load(at + c * stride + k)


@inline
def load_blocks(matrix, BLOCKS: tl.constexpr, SIZE: tl.constexpr, DEEP: tl.constexpr):
    """The blocks of a square matrix that is transposed and padded; BLOCKS of them for each vector on the left."""
    WIDTH: tl.constexpr = start_of(BLOCKS, SIZE)
    blocks = ()
    for i in tl.static_range(BLOCKS):
        for j in tl.static_range(BLOCKS):
            at = matrix + start_of(j, SIZE) * WIDTH + start_of(i, SIZE)
            blocks = blocks + (load_block(at, WIDTH, SIZE >> i, SIZE >> j, DEEP),)
    return blocks


@inline
def stacked(vectors, LENGTH: tl.constexpr):
    """Two or four vectors on top of each other, in an order that `unstacked` knows."""
    parts = ()
    for i in tl.static_range(len(vectors)):
        parts = parts + (tl.reshape(vectors[i], (1, LENGTH)),)
    for _ in tl.static_range(len(vectors) // 2):
        joined = ()
        for i in tl.static_range(len(parts) // 2):
            both = tl.trans(tl.join(parts[i], parts[len(parts) // 2 + i]), (2, 0, 1))
            joined = joined + (tl.reshape(both, (2 * parts[i].shape[0], LENGTH)),)
        parts = joined
    return parts[0]


@inline
def unstacked(stack, LENGTH: tl.constexpr):
    """Undoes `stacked`."""
    COUNT: tl.constexpr = stack.shape[0]
    parts = (stack,)
    for _ in tl.static_range(COUNT // 2):
        firsts = ()
        seconds = ()
        for i in tl.static_range(len(parts)):
            both = tl.reshape(parts[i], (2, parts[i].shape[0] // 2, LENGTH))
            first, second = tl.split(tl.trans(both, (1, 2, 0)))
            firsts = firsts + (first,)
            seconds = seconds + (second,)
        parts = firsts + seconds
    vectors = ()
    for i in tl.static_range(COUNT):
        vectors = vectors + (tl.reshape(parts[i], (LENGTH,)),)
    return vectors


@inline
def spread(h, COUNT: tl.constexpr, LENGTH: tl.constexpr, DEEP: tl.constexpr):
    """A stack of COUNT vectors as they are multiplied with blocks: all go through shared memory at once."""
    return tl.trans(tl.reshape(h, (COUNT, LENGTH // DEEP, DEEP // 4, 4)), (1, 3, 0, 2))[:, :, :, None, :]


@inline
def total(p, AXIS: tl.constexpr):
    """The sum over an axis."""
    return tl.reduce(p, AXIS, _sum_combine)


@inline
def product(block, wide):
    """Vectors that are spread times a block, but for the sum over the last dimension: of a thread's own numbers."""
    p = block * wide
    return total(tl.reshape(p, (p.shape[0] * p.shape[1], p.shape[2], p.shape[3], p.shape[4])), 0)


@inline
def _only(x):
    """The only one of a stack."""
    return tl.reshape(x, (x.shape[1], x.shape[2]))


@inline
def _add_products(ys, blocks, h, FIRST: tl.constexpr, BLOCKS: tl.constexpr, LENGTH: tl.constexpr, DEEP: tl.constexpr):
    """Adds a vector times the blocks from FIRST on, but for the sums over the last dimension; `ys` may be empty."""
    # Vector after vector: each goes through shared memory, and waits in registers no longer than it is used.
    wide = spread(h, 1, LENGTH, DEEP)
    out = ()
    for j in tl.static_range(BLOCKS):
        y = _only(product(blocks[FIRST + j], wide))
        out = out + (ys[j] + y if len(ys) > 0 else y,)
    return out


@inline
def times(x, h, blocks, BLOCKS: tl.constexpr, SIZE: tl.constexpr, DEEP: tl.constexpr):
    """X + h m; h may be several rows one after the other, and m as many matrices on top of each other."""
    ys = ()
    for i in tl.static_range(len(h)):
        ys = _add_products(ys, blocks, h[i], i * BLOCKS, BLOCKS, SIZE >> (i % BLOCKS), DEEP)
    out = ()
    for j in tl.static_range(BLOCKS):
        out = out + (x[j] + total(ys[j], 1),)
    return out


@inline
def complex_times(x, h, a, b, BLOCKS: tl.constexpr, SIZE: tl.constexpr, DEEP: tl.constexpr):
    """X + h [[a, b], [-b, a]]."""
    first = ()
    second = ()
    for j in tl.static_range(BLOCKS):
        for i in tl.static_range(BLOCKS):
            wide = spread(stacked((h[i], h[BLOCKS + i]), SIZE >> i), 2, SIZE >> i, DEEP)
            re, im = tl.split(tl.trans(product(a[i * BLOCKS + j], wide), (1, 2, 0)))
            re_b, im_b = tl.split(tl.trans(product(b[i * BLOCKS + j], wide), (1, 2, 0)))
            if i == 0:
                y0, y1 = re - im_b, im + re_b
            else:
                y0, y1 = y0 + (re - im_b), y1 + (im + re_b)
        first = first + (x[j] + total(y0, 1),)
        second = second + (x[BLOCKS + j] + total(y1, 1),)
    return first + second


@inline
def row_at(starts, row, batch, step, length, PACKED: tl.constexpr, FLIP: tl.constexpr):
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
def row_after(place, starts, row, batch, step, length, PACKED: tl.constexpr, FLIP: tl.constexpr):
    """`row_at`, from where the row of the step before is."""
    if PACKED:
        return row_at(starts, row, batch, step, length, PACKED, FLIP)
    elif FLIP:
        return place - batch
    else:
        return place + batch


@inline
def _units(first, N: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    """Where the numbers of a vector stand in a row, and which of them do."""
    u = first + tl.arange(0, SIZE)
    if PAIRS:
        return (u % 2) * (N // 2) + u // 2, u < N
    else:
        return u, u < N


@inline
def load_vector(at, is_there, first, N: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    """The numbers of a row from `first` on, zeros if it is not there."""
    u, fits = _units(first, N, SIZE, PAIRS)
    return tl.load(at + u, mask=fits & is_there, other=0.0)


@inline
def store_vector(at, x, is_there, first, N: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr, DEEP: tl.constexpr):
    """Writes the numbers of a row from `first` on, if it is there."""
    # As a sum over blocks lies in threads, with a copy in each of the neighbours that added it up: no number goes to
    # another thread. The minimum hides from the compiler that places follow each other, or it would send them there.
    u, fits = _units(first, N, SIZE, PAIRS)
    copies = tl.arange(0, DEEP // 4)[None, :]
    places = tl.broadcast_to((at + tl.minimum(u, N - 1))[:, None], (SIZE, DEEP // 4))
    values = tl.broadcast_to(x[:, None], (SIZE, DEEP // 4))
    tl.store(places, values, mask=(fits & is_there)[:, None] & (copies == 0))


@inline
def zeros(BLOCKS: tl.constexpr, SIZE: tl.constexpr, COMPLEX: tl.constexpr):
    """Vectors of zeros."""
    parts = ()
    for i in tl.static_range(BLOCKS * (1 + COMPLEX)):
        parts = parts + (tl.full((SIZE >> (i % BLOCKS),), 0.0, tl.float32),)
    return parts


@inline
def load_parts(
    at, is_there, N: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr, COMPLEX: tl.constexpr
):
    """The vectors of a row, zeros if it is not there."""
    parts = ()
    for half in tl.static_range(1 + COMPLEX):
        for i in tl.static_range(BLOCKS):
            place = at + half * (N // 2)
            x = load_vector(place, is_there, start_of(i, SIZE), N // (1 + COMPLEX), SIZE >> i, PAIRS)
            parts = parts + (x,)
    return parts


@inline
def store_parts(
    at,
    parts,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    DEEP: tl.constexpr,
    PAIRS: tl.constexpr,
    COMPLEX: tl.constexpr,
):
    """Writes the vectors of a row."""
    for half in tl.static_range(1 + COMPLEX):
        for i in tl.static_range(BLOCKS):
            place, x = at + half * (N // 2), parts[half * BLOCKS + i]
            store_vector(place, x, True, start_of(i, SIZE), N // (1 + COMPLEX), SIZE >> i, PAIRS, DEEP)


@inline
def load_states(
    at,
    is_there,
    ACTIVATION: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    COMPLEX: tl.constexpr,
):
    """The vectors of a row of states, for activations whose derivative follows from them; else nothing."""
    if ACTIVATION == "identity" or ACTIVATION == "abs" or ACTIVATION == "oplu":
        return ()
    else:
        return load_parts(at, is_there, N, BLOCKS, SIZE, PAIRS, COMPLEX)


@inline
def load_kept(
    saved,
    row,
    is_there,
    ACTIVATION: tl.constexpr,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    COMPLEX: tl.constexpr,
):
    """What an activation kept of a row, vector by vector; nothing for those that keep nothing."""
    parts = ()
    if ACTIVATION == "abs" or ACTIVATION == "oplu" or ACTIVATION == "complex_modrelu":
        WIDTH: tl.constexpr = N // 2 if PAIRS or COMPLEX else N
        SHARE: tl.constexpr = SIZE // 2 if PAIRS else SIZE
        for i in tl.static_range(BLOCKS):
            x = load_vector(saved + row * WIDTH, is_there, start_of(i, SHARE), WIDTH, SHARE >> i, False)
            parts = parts + (x,)
    return parts


@inline
def store_kept(
    saved,
    row,
    parts,
    N: tl.constexpr,
    SIZE: tl.constexpr,
    DEEP: tl.constexpr,
    PAIRS: tl.constexpr,
    COMPLEX: tl.constexpr,
):
    """Writes what an activation keeps of a row."""
    WIDTH: tl.constexpr = N // 2 if PAIRS or COMPLEX else N
    SHARE: tl.constexpr = SIZE // 2 if PAIRS else SIZE
    for i in tl.static_range(len(parts)):
        store_vector(saved + row * WIDTH, parts[i], True, start_of(i, SHARE), WIDTH, SHARE >> i, False, DEEP)


@inline
def added(x, y):
    """The sum of two tuples of vectors."""
    out = ()
    for i in tl.static_range(len(x)):
        out = out + (x[i] + y[i],)
    return out


@inline
def _halves(x, SIZE: tl.constexpr):
    """The first and the second units of all pairs."""
    return tl.split(tl.reshape(x, (SIZE // 2, 2)))


@inline
def _whole(x, y, SIZE: tl.constexpr):
    """Undoes `_halves`."""
    return tl.reshape(tl.join(x, y), (SIZE,))


@inline
def activate_vector(x, b, slope, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    """`activate` of a vector, whose numbers 2i and 2i + 1 are pairs with PAIRS: states, and what is kept."""
    if PAIRS:
        x0, x1 = _halves(x, SIZE)
        h0, h1, kept = activate(x0, x1, b, slope, ACTIVATION)
        return _whole(h0, h1, SIZE), kept
    else:
        h, _, kept = activate(x, x, b, slope, ACTIVATION)
        return h, kept


@inline
def derive_vector(c, h, kept, slope, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr):
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
def activate_parts(
    x, b, slope, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr, COMPLEX: tl.constexpr
):
    """`activate` of the vectors of a row: the states, and what is kept."""
    h = ()
    kept = ()
    if COMPLEX:
        BLOCKS: tl.constexpr = len(x) // 2
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
def derive_parts(
    c, h, kept, slope, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr, COMPLEX: tl.constexpr
):
    """`derive` of the vectors of a row, from those of its states and of what was kept, empty where not needed."""
    d = ()
    if ACTIVATION == "identity":
        d = c
    elif COMPLEX:
        BLOCKS: tl.constexpr = len(c) // 2
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
