"""The scan of rotations: a program takes some planes of some sequences through a chunk of steps, in float64."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["steps", "chunk", "columns"])
def rotate_planes(
    x, first, factor, out, ends, totals, steps, chunk, columns, planes,
    FIXED: constexpr, REVERSE: constexpr, BLOCK: constexpr, AHEAD: constexpr,
):  # fmt: skip
    """Runs z_t = f_t z_{t-1} + x_t over the steps of each chunk, from f z + x with the state z before it.

    x and out (None for the ends alone) are (steps, columns, 2), as factors of each step are; FIXED: (planes, 2).
    `first` is added to the first step of a chunk; with `ends` and `totals`, products of factors, (chunks, columns, 2).
    """
    blocks = (columns + BLOCK - 1) // BLOCK
    part = (tl.program_id(0) // blocks).to(tl.int64)
    column = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_there = column < columns
    begin = part * chunk
    count = tl.minimum(chunk, steps - begin)
    re = tl.load(first + 2 * (part * columns + column), is_there, 0.0).to(tl.float64)
    im = tl.load(first + 2 * (part * columns + column) + 1, is_there, 0.0).to(tl.float64)
    one = tl.full([BLOCK], 1.0, tl.float64)
    f_re, f_im, all_re, all_im = one, one * 0.0, one, one * 0.0
    if FIXED:
        f_re = tl.load(factor + 2 * (column % planes), is_there, 0.0)
        f_im = tl.load(factor + 2 * (column % planes) + 1, is_there, 0.0)
    for step in tl.range(count, num_stages=AHEAD + 1):
        t = steps - 1 - begin - step if REVERSE else begin + step
        at = 2 * (t * columns + column)
        x_re = tl.load(x + at, is_there, 0.0).to(tl.float64)
        x_im = tl.load(x + at + 1, is_there, 0.0).to(tl.float64)
        if not FIXED:
            f_re = tl.load(factor + at, is_there, 0.0).to(tl.float64)
            f_im = tl.load(factor + at + 1, is_there, 0.0).to(tl.float64)
            all_re, all_im = all_re * f_re - all_im * f_im, all_re * f_im + all_im * f_re
        # The state before the first step has met its factor already.
        is_first = step == 0
        g_re, g_im = tl.where(is_first, 1.0, f_re), tl.where(is_first, 0.0, f_im)
        re, im = re * g_re - im * g_im + x_re, re * g_im + im * g_re + x_im
        if out is not None:
            tl.store(out + at, re, is_there)
            tl.store(out + at + 1, im, is_there)
    tl.store(ends + 2 * (part * columns + column), re, is_there)
    tl.store(ends + 2 * (part * columns + column) + 1, im, is_there)
    if not FIXED:
        tl.store(totals + 2 * (part * columns + column), all_re, is_there)
        tl.store(totals + 2 * (part * columns + column) + 1, all_im, is_there)
