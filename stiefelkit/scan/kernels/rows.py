"""The recurrence and its derivative for few sequences: a program takes one of them through all of its steps.

The matrix stays in registers, and so does the state: of a step only the projection is read and the state written, and
the projection of the next one is asked for before the product begins. No matrix of a step is read twice, no program
waits for another. Products are exact float32.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import (
    activate_parts,
    added,
    derive_parts,
    load_kept,
    load_parts,
    load_states,
    row_after,
    row_at,
    store_kept,
    store_parts,
    zeros,
)
from .products import complex_times, load_blocks, start_of, times


@triton.jit(do_not_specialize=["steps", "batch"])
def rows_forward(
    z, matrix, h0, bias, saved, starts, lengths, slope, steps, batch,
    N: constexpr, ACTIVATION: constexpr, PAIRS: constexpr, COMPLEX: constexpr, PACKED: constexpr, REVERSE: constexpr,
    BLOCKS: constexpr, SIZE: constexpr, DEEP: constexpr,
):  # fmt: skip
    """Turns projections z (rows, N) into states h_t = act(z_t + h_{t-1} m), in place; program b takes sequence b.

    `matrix` is m transposed, padded with zeros to whole blocks, with PAIRS (units i and i + N/2 are activated together)
    in the order of pairs; with COMPLEX rows [Re | Im], a and b of [[a, b], [-b, a]]. With PACKED the rows of steps fall
    in number: `starts` has the first of each step, `lengths` the steps of each sequence. `saved` is what the derivative
    needs besides the states; a row has BLOCKS vectors, SIZE numbers in the first, and blocks as `load_block` says.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row) if PACKED else steps
    blocks = load_blocks(matrix, BLOCKS, SIZE, DEEP)
    if COMPLEX:
        others = load_blocks(matrix + start_of(BLOCKS, SIZE) * start_of(BLOCKS, SIZE), BLOCKS, SIZE, DEEP)
    b = zeros(BLOCKS, SIZE, False)
    if ACTIVATION == "modrelu" or ACTIVATION == "complex_modrelu":
        b = load_parts(bias, True, N // 2 if COMPLEX else N, BLOCKS, SIZE, False, False)
    h = load_parts(h0 + row * N, True, N, BLOCKS, SIZE, PAIRS, COMPLEX)
    here = row_at(starts, row, batch, 0, length, PACKED, REVERSE)
    following = row_after(here, starts, row, batch, 1, length, PACKED, REVERSE)
    x = load_parts(z + here * N, True, N, BLOCKS, SIZE, PAIRS, COMPLEX)
    # Not pipelined: what is asked for ahead is asked for below.
    for step in tl.range(length, num_stages=1):
        beyond = row_after(following, starts, row, batch, step + 2, length, PACKED, REVERSE)
        ahead = load_parts(z + following * N, step + 1 < length, N, BLOCKS, SIZE, PAIRS, COMPLEX)
        if COMPLEX:
            x = complex_times(x, h, blocks, others, BLOCKS, SIZE, DEEP)
        else:
            x = times(x, h, blocks, BLOCKS, SIZE, DEEP)
        h, kept = activate_parts(x, b, slope, ACTIVATION, SIZE, PAIRS, COMPLEX)
        if saved is not None:
            store_kept(saved, here, kept, N, SIZE, DEEP, PAIRS, COMPLEX)
        store_parts(z + here * N, h, N, BLOCKS, SIZE, DEEP, PAIRS, COMPLEX)
        x, here, following = ahead, following, beyond


@triton.jit(do_not_specialize=["steps", "batch"])
def rows_back(
    delta, matrix, g_out, g_last, out, saved, starts, lengths, slope, steps, batch,
    N: constexpr, ACTIVATION: constexpr, PAIRS: constexpr, COMPLEX: constexpr, PACKED: constexpr, REVERSE: constexpr,
    BLOCKS: constexpr, SIZE: constexpr, DEEP: constexpr,
):  # fmt: skip
    """Writes the gradients by all pre-activations, delta_t = act'(g_t + delta_{t+1} m), shape (rows, N).

    Arguments mean what they mean for `rows_forward`; m is the transpose of its m; REVERSE puts the first step first.
    `g_out` is the gradient by the states (rows, N) or None, `g_last` that by the last ones (batch, N) or None.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row) if PACKED else steps
    blocks = load_blocks(matrix, BLOCKS, SIZE, DEEP)
    if COMPLEX:
        others = load_blocks(matrix + start_of(BLOCKS, SIZE) * start_of(BLOCKS, SIZE), BLOCKS, SIZE, DEEP)
    d = zeros(BLOCKS, SIZE, COMPLEX)
    here = row_at(starts, row, batch, 0, length, PACKED, not REVERSE)
    following = row_after(here, starts, row, batch, 1, length, PACKED, not REVERSE)
    c = d
    if g_last is not None:
        c = load_parts(g_last + row * N, True, N, BLOCKS, SIZE, PAIRS, COMPLEX)
    if g_out is not None:
        c = added(c, load_parts(g_out + here * N, True, N, BLOCKS, SIZE, PAIRS, COMPLEX))
    h = load_states(out + here * N, True, ACTIVATION, N, BLOCKS, SIZE, PAIRS, COMPLEX)
    kept = load_kept(saved, here, True, ACTIVATION, N, BLOCKS, SIZE, PAIRS, COMPLEX)
    # Not pipelined: what is asked for ahead is asked for below.
    for step in tl.range(length, num_stages=1):
        goes_on = step + 1 < length
        beyond = row_after(following, starts, row, batch, step + 2, length, PACKED, not REVERSE)
        if g_out is not None:
            ahead = load_parts(g_out + following * N, goes_on, N, BLOCKS, SIZE, PAIRS, COMPLEX)
        else:
            ahead = zeros(BLOCKS, SIZE, COMPLEX)
        if COMPLEX:
            # A complex product is long enough for what is needed after it to come meanwhile.
            h = load_states(out + here * N, True, ACTIVATION, N, BLOCKS, SIZE, PAIRS, COMPLEX)
            h_ahead = h
        else:
            h_ahead = load_states(out + following * N, goes_on, ACTIVATION, N, BLOCKS, SIZE, PAIRS, COMPLEX)
        if COMPLEX or PAIRS:
            # Registers are few with pairs.
            kept = load_kept(saved, here, True, ACTIVATION, N, BLOCKS, SIZE, PAIRS, COMPLEX)
            kept_ahead = kept
        else:
            kept_ahead = load_kept(saved, following, goes_on, ACTIVATION, N, BLOCKS, SIZE, PAIRS, COMPLEX)
        if COMPLEX:
            c = complex_times(c, d, blocks, others, BLOCKS, SIZE, DEEP)
        else:
            c = times(c, d, blocks, BLOCKS, SIZE, DEEP)
        d = derive_parts(c, h, kept, slope, ACTIVATION, SIZE, PAIRS, COMPLEX)
        store_parts(delta + here * N, d, N, BLOCKS, SIZE, DEEP, PAIRS, COMPLEX)
        c, h, kept, here, following = ahead, h_ahead, kept_ahead, following, beyond
