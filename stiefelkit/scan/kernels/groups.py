"""The recurrence and its derivative for matrices that one multiprocessor cannot hold: programs share a sequence.

PARTS programs are a group. Each holds SIZE columns of the matrix in registers for all steps and all sequences of the
group, takes ROWS of them at a time through their steps, and waits after each step until all of its group have written
their part of the states, which stand in the GPU's cache then. All programs have to run at once, or none goes on:
launched as a cooperative grid, which is refused where they do not fit. Products are exact float32.
"""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import activate_vector, derive_vector, load_vector, masked, row_at, store_vector
from .products import inline, load_block, product, spread, stacked, start_of, total, unstacked


@inline
def _meet(counter, target):
    """Waits until a counter is at `target`, to which every program of a group has added one at each meeting."""
    tl.debug_barrier()
    seen = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") + 1
    while seen < target:
        seen = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    tl.debug_barrier()


@inline
def _blocks(matrix, column, BLOCKS: constexpr, LONG: constexpr, SIZE: constexpr, DEEP: constexpr):
    STRIDE: constexpr = start_of(BLOCKS, LONG)
    blocks = ()
    for i in tl.static_range(BLOCKS):
        at = matrix + column * STRIDE + start_of(i, LONG)
        blocks = blocks + (load_block(at, STRIDE, LONG >> i, SIZE, DEEP),)
    return blocks


@inline
def _start(starts, lengths, begin, steps, batch, first, PACKED: constexpr, FLIP: constexpr, ROWS: constexpr):
    """Lengths of a group's next sequences, and where their rows of the first step and of the one before it are."""
    counts = ()
    heres = ()
    befores = ()
    for r in tl.static_range(ROWS):
        row = begin + r
        if PACKED:
            count = tl.load(lengths + row, mask=row < batch, other=0)
        else:
            count = tl.where(row < batch, steps, 0)
        counts = counts + (count,)
        heres = heres + (row_at(starts, row, batch, first, count, PACKED, FLIP),)
        befores = befores + (row_at(starts, row, batch, tl.maximum(first - 1, 0), count, PACKED, FLIP),)
    return counts, heres, befores


@inline
def _fresh(at, is_there, REST: constexpr, LONG: constexpr):
    """Numbers that another multiprocessor may have written: from the GPU's cache, not from this one's."""
    k = tl.arange(0, LONG)
    return tl.load(at + k, mask=masked(k < REST, is_there), other=0.0, cache_modifier=".cg")


