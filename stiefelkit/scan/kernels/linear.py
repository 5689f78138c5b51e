"""Linear scans in float64: rotations of planes through chunks of steps, and states at the borders of chunks."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["steps", "chunk", "columns", "skipped"])
def rotate_planes(
    x, first, factor, power, ends, totals, out, last, states, pulls, steps, chunk, columns, planes, skipped,
    FIXED: constexpr, REVERSE: constexpr, ADJOINT: constexpr, BLOCK: constexpr, AHEAD: constexpr,
):  # fmt: skip
    """Runs z_t = f_t z_{t-1} + x_t over the steps of each chunk; all but `steps` and so on are arrays, or None.

    x and out are (steps, columns, 2), as factors of each step are; FIXED: (planes, 2), with their powers of a chunk.
    `first` (columns, 2), which has met its factor, is added to the first step. Without `last` chunks begin at zero and
    write `ends` and `totals`, products of factors, (chunks, columns, 2), in float64; with it they begin from those of
    the chunks before, and the last one writes the last state. ADJOINT takes conjugate factors, and writes the sums
    over a chunk of its own states times the conjugates of `states` one step further, `pulls`.
    """
    blocks = (columns + BLOCK - 1) // BLOCK
    part = (skipped + tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < columns
    begin = part * chunk
    count = tl.minimum(chunk, steps - begin)
    sign = -1.0 if ADJOINT else 1.0
    zero = tl.full([BLOCK], 0.0, tl.float64)
    re, im, f_re, f_im, all_re, all_im, pull_re, pull_im = zero, zero, zero, zero, zero + 1.0, zero, zero, zero
    if FIXED:
        f_re = tl.load(factor + 2 * (column % planes), is_there, 0.0)
        f_im = sign * tl.load(factor + 2 * (column % planes) + 1, is_there, 0.0)
    if first is not None:
        there = is_there & (part == 0)
        re = tl.load(first + 2 * column, there, 0.0).to(tl.float64)
        im = tl.load(first + 2 * column + 1, there, 0.0).to(tl.float64)
    if last is not None and ends is not None:
        if FIXED:
            all_re = tl.load(power + 2 * (column % planes), is_there, 0.0)
            all_im = sign * tl.load(power + 2 * (column % planes) + 1, is_there, 0.0)
        for before in range(part):
            at = 2 * (before * columns + column)
            if not FIXED:
                all_re = tl.load(totals + at, is_there, 0.0)
                all_im = tl.load(totals + at + 1, is_there, 0.0)
            end_re, end_im = tl.load(ends + at, is_there, 0.0), tl.load(ends + at + 1, is_there, 0.0)
            re, im = re * all_re - im * all_im + end_re, re * all_im + im * all_re + end_im
    for step in tl.range(count, num_stages=AHEAD + 1):
        t = steps - 1 - begin - step if REVERSE else begin + step
        at = 2 * (t * columns + column)
        x_re = tl.load(x + at, is_there, 0.0).to(tl.float64)
        x_im = tl.load(x + at + 1, is_there, 0.0).to(tl.float64)
        if not FIXED:
            f_re = tl.load(factor + at, is_there, 0.0).to(tl.float64)
            f_im = sign * tl.load(factor + at + 1, is_there, 0.0).to(tl.float64)
            if last is None:
                all_re, all_im = all_re * f_re - all_im * f_im, all_re * f_im + all_im * f_re
        # The first state has met its factor already.
        is_first = begin + step == 0
        g_re, g_im = tl.where(is_first, 1.0, f_re), tl.where(is_first, 0.0, f_im)
        re, im = re * g_re - im * g_im + x_re, re * g_im + im * g_re + x_im
        if out is not None:
            tl.store(out + at, re, is_there)
            tl.store(out + at + 1, im, is_there)
        if pulls is not None:
            further = t - 1 if REVERSE else t + 1
            there = is_there & (further >= 0) & (further < steps)
            z_re = tl.load(states + 2 * (further * columns + column), there, 0.0).to(tl.float64)
            z_im = tl.load(states + 2 * (further * columns + column) + 1, there, 0.0).to(tl.float64)
            pull_re += tl.where(there, re * z_re + im * z_im, 0.0)
            pull_im += tl.where(there, im * z_re - re * z_im, 0.0)
    at = 2 * (part * columns + column)
    if pulls is not None:
        tl.store(pulls + at, pull_re, is_there)
        tl.store(pulls + at + 1, pull_im, is_there)
    if last is not None:
        is_last = is_there & (begin + count == steps)
        tl.store(last + 2 * column, re, is_last)
        tl.store(last + 2 * column + 1, im, is_last)
    else:
        tl.store(ends + at, re, is_there)
        tl.store(ends + at + 1, im, is_there)
        if not FIXED:
            tl.store(totals + at, all_re, is_there)
            tl.store(totals + at + 1, all_im, is_there)


@triton.jit(do_not_specialize=["chunks", "count"])
def pass_states(
    ends, r, b, states, chunks, count, size, columns, ends_row, r_row, b_row, BACK: constexpr, N: constexpr
):
    """Writes S_{c+1} = b_c S_c - E_c S_c + R_c, or, BACK, S_c = b_c S_{c+1} - E_c^T S_{c+1} + R_c, from the first one.

    states is (chunks + 1, count, size, columns), E (chunks, count, size, size) in rows of `ends_row`, R (chunks,
    count, size, columns) or None in rows of `r_row`, b (chunks, count), or None for 1, each `b_row` behind the
    last. N, a power of two, is not less than size. A program takes 16 columns of a state through all chunks.
    """
    V: constexpr = 16
    K: constexpr = 32 if N > 32 else N  # rows of a state that are read at a time
    blocks = (columns + V - 1) // V
    state = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.arange(0, N)[:, None]
    column = (tl.program_id(0) % blocks) * V + tl.arange(0, V)[None, :]
    is_there = (row < size) & (column < columns)
    all_numbers = count.to(tl.int64) * size * columns
    own = state * size * columns + row * columns + column
    for step in range(chunks):
        chunk = chunks - 1 - step if BACK else step
        before, after = (chunk + 1, chunk) if BACK else (chunk, chunk + 1)
        place = chunk * count.to(tl.int64) + state
        # States go through memory, from the threads that have worked them out to all.
        tl.debug_barrier()
        total = tl.load(states + before * all_numbers + own, is_there, 0.0)
        if b is not None:
            total *= tl.load(b + place * b_row)
        if r is not None:
            total += tl.load(r + (place * size + row) * r_row + column, is_there, 0.0)
        for begin in range(0, N, K):
            k = begin + tl.arange(0, K)
            across, down = k[None, :], k[:, None]
            at = across * ends_row + row if BACK else row * ends_row + across
            left = tl.load(ends + place * size * ends_row + at, (row < size) & (across < size), 0.0)
            there = states + before * all_numbers + state * size * columns + down * columns + column
            right = tl.load(there, (down < size) & (column < columns), 0.0)
            total = tl.dot(-left, right, total, input_precision="ieee", out_dtype=tl.float64)
        tl.store(states + after * all_numbers + own, total, is_there)
