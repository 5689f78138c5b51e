"""The scan of rotations as chunks of steps, in torch operators or in Triton programs.

Factors are complex128, (m,), or (T, B, m) for one a step, of which the first is not used: the first state is added to
the first step as it is. The states at the ends of chunks are scanned in complex128.
"""

import itertools

import torch
from torch import Tensor

from stiefelkit.functional._kernels.launch import start
from stiefelkit.scan.engines.triton import PACKAGE, multiprocessors

STEPS = 16  # steps of a chunk in torch operators: all chunks take a step at a time
BLOCK = 128  # planes of sequences that a program takes
AHEAD = 7  # steps whose inputs a program has requested before it needs them, in shared memory
LEAST = 64  # steps of a chunk of a program: fewer are not worth the second pass


def by_chunks(x: Tensor, first: Tensor | None, factor: Tensor, reverse: bool, last_only: bool) -> tuple[Tensor, Tensor]:
    """Returns the states (T, B, m), none with `last_only`, and the last one, in torch operators."""
    factor = factor.expand(1, 1, -1) if factor.dim() == 1 else factor
    last = 0 if reverse else -1
    if not last_only:
        out = _chunked(x, first, factor, reverse)
        return out, out[last].clone()
    # A block at a time, so that memory does not grow with the steps.
    size, state = 64 * STEPS, first
    starts = range(0, len(x), size)
    for begin in reversed(starts) if reverse else starts:
        rows = slice(begin, begin + size)
        of_rows = factor if len(factor) == 1 else factor[rows]
        if state is not first:
            assert state is not None
            state = (state * of_rows[-1 if reverse else 0]).to(x.dtype)
        state = _chunked(x[rows], state, of_rows, reverse)[last]
    assert state is not None
    return x.new_empty(0, *x.shape[1:]), state.clone()


def _chunked(x: Tensor, first: Tensor | None, factor: Tensor, reverse: bool) -> Tensor:
    """Returns the states (T, B, m); factors are complex128 (1, 1, m), or (T, B, m), where the first is not used."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    f = factor.to(x.dtype).expand(len(x), -1, -1)
    order, inner = range(len(x)), range(STEPS)
    if reverse:
        order, inner = order[::-1], inner[::-1]
    if (count := len(x) // STEPS) > 1:
        order = order[count * STEPS :]
        rows = slice(len(order), None) if reverse else slice(count * STEPS)
        given, states, fs = (t[rows].unflatten(0, (count, STEPS)) for t in (x, out, f))
        states[:, inner[0]] = given[:, inner[0]]
        if first is not None:
            states[-1 if reverse else 0, inner[0]] += first
        for previous, i in itertools.pairwise(inner):
            torch.addcmul(given[:, i], fs[:, i], states[:, previous], out=states[:, i])
        chunks = factor.expand(1, STEPS, -1, -1) if len(factor) == 1 else factor[rows].unflatten(0, (count, STEPS))
        powers = chunks.flip(1).cumprod(1).flip(1) if reverse else chunks.cumprod(1)
        ends = states[:, inner[-1]].to(torch.complex128)
        ends = _chunked(ends, None, powers[:, inner[-1]], reverse).to(x.dtype).unsqueeze(1)
        powers = powers.to(x.dtype).expand(count, -1, -1, -1)
        after, before = (slice(None, -1), slice(1, None)) if reverse else (slice(1, None), slice(None, -1))
        states[after].addcmul_(powers[after], ends[before])
    elif len(x):
        out[order[0]] = x[order[0]] if first is None else x[order[0]] + first
        order = order[1:]
    for t in order:
        torch.addcmul(x[t], f[t], out[t + 1 if reverse else t - 1], out=out[t])
    return out


def planes_of(h: Tensor) -> Tensor:
    """Returns states (*, n) as complex numbers (*, n / 2), complex ones as they are."""
    return h if h.is_complex() else torch.view_as_complex(h.contiguous().unflatten(-1, (-1, 2)))


def on_gpu(
    x: Tensor,
    first: Tensor | None,
    factor: Tensor,
    reverse: bool,
    last_only: bool,
    states: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Returns what `by_chunks` does, by Triton programs, in float64: one pass, or two over chunks that fill the GPU.

    With the states of another scan, which ran the other way, it is the adjoint of that: factors are taken conjugate,
    and the sum of its own states times conjugate states one step further, (m,), comes third.
    """
    steps, columns, is_fixed = len(x), x[0].numel(), factor.dim() == 1
    last = x.new_empty(x.shape[1:])
    if not columns:
        return torch.empty_like(x[:0] if last_only else x), last, None if states is None else torch.zeros_like(factor)
    blocks = -(-columns // BLOCK)
    fitting = max(1, 4 * multiprocessors(x.device) // blocks)
    chunk = -(-steps // min(-(-steps // LEAST), fitting))
    chunks = -(-steps // chunk)
    shape = chunks, *x.shape[1:]
    ends = totals = None
    if chunks > 1:
        ends, totals = (torch.empty(shape, dtype=factor.dtype, device=x.device) for _ in range(2))
    out = x.new_empty(0, *x.shape[1:]) if last_only else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    pulls = None if states is None else torch.empty(shape, dtype=factor.dtype, device=x.device)
    power = factor**chunk if is_fixed and chunks > 1 else None
    fixed = {"FIXED": is_fixed, "REVERSE": reverse, "ADJOINT": states is not None, "BLOCK": BLOCK, "AHEAD": AHEAD}
    given = [_numbers(t) for t in (x, first, factor, power, ends, totals)]

    def run(count: int, *results: Tensor | None) -> None:
        held = (_numbers(t) for t in results)
        sizes = steps, chunk, columns, x.shape[-1], chunks - count
        start(PACKAGE, "rotate_planes", count * blocks, x, *given, *held, *sizes, **fixed, num_warps=4)

    if chunks > 1:
        run(chunks, None, None, None, None)
    run(1 if last_only else chunks, None if last_only else out, last, states, pulls)
    return out, last, None if pulls is None else pulls.sum((0, 1))


def _numbers(t: Tensor | None) -> Tensor | None:
    return None if t is None else torch.view_as_real(t.resolve_conj().contiguous())
