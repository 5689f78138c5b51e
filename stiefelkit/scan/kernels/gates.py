"""The gated recurrence and its derivative: a program takes a sequence, with three matrices in registers.

r = sigmoid(z_r + h m_r), g = sigmoid(z_g + h m_g), c = act(z_c + r (h m_q)), and the next state is g h + (1 - g) c.
Products are exact float32.
"""

import triton
import triton.language as tl

from .parts import (
    activate_parts,
    derive_parts,
    load_parts,
    row_at,
    store_parts,
    zeros,
)
from .products import inline, load_blocks, start_of, times


@inline
def _load_three(matrix, BLOCKS: tl.constexpr, SIZE: tl.constexpr, DEEP: tl.constexpr):
    """Returns the blocks of m_q, m_r and m_g."""
    AREA: tl.constexpr = start_of(BLOCKS, SIZE) * start_of(BLOCKS, SIZE)
    q = load_blocks(matrix, BLOCKS, SIZE, DEEP)
    r = load_blocks(matrix + AREA, BLOCKS, SIZE, DEEP)
    g = load_blocks(matrix + 2 * AREA, BLOCKS, SIZE, DEEP)
    return q, r, g


@inline
def _sigmoid(x):
    parts = ()
    for i in tl.static_range(len(x)):
        parts = parts + (tl.div_rn(1.0, 1.0 + tl.exp(-x[i])),)
    return parts


@inline
def _candidate(z, r, qh, b, slope, ACTIVATION: tl.constexpr, SIZE: tl.constexpr, PAIRS: tl.constexpr):
    """c, and what its derivative needs besides."""
    x = ()
    for i in tl.static_range(len(z)):
        x = x + (z[i] + r[i] * qh[i],)
    return activate_parts(x, b, slope, ACTIVATION, SIZE, PAIRS, False)


@inline
def _load_bias(bias, ACTIVATION: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr):
    if ACTIVATION == "modrelu":
        return load_parts(bias, True, N, BLOCKS, SIZE, False, False)
    else:
        return zeros(BLOCKS, SIZE, False)


@triton.jit(do_not_specialize=["steps", "batch"])
def gates_forward(
    z,
    matrix,
    h0,
    bias,
    out,
    starts,
    lengths,
    slope,
    steps,
    batch,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    DEEP: tl.constexpr,
):
    """Writes the states `out` (rows, N) from projections z = [z_r | z_g | z_c] (rows, 3N); program b takes sequence b.

    `matrix` holds m_q, m_r and m_g one after the other, as `rows_forward` has its m; the others are as there.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row) if PACKED else steps
    m_q, m_r, m_g = _load_three(matrix, BLOCKS, SIZE, DEEP)
    b = _load_bias(bias, ACTIVATION, N, BLOCKS, SIZE)
    nothing = zeros(BLOCKS, SIZE, False)
    h = load_parts(h0 + row * N, True, N, BLOCKS, SIZE, PAIRS, False)
    here = row_at(starts, row, batch, 0, length, PACKED, REVERSE)
    following = row_at(starts, row, batch, 1, length, PACKED, REVERSE)
    z_r = load_parts(z + here * (3 * N), True, N, BLOCKS, SIZE, PAIRS, False)
    z_g = load_parts(z + here * (3 * N) + N, True, N, BLOCKS, SIZE, PAIRS, False)
    z_c = load_parts(z + here * (3 * N) + 2 * N, True, N, BLOCKS, SIZE, PAIRS, False)
    # Not pipelined: what is asked for ahead is asked for below.
    for step in tl.range(length, num_stages=1):
        goes_on = step + 1 < length
        beyond = row_at(starts, row, batch, step + 2, length, PACKED, REVERSE)
        r_ahead = load_parts(z + following * (3 * N), goes_on, N, BLOCKS, SIZE, PAIRS, False)
        g_ahead = load_parts(z + following * (3 * N) + N, goes_on, N, BLOCKS, SIZE, PAIRS, False)
        c_ahead = load_parts(z + following * (3 * N) + 2 * N, goes_on, N, BLOCKS, SIZE, PAIRS, False)
        r = _sigmoid(times(z_r, h, m_r, BLOCKS, SIZE, DEEP, True))
        g = _sigmoid(times(z_g, h, m_g, BLOCKS, SIZE, DEEP, True))
        c, _ = _candidate(z_c, r, times(nothing, h, m_q, BLOCKS, SIZE, DEEP, True), b, slope, ACTIVATION, SIZE, PAIRS)
        new = ()
        for i in tl.static_range(BLOCKS):
            new = new + (c[i] + g[i] * (h[i] - c[i]),)
        h = new
        store_parts(out + here * N, h, N, BLOCKS, SIZE, DEEP, PAIRS, False)
        z_r, z_g, z_c, here, following = r_ahead, g_ahead, c_ahead, following, beyond


@inline
def _load_step(
    p,
    g_out,
    here,
    is_there,
    N: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Returns the four blocks of a row of p, and the gradient by its state from outside."""
    at = p + here * (4 * N)
    qh = load_parts(at, is_there, N, BLOCKS, SIZE, PAIRS, False)
    z_r = load_parts(at + N, is_there, N, BLOCKS, SIZE, PAIRS, False)
    z_g = load_parts(at + 2 * N, is_there, N, BLOCKS, SIZE, PAIRS, False)
    z_c = load_parts(at + 3 * N, is_there, N, BLOCKS, SIZE, PAIRS, False)
    if g_out is not None:
        outside = load_parts(g_out + here * N, is_there, N, BLOCKS, SIZE, PAIRS, False)
    else:
        outside = zeros(BLOCKS, SIZE, False)
    return qh, z_r, z_g, z_c, outside


