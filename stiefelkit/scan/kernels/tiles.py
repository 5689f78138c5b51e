"""The recurrence and its derivative for large batches: a program takes 16 sequences through all of their steps.

Programs do not speak to each other. A program reads the states of the step before from the buffer of all states, where
it has just written them itself: one barrier a step orders the two. Products are exact float32, never TF32.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import activate, derive
from .products import inline


@inline
def _rows_of(starts, sizes, rows, step, steps, batch, PACKED: constexpr, FLIP: constexpr):
    """Where a step and the one before it begin; the rows it has, goes on with, and begins. FLIP: the last one first."""
    if FLIP:
        t = steps - 1 - step
        previous = t + 1
    else:
        t = step
        previous = t - 1
    if PACKED:
        start = tl.load(starts + t)
        alive = tl.load(sizes + t)
        start_before = tl.load(starts + previous, mask=step > 0, other=0)
        alive_before = tl.load(sizes + previous, mask=step > 0, other=0)
    else:
        # 64 bits: rows times N may be more than 2^31.
        start = batch.to(tl.int64) * t
        alive = batch.to(tl.int64)
        start_before = batch.to(tl.int64) * previous
        alive_before = alive * (step > 0)
    inside = rows < alive
    return start, start_before, inside, inside & (rows < alive_before), inside & (rows >= alive_before)


@triton.jit(do_not_specialize=["steps", "batch"])
def tiles_forward(
    z, wt, h0, bias, saved, starts, sizes, slope, steps, batch,
    N: constexpr, ACTIVATION: constexpr, PAIRS: constexpr, PACKED: constexpr, REVERSE: constexpr, BLOCK_B: constexpr,
    BLOCK_K: constexpr, BLOCK_N: constexpr,
):  # fmt: skip
    """Turns projections z (rows, N) into states h_t = act(z_t + h_{t-1} wt), in place.

    As `rows_forward`, but wt is padded to whole tiles of BLOCK_K rows and BLOCK_N columns, with PAIRS each half of the
    columns; `sizes` are the rows of each step, with PACKED. A program takes BLOCK_B rows.
    """
    COLUMNS: constexpr = N // 2 if PAIRS else N
    PADDED: constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    WIDTH: constexpr = 2 * PADDED if PAIRS else PADDED
    rows = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    # Not pipelined: loads would overtake the stores of the step before.
    for step in tl.range(steps, num_stages=1):
        start, before, inside, goes_on, begins = _rows_of(starts, sizes, rows, step, steps, batch, PACKED, REVERSE)
        for first in range(0, COLUMNS, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            in_columns = columns < COLUMNS
            at = (start + rows)[:, None] * N + columns[None, :]
            tile = inside[:, None] & in_columns[None, :]
            x = tl.load(z + at, mask=tile, other=0.0)
            if PAIRS:
                y = tl.load(z + at + COLUMNS, mask=tile, other=0.0)
            for k in range(0, N, BLOCK_K):
                inner = k + tl.arange(0, BLOCK_K)
                in_inner = inner < N
                here = (before + rows)[:, None] * N + inner[None, :]
                there = rows[:, None] * N + inner[None, :]
                h = tl.load(z + here, mask=goes_on[:, None] & in_inner[None, :], other=0.0)
                h += tl.load(h0 + there, mask=begins[:, None] & in_inner[None, :], other=0.0)
                tile_at = wt + inner[:, None] * WIDTH + columns[None, :]
                x = tl.dot(h, tl.load(tile_at), x, input_precision="ieee")
                if PAIRS:
                    second = tl.load(tile_at + PADDED)
                    y = tl.dot(h, second, y, input_precision="ieee")
            b = x
            if ACTIVATION == "modrelu" or ACTIVATION == "complex_modrelu":
                b = tl.load(bias + columns, mask=in_columns, other=0.0)[None, :]
            x, y, kept = activate(x, y if PAIRS else x, b, slope, ACTIVATION)
            if saved is not None:
                pairs = (start + rows)[:, None] * COLUMNS + columns[None, :]
                tl.store(saved + pairs, kept, mask=tile)
            tl.store(z + at, x, mask=tile)
            if PAIRS:
                tl.store(z + at + COLUMNS, y, mask=tile)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["steps", "batch"])
def tiles_back(
    delta, w, g_out, g_last, out, saved, starts, sizes, slope, steps, batch,
    N: constexpr, ACTIVATION: constexpr, PAIRS: constexpr, PACKED: constexpr, REVERSE: constexpr, BLOCK_B: constexpr,
    BLOCK_K: constexpr, BLOCK_N: constexpr,
):  # fmt: skip
    """Writes the gradients by all pre-activations, delta_t = act'(g_t + delta_{t+1} w), shape (rows, N).

    Arguments mean what they mean for `tiles_forward` and `rows_back`; w is the transpose of wt, padded in the same way.
    """
    COLUMNS: constexpr = N // 2 if PAIRS else N
    PADDED: constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    WIDTH: constexpr = 2 * PADDED if PAIRS else PADDED
    rows = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    # Not pipelined: loads would overtake the stores of the step before.
    for step in tl.range(steps, num_stages=1):
        start, before, inside, goes_on, begins = _rows_of(starts, sizes, rows, step, steps, batch, PACKED, not REVERSE)
        for first in range(0, COLUMNS, BLOCK_N):
            columns = first + tl.arange(0, BLOCK_N)
            in_columns = columns < COLUMNS
            at = (start + rows)[:, None] * N + columns[None, :]
            tile = inside[:, None] & in_columns[None, :]
            c = tl.full((BLOCK_B, BLOCK_N), 0.0, tl.float32)
            d = c
            if g_out is not None:
                c += tl.load(g_out + at, mask=tile, other=0.0)
            if g_last is not None:
                last = rows[:, None] * N + columns[None, :]
                ending = begins[:, None] & in_columns[None, :]
                c += tl.load(g_last + last, mask=ending, other=0.0)
            if PAIRS:
                if g_out is not None:
                    d += tl.load(g_out + at + COLUMNS, mask=tile, other=0.0)
                if g_last is not None:
                    d += tl.load(g_last + last + COLUMNS, mask=ending, other=0.0)
            for k in range(0, N, BLOCK_K):
                inner = k + tl.arange(0, BLOCK_K)
                in_inner = inner < N
                here = (before + rows)[:, None] * N + inner[None, :]
                after = tl.load(delta + here, mask=goes_on[:, None] & in_inner[None, :], other=0.0)
                tile_at = w + inner[:, None] * WIDTH + columns[None, :]
                c = tl.dot(after, tl.load(tile_at), c, input_precision="ieee")
                if PAIRS:
                    second = tl.load(tile_at + PADDED)
                    d = tl.dot(after, second, d, input_precision="ieee")
            kept, x, y = c, c, c
            if ACTIVATION == "abs" or PAIRS:
                pairs = (start + rows)[:, None] * COLUMNS + columns[None, :]
                kept = tl.load(saved + pairs, mask=tile, other=0)
            if ACTIVATION != "abs" and ACTIVATION != "oplu" and ACTIVATION != "identity":
                x = tl.load(out + at, mask=tile, other=0.0)
                if PAIRS:
                    y = tl.load(out + at + COLUMNS, mask=tile, other=0.0)
            c, d = derive(c, d, x, y, kept, slope, ACTIVATION)
            tl.store(delta + at, c, mask=tile)
            if PAIRS:
                tl.store(delta + at + COLUMNS, d, mask=tile)
        tl.debug_barrier()
