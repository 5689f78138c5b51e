"""States at the borders of chunks, S' = P S + R, passed on from chunk to chunk."""

from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.function import Context, Function, keep
from stiefelkit.functional._arithmetic.product import opaque
from stiefelkit.functional._kernels.launch import start
from stiefelkit.scan.engines.triton import PACKAGE, unsupported_device

MAX_WIDTH = 128
"""The most rows of a state of a program."""


def takes_borders(first: Tensor) -> bool:
    """Returns whether a program passes states (*, d, V) on."""
    return first.shape[-2] <= MAX_WIDTH and unsupported_device(first.device) is None


def borders(p: Tensor, r: Tensor | None, first: Tensor, backend: str) -> Tensor:
    """Returns the states before each chunk and after the last, (N + 1, *, d, V), in float64.

    Args:
        p: what a chunk does to a state, (N, *, d, d).
        r: what it adds, (N, *, d, V); None for nothing.
        first: the state before the first chunk, (*, d, V).
        backend: "chunks" or "triton".
    """
    return _Borders.of(p, r, first, False, backend)


class _Borders(Function):
    """S_{c+1} = P_c S_c + R_c from S_0, or, back, S_c = P_c^T S_{c+1} + R_c from S_N: each the adjoint of the other."""

    generate_vmap_rule = False

    @staticmethod
    def forward(p: Tensor, r: Tensor | None, first: Tensor, back: bool, backend: str) -> Tensor:
        return pass_borders(p, r, first, back, backend)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        p, r, _, ctx.back, ctx.backend = inputs
        ctx.is_driven = r is not None
        keep(ctx, p, output)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        p, states = ctx.saved_tensors
        rest, end = (g[1:], g[0]) if ctx.back else (g[:-1], g[-1])
        found = _Borders.of(p, rest, end, not ctx.back, ctx.backend)
        g_p = states[1:] @ found[:-1].mT if ctx.back else found[1:] @ states[:-1].mT
        g_r = (found[:-1] if ctx.back else found[1:]) if ctx.is_driven else None
        return g_p, g_r, found[-1] if ctx.back else found[0], None, None

    @staticmethod
    def tangent(ctx: Context, dp: Tensor | None, dr: Tensor | None, dfirst: Tensor | None, *_: None) -> Tensor:
        p, states = ctx.saved_tensors
        if dp is not None:
            moved = dp.mT @ states[1:] if ctx.back else dp @ states[:-1]
            dr = moved if dr is None else dr + moved
        return _Borders.of(p, dr, torch.zeros_like(states[0]) if dfirst is None else dfirst, ctx.back, ctx.backend)

    @staticmethod
    def vmap(info, in_dims: tuple[int | None, ...], *args) -> tuple[Tensor, int]:
        def folded(t: Tensor | None, dim: int | None, to: int) -> Tensor | None:
            if t is None:
                return None
            t = t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            return t.movedim(0, to)

        given = map(folded, args[:3], in_dims, (1, 1, 0))
        return _Borders.of(*given, *args[3:]), 1


def _like_borders(p: Tensor, r: Tensor | None, first: Tensor, back: bool, backend: str) -> Tensor:
    return first.new_empty(p.shape[0] + 1, *first.shape)


@opaque(_like_borders, dims=None, schema="(Tensor p, Tensor? r, Tensor first, bool back, str backend) -> Tensor")
def pass_borders(p: Tensor, r: Tensor | None, first: Tensor, back: bool, backend: str) -> Tensor:
    """Returns all states; see `_Borders`."""
    out = torch.empty(len(p) + 1, *first.shape, dtype=first.dtype, device=first.device)
    flat, p = out.view(len(out), -1, *first.shape[-2:]), p.reshape(len(p), -1, *p.shape[-2:])
    r = None if r is None else r.reshape(len(r), *flat.shape[1:])
    if backend == "triton":
        _by_program(p, r, first, flat, back)
        return out
    flat[-1 if back else 0] = first.reshape(flat.shape[1:])
    for c in reversed(range(len(p))) if back else range(len(p)):
        source, target, step = (flat[c + 1], flat[c], p[c].mT) if back else (flat[c], flat[c + 1], p[c])
        if r is None:
            torch.bmm(step, source, out=target)
        else:
            torch.baddbmm(r[c], step, source, out=target)
    return out


def _by_program(p: Tensor, r: Tensor | None, first: Tensor, out: Tensor, back: bool) -> None:
    """Fills states (N + 1, count, d, V), by a program for each 16 columns of a state."""
    chunks, (count, size, columns) = len(p), out.shape[1:]
    if not out.numel():
        return
    rows = max(16, 1 << (size - 1).bit_length())
    given = (None if t is None else t.contiguous() for t in (p, r, first))
    fixed = {"BACK": back, "N": rows, "K": min(rows, 32), "V": 16, "num_warps": 4 if rows <= 32 else 8}
    programs = count * -(-columns // 16)
    start(PACKAGE, "pass_states", programs, p, *given, out, chunks, count, size, columns, **fixed)