@triton.jit(do_not_specialize=["steps", "batch"])
def gates_back(
    p,
    matrix,
    h0,
    bias,
    out,
    g_out,
    g_last,
    g_h0,
    candidates,
    starts,
    lengths,
    slope,
    steps,
    batch,
    N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PAIRS: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
    DEEP: tl.constexpr,
):
    """Turns p = [h m_q | z_r + h m_r | z_g + h m_g | z_c] (rows, 4N), h the states before, into gradients by its own.

    `out` are the states (rows, N), `g_out`, `g_last` and REVERSE as in `rows_back`, and `matrix` the transposes of
    those of `gates_forward`. Writes the gradients by the first states into `g_h0` (batch, N) and c into `candidates`
    (rows, N), unless that is None. With AHEAD there are registers to load a step before it comes.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row) if PACKED else steps
    m_q, m_r, m_g = _load_three(matrix, BLOCKS, SIZE, DEEP)
    blocks = m_q + m_r + m_g
    b = _load_bias(bias, ACTIVATION, N, BLOCKS, SIZE)
    dh = zeros(BLOCKS, SIZE, False)
    if g_last is not None:
        dh = load_parts(g_last + row * N, True, N, BLOCKS, SIZE, PAIRS, False)
    here = row_at(starts, row, batch, 0, length, PACKED, not REVERSE)
    following = row_at(starts, row, batch, 1, length, PACKED, not REVERSE)
    if AHEAD:
        qh, z_r, z_g, z_c, outside = _load_step(p, g_out, here, True, N, BLOCKS, SIZE, PAIRS)
    # Not pipelined: what is asked for ahead is asked for below.
    for step in tl.range(length, num_stages=1):
        beyond = row_at(starts, row, batch, step + 2, length, PACKED, not REVERSE)
        goes_on = step + 1 < length
        if AHEAD:
            q_ahead, r_ahead, g_ahead, c_ahead, outside_ahead = _load_step(
                p, g_out, following, goes_on, N, BLOCKS, SIZE, PAIRS
            )
        else:
            qh, z_r, z_g, z_c, outside = _load_step(p, g_out, here, True, N, BLOCKS, SIZE, PAIRS)
        # The state before, needed last: registers are few.
        source = tl.where(goes_on, out + following * N, h0 + row * N)
        before = load_parts(source, True, N, BLOCKS, SIZE, PAIRS, False)
        at = p + here * (4 * N)
        r = _sigmoid(z_r)
        g = _sigmoid(z_g)
        c, kept = _candidate(z_c, r, qh, b, slope, ACTIVATION, SIZE, PAIRS)
        if candidates is not None:
            store_parts(candidates + here * N, c, N, BLOCKS, SIZE, DEEP, PAIRS, False)
        by_c = ()
        for i in tl.static_range(BLOCKS):
            by_c = by_c + ((1.0 - g[i]) * (dh[i] + outside[i]),)
        by_c = derive_parts(by_c, c, kept, slope, ACTIVATION, SIZE, PAIRS, False)
        by_q = ()
        by_r = ()
        by_g = ()
        passed = ()
        for i in tl.static_range(BLOCKS):
            d = dh[i] + outside[i]
            by_q = by_q + (by_c[i] * r[i],)
            by_r = by_r + (by_c[i] * qh[i] * r[i] * (1.0 - r[i]),)
            by_g = by_g + (d * (before[i] - c[i]) * g[i] * (1.0 - g[i]),)
            passed = passed + (d * g[i],)
        store_parts(at, by_q, N, BLOCKS, SIZE, DEEP, PAIRS, False)
        store_parts(at + N, by_r, N, BLOCKS, SIZE, DEEP, PAIRS, False)
        store_parts(at + 2 * N, by_g, N, BLOCKS, SIZE, DEEP, PAIRS, False)
        store_parts(at + 3 * N, by_c, N, BLOCKS, SIZE, DEEP, PAIRS, False)
        dh = times(passed, by_q + by_r + by_g, blocks, BLOCKS, SIZE, DEEP, True)
        if AHEAD:
            qh, z_r, z_g, z_c, outside = q_ahead, r_ahead, g_ahead, c_ahead, outside_ahead
        here, following = following, beyond
    store_parts(g_h0 + row * N, dh, N, BLOCKS, SIZE, DEEP, PAIRS, False)
