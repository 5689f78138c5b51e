"""States at the borders of chunks, S' = b S - E S + R, passed on from chunk to chunk."""

import torch
from torch import Tensor

from stiefelkit.functional._kernels.launch import start
from stiefelkit.scan.engines.triton import PACKAGE, unsupported_device

MAX_WIDTH = 128
"""The most rows of a state of a program."""


def flaw_of_program(first: Tensor) -> str | None:
    """Returns what the program needs to pass states (*, d, V) on, and does not find, or None."""
    fits = first.shape[-2] <= MAX_WIDTH
    return unsupported_device(first.device) or (None if fits else f"D at most {MAX_WIDTH}, got {first.shape[-2]}")


def pass_borders(
    ends: Tensor, r: Tensor | None, decays: Tensor | None, states: Tensor, back: bool, backend: str
) -> None:
    """Fills states S_{c+1} = b_c S_c - E_c S_c + R_c from S_0, or, back, S_c = b_c S_{c+1} - E_c^T S_{c+1} + R_c.

    Args:
        ends: E, (N count, d, d), or [E | R] if R is None; without R nothing is added.
        r: R, (N count, d, V).
        decays: matrices whose last row begins with b, one for each chunk; None for 1.
        states: (N + 1, count, d, V), of which the first, or back the last, is given; all in float64.
        back: whether states come from the last one.
        backend: "chunks" or "triton".
    """
    chunks, (count, size, columns) = len(states) - 1, states.shape[1:]
    if r is None and ends.shape[-1] > size:
        r = ends[..., size:]
    b = None if decays is None else decays[:, -1, 0]
    if backend == "triton":
        if states.numel():
            rows = max(16, 1 << (size - 1).bit_length())
            fixed = {"BACK": back, "N": rows, "num_warps": 4 if rows <= 32 else 8}
            strides = ends.stride(1), 0 if r is None else r.stride(1), 0 if b is None else b.stride(0)
            programs = count * -(-columns // 16)
            given = ends, r, b, states, chunks, count, size, columns, *strides
            start(PACKAGE, "pass_states", programs, states, *given, **fixed)
        return
    p = -ends[..., :size]
    p.diagonal(dim1=1, dim2=2).add_(1 if b is None else b.unsqueeze(1))
    p, r = p.unflatten(0, (chunks, count)), None if r is None else r.unflatten(0, (chunks, count))
    for c in reversed(range(chunks)) if back else range(chunks):
        source, target, step = (states[c + 1], states[c], p[c].mT) if back else (states[c], states[c + 1], p[c])
        if r is None:
            torch.bmm(step, source, out=target)
        else:
            torch.baddbmm(r[c], step, source, out=target)
