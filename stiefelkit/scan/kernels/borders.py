"""States at the borders of chunks: a program takes 16 columns of a state through all chunks, in float64."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["chunks", "count"])
def pass_states(
    ends, r, b, states, chunks, count, size, columns, ends_row, r_row, b_row, BACK: constexpr, N: constexpr
):
    """Writes S_{c+1} = b_c S_c - E_c S_c + R_c, or, BACK, S_c = b_c S_{c+1} - E_c^T S_{c+1} + R_c, from the first one.

    states is (chunks + 1, count, size, columns), E (chunks, count, size, size) in rows of `ends_row`, R (chunks,
    count, size, columns) or None in rows of `r_row`, b (chunks, count), or None for 1, each `b_row` behind the
    last. N, a power of two, is not less than size.
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
