"""Products of reflections by keys, as chunks of compact WY in torch operators."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from stiefelkit._torch import is_in_forward_mode, is_traced
from stiefelkit.functional._arithmetic.product import is_plain, opaque
from stiefelkit.scan.engines.borders import borders

ROWS = 64
"""The most keys of a chunk."""
LEAST = -800.0
"""A decay whose logarithm is smaller is zero in float64."""
CACHED = 1 << 19
"""Numbers that the keys of a segment hold at most on a CPU."""
KEPT = 1 << 22
"""Numbers in all keys from which on segments are worked out again in the backward pass."""


class Steps(NamedTuple):
    """Tensors (B, T, ...): queries, keys with a dimension for those of a step behind T, values, beta and log decay."""

    q: Tensor | None
    k: Tensor
    v: Tensor | None
    beta: Tensor | None
    decay: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Steps":
        """Returns the tensors changed, None where there is none."""
        changed: Any = (None if t is None else change(t) for t in self)
        return Steps(*changed)


def scales(k: Tensor, beta: Tensor | None, tau: str) -> Tensor:
    """Returns τ of keys (*, m, D) in float64, (*, m)."""
    if tau == "free":
        assert beta is not None
        return beta
    square = k.square().sum(-1)
    exact = 2 / square.masked_fill(square == 0, torch.inf)
    if beta is None:
        return exact
    return torch.cat([exact[..., :-1], exact[..., -1:] * beta.unsqueeze(-1)], -1)


def in_segments(
    first: Tensor,
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor | None,
    decay: Tensor | None,
    tau: str,
    chunk: int | None,
    last_only: bool,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor | None, Tensor]:
    """Runs chunks, some at a time on a CPU, so that they stay in its cache."""
    steps = Steps(q, k, v, beta, decay)
    batch, count, m, heads, width = k.shape
    size = max(1, (min(ROWS, width) if chunk is None else chunk) // m)
    if not is_traced():
        size = min(size, count)
    present = [t for t in (*steps, first) if t is not None]
    whole = size * max(1, CACHED // max(1, batch * heads * size * m * width))
    is_on_cpu = backend == "chunks" and all(t.is_cpu for t in present)
    if whole >= count or not is_on_cpu or is_in_forward_mode() or not is_plain(*present):
        return _chunked(*steps, first, tau, size, dtype, backend)
    parts: Any = [[None] * -(-count // whole) if t is None else t.split(whole, 1) for t in steps]
    outs, state = [], first
    is_long = k.numel() > KEPT and torch.is_grad_enabled() and any(t.requires_grad for t in present)
    run: Any = functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False) if is_long else _call
    for part in zip(*parts, strict=True):
        out, state = run(_chunked, *part, state, tau, size, dtype, backend)
        outs.append(None if last_only else out)
    return None if last_only else torch.cat(outs, 1), state


def _call(function: Callable[..., Any], *args: object) -> Any:
    return function(*args)


ARGUMENTS = "Tensor first, Tensor? q, Tensor k, Tensor? v, Tensor? beta, Tensor? decay"
SETTINGS = "str tau, int? chunk, bool last_only, ScalarType dtype, str backend"


def _like_states(first: Tensor, q: Tensor | None, k: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = rest[-2]
    heads = (k.shape[0], k.shape[1], k.shape[3])
    shape = (*heads, *first.shape[2 if q is None else 3 :])
    return first.new_empty(shape, dtype=dtype), torch.empty_like(first)


@opaque(_like_states, dims=None, schema=f"({ARGUMENTS}, {SETTINGS}) -> (Tensor, Tensor)")
def reflected_states(first: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Returns what `in_segments` does, all outputs, as one operator of a program that is exported or traced."""
    given: Any = (*args[:-3], False, *args[-2:])
    out, last = in_segments(first, *given)
    assert out is not None
    return out.contiguous(), last.clone()


def _laid(t: Tensor, steps: int, dims: int) -> Tensor:
    """Lays (B, T, ..., H, *) out as chunks (N, B, H, c, ..., *) in float64; `dims` stand behind H."""
    count = (t.shape[1] + steps - 1) // steps
    missing = count * steps - t.shape[1]
    if is_traced() or missing:  # no comparison in traced code
        t = F.pad(t, (*(0, 0) * (t.dim() - 2), 0, missing))
    t = t.unflatten(1, (count, steps)).movedim(1, 0).movedim(-1 - dims, 2)
    return t.to(torch.float64, memory_format=torch.contiguous_format)


