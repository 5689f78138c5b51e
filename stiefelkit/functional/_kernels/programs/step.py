"""A step of small frames and its polishes, factors of steps by Adam's rule, and writing what a step has made."""

import triton
import triton.language as tl
from triton.language import constexpr

from .cayley import invert
from .parts import add_product, entry_of, plus, tile_of


@triton.jit
def _gram_less(a, out, columns, N: constexpr, T: constexpr, K: constexpr):
    """OUT = A^T A, less the identity of so many columns; returns the square of its Frobenius norm."""
    square = tl.full((T,), 0.0, dtype=tl.float64)
    strip = tl.arange(0, K)
    for tile in range((N // T) ** 2):
        row, column = tile_of(tile, N, T)
        total = tl.full((T, T), 0.0, dtype=tl.float64)
        for k in range(0, N, K):
            left = tl.load(a + (k + strip)[None, :] * N + row)
            right = tl.load(a + (k + strip)[:, None] * N + column)
            total = tl.dot(left, right, total, input_precision="ieee", out_dtype=tl.float64)
        total = tl.where((row == column) & (row < columns), total - 1.0, total)
        square += tl.reduce(total * total, 1, plus)
        tl.store(out + row * N + column, total)
    tl.debug_barrier()
    return tl.reduce(square, 0, plus)


@triton.jit(do_not_specialize=["n", "p", "batch"])
def run_step(
    w, lo, along, step, moved, rest, defects, scratch, n, p, batch,
    WAY: constexpr, MOST: constexpr, TURNS: constexpr, PARTS: constexpr, N: constexpr, T: constexpr, K: constexpr,
    E: constexpr,
):  # fmt: skip
    """Moves frames W + LO, n x p, against ALONG, and polishes them, all in float64.

    WAY "cayley" has skew matrices (batch, n, n, PARTS), and moves square frames along -W ALONG by the Cayley transform.
    The others have fields of the shape of w, and go straight: where ||W^H W - I||_F exceeds MOST afterwards, "shorten"
    goes back to nine tenths of that, and "divide" takes W over the root of 1 and that norm.

    `w` are frames (batch, n, p, PARTS), `lo` what they have beyond, and `step` says how far each goes, (batch,),
    float64. `moved` are the frames afterwards, of the dtype of w, `rest` what they would have beyond, and `defects`
    ||W^H W - I||_F^2 before the last of TURNS polishes, times PARTS, float64 (batch,). `scratch` is float64 (programs,
    4, N, N). The others are as in `run_forward`.
    """
    m = scratch + tl.program_id(0).to(tl.int64) * 4 * N * N
    x = m + N * N
    r = x + N * N
    frame = r + N * N
    columns = N if WAY == "cayley" else p * PARTS
    turns = (batch - 1 - tl.program_id(0)) // tl.num_programs(0) + 1
    for index in tl.range(turns, num_stages=1):
        matrix = tl.program_id(0).to(tl.int64) + index * tl.num_programs(0)
        place = matrix * n * p * PARTS
        size = tl.load(step + matrix)
        for tile in range((N // E) ** 2):
            row, column = tile_of(tile, N, E)
            at = row * N + column
            q = entry_of(along + place, row, column, n, p, PARTS).to(tl.float64)
            value = entry_of(w + place, row, column, n, p, PARTS).to(tl.float64)
            value += entry_of(lo + place, row, column, n, p, PARTS).to(tl.float64)
            if WAY == "cayley":
                outside = (row == column) & (row >= n * PARTS)
                tl.store(m + at, tl.where(row == column, 0.5 * size * q + 1.0, 0.5 * size * q))
                tl.store(frame + at, tl.where(outside, 1.0, value))
            else:
                # What is outside counts for nothing, NaN and infinity of the step either.
                inside = (row < n * PARTS) & (column < p * PARTS)
                tl.store(m + at, tl.where(inside, size * q, 0.0))
                tl.store(frame + at, value)
                tl.store(x + at, tl.where(inside, value - size * q, 0.0))
        tl.debug_barrier()
        if WAY == "cayley":
            invert(m, x, r, N, T, K)
            # W (I - Q) (I + Q)^-1 = 2 W (I + Q)^-1 - W.
            add_product(frame, frame, m, x, 2.0, -1.0, N, T, K, N)
        elif WAY != "go":
            norm = tl.sqrt(_gram_less(x, r, columns, N, T, K) / PARTS)
            shorter = tl.where(norm > MOST, tl.sqrt(0.9 * MOST / norm), 1.0)
            divided = tl.where(norm > MOST, 1.0 / tl.sqrt(1.0 + norm), 1.0)
            for tile in range((N // E) ** 2):
                row, column = tile_of(tile, N, E)
                at = row * N + column
                if WAY == "shorten":
                    tl.store(x + at, tl.load(frame + at) - shorter * tl.load(m + at))
                else:
                    tl.store(x + at, divided * tl.load(x + at))
            tl.debug_barrier()
        # A turn takes what is in X to FRAME or back.
        square = 0.0
        for turn in tl.static_range(TURNS):
            before = x if turn % 2 == 0 else frame
            after = frame if turn % 2 == 0 else x
            square = _gram_less(before, r, columns, N, T, K)
            add_product(before, before, r, after, -0.5, 1.0, N, T, K, N)
        tl.store(defects + matrix, square)
        result = frame if TURNS % 2 == 1 else x
        for tile in range((N // E) ** 2):
            row, column = tile_of(tile, N, E)
            inside = (row < n) & (column < p)
            here = place + (row * p + column) * PARTS
            for part in tl.static_range(PARTS):
                value = tl.load(result + (row + part * n) * N + column, mask=inside, other=0.0)
                rounded = value.to(tl.float32)
                tl.store(moved + here + part, rounded, mask=inside)
                tl.store(rest + here + part, (value - rounded.to(tl.float64)).to(tl.float32), mask=inside)
        tl.debug_barrier()


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
