"""States at the borders of chunks: a program takes 16 columns of a state through all chunks, in float64."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["chunks", "count"])
def pass_states(
    p, r, first, out, chunks, count, size, columns, BACK: constexpr, N: constexpr, K: constexpr, V: constexpr
):
    """Writes S_{c+1} = P_c S_c + R_c, or, BACK, S_c = P_c^T S_{c+1} + R_c, of `count` states (size, columns).

    p is (chunks, count, size, size), r (chunks, count, size, columns) or None, first (count, size, columns), out
    (chunks + 1, count, size, columns). N, a power of two, is not less than size; K rows of a state are read at a time.
    """
    blocks = (columns + V - 1) // V
    state = (tl.program_id(0) // blocks).to(tl.int64)
    row = tl.arange(0, N)[:, None]
    column = (tl.program_id(0) % blocks) * V + tl.arange(0, V)[None, :]
    is_there = (row < size) & (column < columns)
    own, all_numbers = state * size * columns + row * columns + column, count.to(tl.int64) * size * columns
    at = (chunks if BACK else 0) * all_numbers
    tl.store(out + at + own, tl.load(first + own, is_there, 0.0), is_there)
    for step in range(chunks):
        chunk = chunks - 1 - step if BACK else step
        before, after = (chunk + 1, chunk) if BACK else (chunk, chunk + 1)
        total = tl.full([N, V], 0.0, tl.float64)
        if r is not None:
            total = tl.load(r + chunk * all_numbers + own, is_there, 0.0)
        matrix = p + (chunk * count.to(tl.int64) + state) * size * size
        # States go through memory, from the threads that have worked them out to all.
        tl.debug_barrier()
        for begin in range(0, N, K):
            k = begin + tl.arange(0, K)
            a, b = k[None, :], k[:, None]
            place = a * size + row if BACK else row * size + a
            left = tl.load(matrix + place, (row < size) & (a < size), 0.0)
            there = out + before * all_numbers + state * size * columns + b * columns + column
            right = tl.load(there, (b < size) & (column < columns), 0.0)
            total = tl.dot(left, right, total, input_precision="ieee", out_dtype=tl.float64)
        tl.store(out + after * all_numbers + own, total, is_there)