@inline
def _times(xs, befores, blocks, there, N: constexpr, LONG: constexpr, DEEP: constexpr):
    """Returns X + h m for rows h at `befores`, where `there` says so: of all at once."""
    out = ()
    # Two by two: four states at once are more than there are registers.
    for pair in tl.static_range(len(xs) // 2):
        for i in tl.static_range(len(blocks)):
            FIRST = start_of(i, LONG)
            first = _fresh(befores[2 * pair] + FIRST, there[2 * pair], N - FIRST, LONG >> i)
            second = _fresh(befores[2 * pair + 1] + FIRST, there[2 * pair + 1], N - FIRST, LONG >> i)
            more = product(blocks[i], spread(stacked(first, second), 2, LONG >> i, DEEP))
            if i == 0:
                y = more
            else:
                y += more
        first, second = unstacked(total(y, 2))
        out = out + (xs[2 * pair] + first, xs[2 * pair + 1] + second)
    return out


@triton.jit(do_not_specialize=["steps", "batch", "first", "last"])
def groups_forward(
    z, matrix, h0, bias, saved, starts, lengths, slope, steps, batch, counters, first, last,
    N: constexpr, ACTIVATION: constexpr, PAIRS: constexpr, PACKED: constexpr, REVERSE: constexpr, ROWS: constexpr,
    PARTS: constexpr, BLOCKS: constexpr, LONG: constexpr, SIZE: constexpr, DEEP: constexpr,
):  # fmt: skip
    """Turns projections z (rows, N) into states h_t = act(z_t + h_{t-1} m), in place.

    As `rows_forward`, but a program has SIZE columns, and a group PARTS programs, which take ROWS sequences at a time.
    `matrix` is m transposed, padded to PARTS SIZE rows, and to columns of BLOCKS whole blocks, LONG rows in the first;
    `counters` are zeros, 32 for each group. Steps from `first` on are taken, and `last` is not.
    """
    KEPT: constexpr = SIZE // 2 if PAIRS else SIZE
    WIDTH: constexpr = N // 2 if PAIRS else N
    part = tl.program_id(0) % PARTS
    group = (tl.program_id(0) // PARTS).to(tl.int64)
    stride = tl.num_programs(0) // PARTS * ROWS
    column = part * SIZE
    blocks = _blocks(matrix, column, BLOCKS, LONG, SIZE, DEEP)
    b = tl.full((KEPT,), 0.0, tl.float32)
    if ACTIVATION == "modrelu" or ACTIVATION == "complex_modrelu":
        b = load_vector(bias, True, part * KEPT, WIDTH, KEPT, False)
    target = 0
    turns = (batch - group * ROWS + stride - 1) // stride
    for turn in tl.range(turns, num_stages=1):
        begin = group * ROWS + turn * stride
        counts, heres, befores = _start(starts, lengths, begin, steps, batch, first, PACKED, REVERSE, ROWS)
        end = tl.minimum(counts[0], last)
        # Not pipelined: loads would overtake the stores of the step before.
        for step in tl.range(first, end, num_stages=1):
            followings = ()
            xs = ()
            sources = ()
            there = ()
            for r in tl.static_range(ROWS):
                row = begin + r
                followings = followings + (row_at(starts, row, batch, step + 1, counts[r], PACKED, REVERSE),)
                there = there + (step < counts[r],)
                xs = xs + (load_vector(z + heres[r] * N, there[r], column, N, SIZE, PAIRS),)
                sources = sources + (tl.where(step == 0, h0 + row * N, z + befores[r] * N),)
            # What stands above does not depend on the other programs, and is asked for before they are waited for.
            if step > first:
                target += PARTS
                _meet(counters + group * 32, target)
            xs = _times(xs, sources, blocks, there, N, LONG, DEEP)
            for r in tl.static_range(ROWS):
                h, kept = activate_vector(xs[r], b, slope, ACTIVATION, SIZE, PAIRS)
                if saved is not None:
                    store_vector(
                        saved + heres[r] * WIDTH, kept, there[r], part * KEPT, WIDTH, KEPT, False, 0 if PAIRS else DEEP
                    )
                store_vector(z + heres[r] * N, h, there[r], column, N, SIZE, PAIRS, DEEP)
            befores, heres = heres, followings


@triton.jit(do_not_specialize=["steps", "batch", "first", "last"])
def groups_back(
    delta, matrix, g_out, g_last, out, saved, starts, lengths, slope, steps, batch, counters, first, last,
    N: constexpr, ACTIVATION: constexpr, PAIRS: constexpr, PACKED: constexpr, REVERSE: constexpr, ROWS: constexpr,
    PARTS: constexpr, BLOCKS: constexpr, LONG: constexpr, SIZE: constexpr, DEEP: constexpr,
):  # fmt: skip
    """Writes the gradients by all pre-activations, delta_t = act'(g_t + delta_{t+1} m), shape (rows, N).

    Arguments mean what they mean for `groups_forward` and, besides, for `rows_back`; steps are counted from the last.
    """
    KEPT: constexpr = SIZE // 2 if PAIRS else SIZE
    WIDTH: constexpr = N // 2 if PAIRS else N
    KEEPS: constexpr = ACTIVATION == "abs" or ACTIVATION == "oplu" or ACTIVATION == "complex_modrelu"
    STATES: constexpr = not (ACTIVATION == "identity" or ACTIVATION == "abs" or ACTIVATION == "oplu")
    part = tl.program_id(0) % PARTS
    group = (tl.program_id(0) // PARTS).to(tl.int64)
    stride = tl.num_programs(0) // PARTS * ROWS
    column = part * SIZE
    blocks = _blocks(matrix, column, BLOCKS, LONG, SIZE, DEEP)
    target = 0
    turns = (batch - group * ROWS + stride - 1) // stride
    for turn in tl.range(turns, num_stages=1):
        begin = group * ROWS + turn * stride
        counts, heres, befores = _start(starts, lengths, begin, steps, batch, first, PACKED, not REVERSE, ROWS)
        end = tl.minimum(counts[0], last)
        # Not pipelined: loads would overtake the stores of the step before.
        for step in tl.range(first, end, num_stages=1):
            followings = ()
            outside = ()
            states = ()
            kepts = ()
            afters = ()
            known = ()
            for r in tl.static_range(ROWS):
                row = begin + r
                is_there = step < counts[r]
                followings = followings + (row_at(starts, row, batch, step + 1, counts[r], PACKED, not REVERSE),)
                c = tl.full((SIZE,), 0.0, tl.float32)
                if g_out is not None:
                    c += load_vector(g_out + heres[r] * N, is_there, column, N, SIZE, PAIRS)
                if g_last is not None:
                    c += load_vector(g_last + row * N, is_there & (step == 0), column, N, SIZE, PAIRS)
                h = c
                if STATES:
                    h = load_vector(out + heres[r] * N, is_there, column, N, SIZE, PAIRS)
                kept = c
                if KEEPS:
                    kept = load_vector(saved + heres[r] * WIDTH, is_there, part * KEPT, WIDTH, KEPT, False)
                outside = outside + (c,)
                states = states + (h,)
                kepts = kepts + (kept,)
                afters = afters + (delta + befores[r] * N,)
                known = known + (is_there & (step > 0),)
            # What stands above does not depend on the other programs, and is asked for before they are waited for.
            if step > first:
                target += PARTS
                _meet(counters + group * 32, target)
            outside = _times(outside, afters, blocks, known, N, LONG, DEEP)
            for r in tl.static_range(ROWS):
                d = derive_vector(outside[r], states[r], kepts[r], slope, ACTIVATION, SIZE, PAIRS)
                store_vector(delta + heres[r] * N, d, step < counts[r], column, N, SIZE, PAIRS, DEEP)
            befores, heres = heres, followings
