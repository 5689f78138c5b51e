"""Writing what a step has made, if all of it is finite."""

import triton
import triton.language as tl
from triton.language import constexpr

from .parts import plus


@triton.jit
def _are_at_most(values, count, most, BLOCK: constexpr):
    """Returns 1 if none of so many values is larger, or NaN, else 0."""
    line = tl.arange(0, BLOCK)
    fit = line >= 0
    for i in range(0, count, BLOCK):
        value = tl.load(values + i + line, mask=i + line < count, other=0.0)
        fit = fit & ((value <= most) | (i + line >= count))
    return (tl.reduce(fit.to(tl.int32), 0, plus) == BLOCK).to(tl.int32)


@triton.jit
def run_commit(olds, news, counts, values, sizes, mosts, holds, refused, frames, BLOCK: constexpr):
    """Writes `news` over `olds`, tensors of so many integers of 32 bits, if all `values` are at most `mosts`.

    `values` are float32 or float64, `sizes` of them; `holds` is None or a truth value that counts as well; `refused`
    are as many numbers as `frames`, to which 1 is added where nothing is written.
    """
    fit = 1
    if holds is not None:
        fit = tl.load(holds).to(tl.int32)
    for k in tl.static_range(len(values)):
        fit = fit * _are_at_most(values[k], sizes[k], mosts[k], BLOCK)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for k in tl.static_range(len(olds)):
        inside = (at < counts[k]) & (fit != 0)
        tl.store(olds[k] + at, tl.load(news[k] + at, mask=inside), mask=inside)
    tl.store(refused + at, tl.load(refused + at, mask=at < frames) + (1 - fit), mask=at < frames)