def _chunked(
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor | None,
    decay: Tensor | None,
    first: Tensor,
    tau: str,
    size: int,
    dtype: torch.dtype,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Returns outputs (B, T, H, *) and the last state.

    In a chunk of C keys, the rows of K, with decays b from its start, u = τ (v - b S^T k - sums of the keys before)
    solves (I + diag(τ) L) U = diag(τ) (V - diag(b) K S), where L is the part below the diagonal of K K^T, with the
    decay between the two. So U = U_v - W S, and the chunk does to a state S what P = b I - K^T W and R = K^T U_v do.
    """
    steps, width = k.shape[1], k.shape[-1]
    keys = _laid(k, size, 1)  # (N, B, H, c, m, D)
    m = keys.shape[-2]
    scale = scales(keys, None if beta is None else _laid(beta, size, 0), tau).flatten(-2).unsqueeze(-1)
    rows = keys.flatten(-3, -2)
    scaled = scale * rows
    gram = scaled @ rows.mT
    met, left, within, end, sums = scaled, rows, None, None, keys
    if decay is not None:
        sums = _laid(decay, size, 0).clamp_min(LEAST).cumsum(-1)  # (N, B, H, c)
        ahead = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
        within = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).masked_fill(ahead, -torch.inf).exp()
        gram = gram.unflatten(-1, (size, m)).unflatten(-3, (size, m)) * within[..., :, None, :, None]
        gram = gram.flatten(-2).flatten(-3, -2)
        met = (scaled.unflatten(-2, (size, m)) * sums.exp()[..., None, None]).flatten(-3, -2)
        left = (keys * (sums[..., -1:] - sums).exp()[..., None, None]).flatten(-3, -2)
        end = sums[..., -1:].exp().unsqueeze(-1)
    x = values = None
    if q is not None:
        assert v is not None
        values = _laid(v, size, 1).flatten(-3, -2)
    elif v is not None:
        x = _laid(v, size, 2)  # (N, B, H, c, D, V)
        if size > 1:
            values = -(keys @ (_summed(x, within) - x)).flatten(-3, -2)
    given = met if values is None else torch.cat([met, scale * values], -1)
    solved = torch.linalg.solve_triangular(gram, given, upper=False, unitriangular=True)
    ends = left.mT @ solved
    columns = (width, given.shape[-1] - width)
    (w, values), (ends, r) = solved.split(columns, -1), ends.split(columns, -1)
    eye = torch.eye(width, dtype=torch.float64, device=k.device)
    p = (eye if end is None else end * eye) - ends
    if x is not None:
        added = _summed(x, within)[..., -1, :, :]
        r = r + added if columns[1] else added
    states = borders(p, r if x is not None or columns[1] else None, first, backend)
    last, before = states[-1], states[:-1]
    if q is None and size == 1:
        out = states[1:].unsqueeze(3)
    else:
        u = -(w @ before) if not columns[1] else values - w @ before
        if q is not None:
            queries = _laid(q, size, 1)
            seen = (queries @ rows.mT).unflatten(-1, (size, m))
            if within is None:
                weights = torch.ones(size, size, dtype=torch.float64, device=k.device).tril()
            else:
                weights, queries = within, queries * sums.exp().unsqueeze(-1)
            out = queries @ before + (seen * weights.unsqueeze(-1)).flatten(-2) @ u
        else:
            moved = keys.mT @ u.unflatten(-2, (size, m))
            moved = _summed(moved if x is None else x + moved, within)
            carried = before.unsqueeze(3)
            out = moved + (carried if within is None else carried * sums.exp()[..., None, None])
    out = out.movedim(0, 1).movedim(2, 3).to(dtype, memory_format=torch.contiguous_format)
    return out.flatten(1, 2)[:, :steps], last


def _summed(x: Tensor, within: Tensor | None) -> Tensor:
    """Returns sums over the steps of a chunk up to each, of (N, B, H, c, D, V), with the decays between."""
    if within is None:
        return x.cumsum(3) if x.shape[3] > 1 else x
    return (within @ x.flatten(-2)).unflatten(-1, x.shape[-2:])
