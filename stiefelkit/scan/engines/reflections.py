"""Products of reflections by keys, as chunks of compact WY in torch operators, and their derivatives."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from stiefelkit.functional._arithmetic.product import opaque
from stiefelkit.functional._kernels.launch import start
from stiefelkit.scan.engines.triton import PACKAGE, unsupported_device

ROWS = 64  # the most keys of a chunk
LEAST = -800.0  # a decay whose logarithm is smaller is zero in float64
HUGE = 1e60  # 1 / τ of a key that reflects nothing; its fourth power is in the range of float64
MAX_WIDTH = 128  # the most rows of a state of a program
CACHED = 1 << 19  # numbers that the keys of a segment hold at most on a CPU


class Steps(NamedTuple):
    """Tensors (B, T, ...): queries, keys with a dimension for those of a step behind T, values, beta and log decay."""

    q: Tensor | None
    k: Tensor
    v: Tensor | None
    beta: Tensor | None
    decay: Tensor | None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Steps":
        """Returns the tensors changed, None where there is none."""
        return Steps(*(None if t is None else change(t) for t in self))  # type: ignore[arg-type]

    @property
    def dims(self) -> tuple[int, ...]:
        """The number of dimensions behind the one of heads, of each tensor; outputs have as many as values."""
        return 1, 1, 2 if self.q is None else 1, 0, 0


class _Chunks(NamedTuple):
    """What X = N B H chunks of c steps and C = c m keys are made of, in float64; None where there is none.

    In a chunk, with decays b from its start, u = τ (v - b S^T k - sums of the keys before) of each key solves
    M U = V - diag(b) K S, where M has 1 / τ on its diagonal and, below, K K^T with the decay between the two. So U =
    M^-1 V - W S, W = M^-1 diag(b) K, and the chunk does to a state S what b I - E, E = K^T W, and R = K^T M^-1 V do,
    with decays to the end of the chunk on K^T.
    """

    keys: Tensor  # (X, c, m, D)
    matrix: Tensor  # M, (X, C, C), whose part above the diagonal is not read
    solved: Tensor  # [W | M^-1 V], (X, C, D + V), or W alone
    ends: Tensor  # [E | R]
    decays: Tensor | None  # from each of c + 1 ends of steps, the first one the start, to each: (X, c + 1, c + 1)
    beta: Tensor | None
    values: Tensor | None  # V, (X, C, V)
    added: Tensor | None  # (X, c, D, V)
    before: Tensor | None  # minus what was added in the chunk before each step, decayed
    queries: Tensor | None  # (X, c, D)
    weights: Tensor | None  # of U in outputs, (X, c, C)
    u: Tensor | None = None  # U, (X, C, V)
    out: Tensor | None = None  # outputs, where the derivative by decays needs them

    @property
    def within(self) -> Tensor:
        """Decays, or ones, that broadcast to (X, c + 1, c + 1)."""
        return _lower(self.keys.shape[1] + 1, self.keys.device) if self.decays is None else self.decays

    def driven_by(self, before: Tensor) -> "_Chunks":
        """Returns the chunks with U, by the states before them."""
        w, driven = self.solved.tensor_split([self.keys.shape[-1]], -1)
        return self._replace(u=-(w @ before) if self.values is None else torch.baddbmm(driven, w, before, alpha=-1))

    def from_start(self, rows: Tensor) -> Tensor:
        """Returns rows of steps or keys, decayed from the start of the chunk."""
        return rows if self.decays is None else _by_step(rows, self.decays[:, 1:, 0])

    def to_end(self, rows: Tensor) -> Tensor:
        """Returns rows of steps or keys, decayed to the end of the chunk."""
        return rows if self.decays is None else _by_step(rows, self.decays[:, -1, 1:])


def _by_step(rows: Tensor, factors: Tensor) -> Tensor:
    return (rows.unflatten(1, (factors.shape[1], -1)) * factors[..., None, None]).flatten(1, 2)


@functools.lru_cache(maxsize=64)
def _lower(size: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(size, size, dtype=torch.float64, device=device).tril()


def _mixed(factors: Tensor, rows: Tensor) -> Tensor:
    """Returns sums of rows (X, c, ...) by factors that broadcast to (X, *, c)."""
    factors = factors.expand(len(rows), *factors.shape[-2:])
    return (factors @ rows.flatten(2)).unflatten(2, rows.shape[2:])


def _dots(a: Tensor, b: Tensor, count: int) -> Tensor:
    """Returns the scalar products of all numbers of each step, (X, count)."""
    a, b = (t.reshape(len(t) * count, 1, -1) for t in (a, b))
    return (a @ b.mT).view(-1, count)


def _diagonal(matrix: Tensor, m: int, tau: str) -> Tensor:
    """Returns the numbers of a diagonal that belong to beta, (X, c) or, of all keys, (X, c, m)."""
    of_keys = matrix.diagonal(dim1=1, dim2=2).unflatten(1, (-1, m))
    return of_keys if tau == "free" else of_keys[..., -1]


def _laid(t: Tensor, size: int, dims: int) -> Tensor:
    """Lays (B, T, ..., H, *) out as chunks (X, c, ..., *) in float64; `dims` stand behind H."""
    if missing := -t.shape[1] % size:
        t = F.pad(t, (*(0, 0) * (t.dim() - 2), 0, missing))
    t = t.unflatten(1, (-1, size)).movedim(1, 0).movedim(-1 - dims, 2)
    return t.to(torch.float64, memory_format=torch.contiguous_format, copy=True).flatten(0, 2)


def _put(target: Tensor, t: Tensor, dims: int) -> None:
    """Writes chunks (X, c, ..., *) to (B, T, ..., H, *)."""
    batch, steps, heads, size = *target.shape[:2], target.shape[-1 - dims], t.shape[1]
    t = t.unflatten(0, (-(-steps // size), batch, heads)).movedim(2, -1 - dims).movedim(0, 1)
    if steps % size:
        target.copy_(t.flatten(1, 2)[:, :steps])
    else:
        target.unflatten(1, (-1, size)).copy_(t)


def _chunks(steps: Steps, tau: str, size: int) -> _Chunks:
    q, k, v, beta, decay = steps
    keys, m = _laid(k, size, 1), k.shape[2]
    rows = keys.flatten(1, 2)
    matrix = rows @ rows.mT
    decays = queries = weights = values = added = before = None
    if decay is not None:
        logs = F.pad(_laid(decay, size, 0).clamp_min_(LEAST), (1, 0)).cumsum(1)
        decays = (logs.unsqueeze(2) - logs.unsqueeze(1)).exp_().tril_()
        matrix.unflatten(2, (size, m)).unflatten(1, (size, m)).mul_(decays[:, 1:, None, 1:, None])
    diagonal = matrix.diagonal(dim1=1, dim2=2)
    if tau == "free":
        diagonal.fill_(1)
    else:
        torch.threshold_(diagonal, 0, HUGE).mul_(0.5)
    if beta is not None:
        beta = _laid(beta, size, 0).clamp_min_(1 / HUGE)
        _diagonal(matrix, m, tau).div_(beta)
    chunks = _Chunks(keys, matrix, matrix, matrix, decays, beta, None, None, None, None, None)
    within = chunks.within[..., 1:, 1:]
    if q is not None:
        assert v is not None
        values, queries = _laid(v, size, 1).flatten(1, 2), _laid(q, size, 1)
        weights = ((queries @ rows.mT).unflatten(2, (size, m)) * within[..., None]).flatten(2)
    elif v is not None:
        added = _laid(v, size, 2)
        before = added - (total := _mixed(within, added))
        values = (keys @ before).flatten(1, 2)
    given = chunks.from_start(rows)
    given = given if values is None else torch.cat([given, values], -1)
    # From the right: the result is laid out by rows.
    solved = torch.linalg.solve_triangular(matrix.mT, given.mT, upper=True, left=False).mT
    ends = chunks.to_end(rows).mT @ solved
    if added is not None:
        ends[..., k.shape[-1] :] += total[:, -1]
    return _Chunks(keys, matrix, solved, ends, decays, beta, values, added, before, queries, weights)


def _outputs(chunks: _Chunks, before: Tensor) -> Tensor:
    """Returns what a query reads at each step (X, c, V), or the state after it (X, c, D, V)."""
    assert chunks.u is not None
    if chunks.queries is not None:
        assert chunks.weights is not None
        return torch.baddbmm(chunks.weights @ chunks.u, chunks.from_start(chunks.queries), before)
    moved = chunks.keys.mT @ chunks.u.unflatten(1, chunks.keys.shape[1:3])
    moved = moved if chunks.added is None else moved.add_(chunks.added)
    return _mixed(chunks.within[..., 1:, :], torch.cat([before.unsqueeze(1), moved], 1))


def _segments(first: Tensor, steps: Steps, size: int, backend: str) -> list[tuple[slice, slice]]:
    """Returns chunks that are worked on at a time, and their steps: few enough on a CPU to stay in its cache."""
    batch, count, m, heads, width = steps.k.shape
    count = some = -(-count // size)
    if backend == "chunks" and first.is_cpu:
        some = max(1, CACHED // max(1, batch * heads * size * m * width))
    parts = [slice(i, min(i + some, count)) for i in range(0, count, some)]
    return [(part, slice(part.start * size, part.stop * size)) for part in parts]


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


ARGUMENTS = "Tensor first, Tensor? q, Tensor k, Tensor? v, Tensor? beta, Tensor? decay"
FORWARD = f"({ARGUMENTS}, str tau, int size, bool last_only, ScalarType dtype, str backend, bool keep) -> Tensor[]"
BACKWARD = f"({ARGUMENTS}, Tensor states, Tensor? g_out, Tensor? g_last, str tau, int size, str backend) -> Tensor[]"


def _like_forward(first: Tensor, q: Tensor | None, k: Tensor, *rest: Any) -> list[Any]:
    size, last_only, dtype = rest[-5:-2]
    batch, count, _, heads = k.shape[:4]
    shape = (batch, 0) if last_only else (batch, count, heads, *first.shape[2 if q is None else 3 :])
    states = ((count + size - 1) // size + 1, batch * heads, *first.shape[2:])
    last = first.new_empty(first.shape, dtype=torch.promote_types(dtype, torch.float32))
    return [first.new_empty(shape, dtype=dtype), last, first.new_empty(states, dtype=torch.float64)]


@opaque(_like_forward, dims=None, schema=FORWARD)
def reflect(first: Tensor, *args: Any) -> list[Any]:
    """Returns outputs, last states, those at the borders of chunks (N + 1, B H, D, V) and, to keep, few chunks."""
    steps, (tau, size, last_only, _, backend, keep) = Steps(*args[:5]), args[5:]
    out, last, states = _like_forward(first, *args)
    states[0].unflatten(0, first.shape[:2]).copy_(first)
    segments = _segments(first, steps, size, backend)
    kept = []
    for part, times in segments:
        chunks = _chunks(steps.each(lambda t, times=times: t[:, times]), tau, size)
        here = states[part.start : part.stop + 1]
        pass_borders(chunks.ends, None, chunks.decays, here, False, backend)
        before = here[:-1].flatten(0, 1)
        chunks = chunks.driven_by(before)
        if not last_only:
            found = _outputs(chunks, before)
            _put(out[:, times], found, steps.dims[2])
            chunks = chunks if steps.decay is None else chunks._replace(out=found)
        kept = [*chunks] if keep and len(segments) == 1 else []
    last.copy_(states[-1].unflatten(0, first.shape[:2]))
    return [out, last, states, *kept]


@opaque(lambda *args: [torch.empty_like(t) for t in args[:6] if t is not None], dims=None, schema=BACKWARD)
def reflect_back(first: Tensor, *args: Any) -> list[Tensor]:
    """Returns the gradients of all tensors that are given, by the chunks that were kept if there are some."""
    steps, (states, g_out, g_last, tau, size, backend, *kept) = Steps(*args[:5]), args[5:]
    grads, dims = steps.each(torch.empty_like), steps.dims
    adjoint = torch.zeros_like(states) if g_last is None else torch.empty_like(states)
    if g_last is not None:
        adjoint[-1].unflatten(0, first.shape[:2]).copy_(g_last)
    for part, times in reversed(_segments(first, steps, size, backend)):
        borders = slice(part.start, part.stop + 1)
        chunks = _Chunks(*kept) if kept else _chunks(steps.each(lambda t, times=times: t[:, times]), tau, size)
        if g_out is None:
            g = states.new_zeros(len(chunks.keys), size, *states.shape[-dims[2] :])
        else:
            g = _laid(g_out[:, times], size, dims[2])
        found = _pulled(chunks, states[borders], adjoint[borders], g, tau, backend)
        for target, t, behind in zip(grads, found, dims, strict=True):
            if target is not None and t is not None:
                _put(target[:, times], t, behind)
    return [adjoint[0].unflatten(0, first.shape[:2]).to(first.dtype, copy=True), *(g for g in grads if g is not None)]


def _pulled(chunks: _Chunks, states: Tensor, adjoint: Tensor, g: Tensor, tau: str, backend: str) -> Steps:
    """Returns gradients by those of outputs, and fills the adjoint states from the last one."""
    keys, matrix, solved, ends, decays, beta, values, added, missing, queries, weights, _, out = chunks
    (_, size, m, width), within, rows = keys.shape, chunks.within, keys.flatten(1, 2)
    before, end = states[:-1].flatten(0, 1), states[1:].flatten(0, 1)
    chunks = chunks.driven_by(before) if chunks.u is None else chunks
    u = chunks.u
    assert u is not None
    ahead = g_start = g
    if queries is not None:
        assert weights is not None
        g_start = chunks.from_start(g)
        g_u, r = weights.mT @ g, queries.mT @ g_start
    else:
        ahead, r = _mixed(within[..., 1:, 1:].mT, g), _mixed(within[..., 1:, :1].mT, g).squeeze(1)
        g_u = (keys @ ahead).flatten(1, 2)
    r.baddbmm_(solved[..., :width].mT, g_u, alpha=-1)
    pass_borders(ends, r, decays, adjoint, True, backend)
    after = adjoint[1:].flatten(0, 1)
    g_u.baddbmm_(chunks.to_end(rows), after)
    g_values = torch.linalg.solve_triangular(matrix, g_u.mT, upper=False, left=False).mT
    g_matrix = g_values @ u.mT  # of -M
    g_beta = g_q = g_v = g_decay = None
    if beta is not None:
        of_beta = _diagonal(g_matrix, m, tau).div_(beta)
        g_beta = of_beta * _diagonal(matrix, m, tau)
    g_matrix.diagonal(dim1=1, dim2=2).mul_(0 if tau == "free" else 0.5)
    g_matrix.tril_()
    if decays is not None:
        g_matrix.unflatten(2, (size, m)).unflatten(1, (size, m)).mul_(decays[:, 1:, None, 1:, None])
    if queries is not None:
        g_v = g_values
        g_weights = ((g @ u.mT).unflatten(2, (size, m)) * within[..., 1:, 1:, None]).flatten(2)
        g_q = torch.baddbmm(g_weights @ rows, g_start, before.mT)
        g_rows = torch.baddbmm(g_weights.mT @ queries, chunks.from_start(g_values), before.mT, alpha=-1)
        g_rows.baddbmm_(chunks.to_end(u), after.mT)
    else:
        ahead = torch.addcmul(ahead, after.unsqueeze(1), within[..., -1, 1:, None, None])
        start = before.unsqueeze(1), within[..., 1:, 0, None, None]
        held = start[0] * -start[1] if missing is None else torch.addcmul(missing, *start, value=-1)
        u_of_steps, g_of_steps = (t.unflatten(1, (size, m)) for t in (u, g_values))
        g_rows = (u_of_steps @ ahead.mT).flatten(0, 1)
        g_rows.baddbmm_(g_of_steps.flatten(0, 1), held.flatten(0, 1).mT)
        g_rows = g_rows.unflatten(0, (-1, size)).flatten(1, 2)
        if added is not None:
            moved = keys.mT @ g_of_steps
            g_v = ahead.add_(moved).sub_(_mixed(within[..., 1:, 1:].mT, moved))
    g_rows.baddbmm_(g_matrix, rows, alpha=-1).baddbmm_(g_matrix.mT, rows, alpha=-1)
    if decays is not None:
        # Between decays <adjoint, state> changes by outputs, and by what is added, alone.
        change = _dots(g, _outputs(chunks, before) if out is None else out, size)
        given = values if queries is not None else added
        if given is not None:
            assert g_v is not None
            change -= _dots(g_v, given, size)
        carried = _dots(after, end, 1)
        g_decay = torch.addmm(carried, change, _lower(size, keys.device))
    g_v = g_v.unflatten(1, (size, m)) if queries is not None and g_v is not None else g_v
    return Steps(g_q, g_rows.unflatten(1, (size, m)), g_v, g_beta, g_decay)
