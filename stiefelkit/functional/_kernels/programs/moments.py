"""Factors of steps by Adam's rule, of one second moment for each matrix."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit(do_not_specialize=["batch", "each"])
def run_moments(
    norms, moments, counts, mixed, counted, scales, batch, each, first, second, share, inner, outer, rate, N: constexpr
):
    """K <- K + 1, V <- V + SHARE (‖G‖^2 - V), and RATE / ((1 - b1^K) ((V / (1 - b2^K) + INNER)^1/2 + OUTER)).

    `norms` are ‖G‖_F of each matrix of a batch, float64, `moments` V and `counts` K, one for so many matrices each,
    float32; `mixed` and `counted` are those afterwards. `first` and `second` are log b1 and log b2. Without moments,
    `mixed` is (1 - b2^K)^-1/2, and the factor RATE / (1 - b1^K). Factors of what has not been measured yet are 0.
    """
    at = tl.program_id(0) * N + tl.arange(0, N)
    inside = at < batch
    count = tl.load(counts + at // each, mask=inside, other=1.0) + 1.0
    tl.store(counted + at // each, count, mask=inside)
    b1 = 1.0 - tl.exp(count.to(tl.float64) * first)
    b2 = 1.0 - tl.exp(count.to(tl.float64) * second)
    if moments is None:
        tl.store(mixed + at, 1.0 / tl.sqrt(b2), mask=inside)
        root = b1
    else:
        norm = tl.load(norms + at, mask=inside, other=0.0)
        v = tl.load(moments + at, mask=inside, other=0.0).to(tl.float64)
        v += share * (norm * norm - v)
        tl.store(mixed + at, v.to(tl.float32), mask=inside)
        root = b1 * (tl.sqrt(v / b2 + inner) + outer)
    # NaN stays.
    tl.store(scales + at, tl.where(root == 0, 0.0, rate / root), mask=inside)
