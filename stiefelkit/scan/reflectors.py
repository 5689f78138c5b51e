"""`reflector_scan`: linear recurrences whose transition is a product of reflections by keys, parallel over time."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_exported, is_exporting, is_in_forward_mode, is_jit_traced, is_traced
from stiefelkit.errors import (
    DtypeError,
    NonFiniteError,
    OptionError,
    ShapeError,
    UnknownNameError,
    did_you_mean,
    needs,
    shown,
)
from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.functional._arithmetic.function import Context, Function
from stiefelkit.functional._arithmetic.product import is_plain
from stiefelkit.numbers import FLAG, integer, optional
from stiefelkit.scan.checks import DTYPES, check_shapes, lengths, row_counts
from stiefelkit.scan.engines.reflections import LEAST, ROWS, Steps, flaw_of_program, reflect, reflect_back
from stiefelkit.scan.reference import exported_loop, loop

REFLECTOR_BACKENDS = ("auto", "reference", "chunks", "triton")
"""Names that `reflector_scan` takes as `backend`."""
TAUS = ("exact", "gated", "free")  # names that `reflector_scan` takes as `tau`


def reflector_scan(
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    initial: Tensor | None = None,
    *,
    tau: str = "exact",
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
    last_only: bool = False,
    chunk: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor]:
    r"""Runs recurrences whose transition is a product of m reflections, :math:`H(k) = I - τ k k^T`, in parallel.

    With queries it is the gated DeltaProduct: before a step the state S, a D x V matrix of each head, is multiplied by
    :math:`e^{decay}`; then each of m keys and values does :math:`S ← H(k) S + τ k v^T`, and the output is
    :math:`S^T q`. Without, values are added: :math:`h_t = e^{decay} H(k_{t,m}) ... H(k_{t,1}) h_{t-1} + v_t`, and
    outputs are the states; with v None nothing is added.

    With "exact" :math:`τ = 2 / |k|^2` of the key as it is stored, in whatever dtype: a reflection always, so that no
    state changes its length however many steps there are. A zero key is the identity, with a finite gradient. All is
    worked out in float64 and rounded once: a triangular solve and products for each chunk of keys (compact WY), and a
    pass over the borders of chunks, forward and back. Forward mode and derivatives of higher order are those of the
    loop; all work with every backend, whatever autocast is set to.

    Args:
        q: queries (B, T, H, D), or None. As all tensors with packed rows: (rows, H, D).
        k: keys (B, T, m, H, D), or (B, T m, H, D), floating.
        v: values (B, T, m, H, V), or (B, T m, H, V); what is added (B, T, H, D), or (B, T, H, D, V) for V states of a
            head, without queries.
        beta: with "gated" (B, T, H) between 0 and 1, with "free" (B, T, m, H) or (B, T m, H) between 0 and 2.
        decay: logarithms of decays (B, T, H); none if left out.
        initial: first state (B, H, D, V), or (B, H, D) of vectors; zero if left out.
        tau: "exact"; "gated", where the last reflection of a step has :math:`τ = 2 beta / |k|^2` and so may have either
            determinant; "free", where :math:`τ = beta`, for keys of unit length: stored in 16 bits they lose it by
            1e-3, and no transition is orthogonal.
        batch_sizes: as in `stiefelkit.scan.scan`.
        reverse: as in `stiefelkit.scan.scan`; the keys of a step stay in their order.
        last_only: return None for the outputs.
        chunk: keys of a chunk; about D, at most 64, when None.
        backend: "auto", the last of these that can do it; "reference", a loop in float64; "chunks", torch operators on
            any device; "triton", these with a kernel for the pass over the borders, CUDA, D at most 128.

    Returns:
        Outputs (B, T, H, V), or states of the shape of v, in the widest of the dtypes of q, k, v and `initial`; and the
        last states, float32 at least.

    References:
        Yang, Wang, Zhang, Shen, Kim, Parallelizing linear transformers with the delta rule over sequence length, 2024.
        Siems, Carstensen, Zela, Hutter, Pontil, Grazzi, DeltaProduct: improving state-tracking in linear RNNs via
        Householder products, NeurIPS 2025.
        Joffrain, Low, Quintana-Orti, van de Geijn, Van Zee, Accumulating Householder transformations, revisited, 2006.

    >>> keys, first = torch.randn(1, 1000, 2, 1, 4).bfloat16(), torch.ones(1, 1, 4)
    >>> _, last = reflector_scan(None, keys, None, initial=first)
    >>> torch.allclose(last.norm(), torch.tensor(2.0), rtol=1e-6)
    True
    """
    who = "reflector_scan"
    if tau not in TAUS:
        raise UnknownNameError(f"{who} has no tau {shown(tau)}{did_you_mean(str(tau), TAUS)}")
    if backend not in REFLECTOR_BACKENDS:
        raise UnknownNameError(f"{who} has no backend {shown(backend)}{did_you_mean(str(backend), REFLECTOR_BACKENDS)}")
    chunk = optional(integer(1)).require(who, "chunk", chunk)
    for name, flag in (("reverse", reverse), ("last_only", last_only)):
        FLAG.require(who, name, flag)
    given = {"q": q, "k": k, "v": v, "beta": beta, "decay": decay, "initial": initial}
    for name, t in given.items():
        needs(t is None or isinstance(t, Tensor), DtypeError, who, f"a tensor {name}", shown(t))
        fits = t is None or (t.dtype in DTYPES and not t.is_complex())
        needs(fits, DtypeError, who, f"{name} of a real floating dtype", t if t is None else t.dtype)
    sizes, batch = row_counts(who, batch_sizes), k.shape[0]
    if sizes is not None:
        lead, batch = next(t for t in (q, v, k) if t is not None), sizes[0]
        lengths(who, lead.flatten(1), sizes)
        given |= {name: None if given[name] is None else given[name].unsqueeze(0) for name in Steps._fields}
    steps, first, is_vector = _checked(who, tau, batch, **given)
    _check_values(who, tau, steps)
    dtype = functools.reduce(torch.promote_types, (t.dtype for t in (q, k, v, initial) if t is not None))
    how: dict[str, Any] = {"batch_sizes": sizes, "reverse": reverse, "last_only": last_only, "backend": backend}
    out, last = scan_reflectors(steps, first, tau, dtype, chunk=chunk, **how)
    if out is not None:
        out = out if sizes is None else out.squeeze(0)
        out = out.squeeze(-1) if is_vector and q is None else out
    return out, last.squeeze(-1) if is_vector else last


def scan_reflectors(
    steps: Steps,
    first: Tensor,
    tau: str,
    dtype: torch.dtype,
    *,
    batch_sizes: Sequence[int] | None,
    reverse: bool,
    last_only: bool,
    backend: str = "auto",
    chunk: int | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Runs `reflector_scan` with outputs of a dtype and no checks; packed rows come, and go, as a batch of one."""
    if batch_sizes is not None:
        # Behind its end a sequence has zero keys and values, which change no state.
        steps = steps.each(lambda t: unpacked(t[0], batch_sizes))
    if reverse:
        steps = steps.each(lambda t: t.flip(1))
    if is_exported() or backend == "reference" or (not torch.compiler.is_compiling() and is_in_forward_mode()):
        out, last = one_by_one(steps, first, tau)
        last = last.to(torch.promote_types(dtype, torch.float32))
    else:
        flaw = None if backend == "chunks" else flaw_of_program(first)
        if backend == "triton" and flaw is not None:
            raise OptionError(f'reflector_scan with backend="triton" needs {flaw}.')
        how = "triton" if flaw is None and (backend == "triton" or (backend == "auto" and first.is_cuda)) else "chunks"
        out, last = chunked(steps, first, tau, chunk, last_only, dtype, how)
    if last_only:
        return None, last
    out = out.flip(1) if reverse else out
    return (out if batch_sizes is None else packed(out, batch_sizes)).to(dtype), last


def chunked(
    steps: Steps, first: Tensor, tau: str, chunk: int | None, last_only: bool, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """Returns outputs, without steps if `last_only`, and the last state, float32 at least.

    The first derivative is worked out in chunks as well; others are those of the loop.
    """
    count, m, _, width = steps.k.shape[1:]
    size = max(1, (min(ROWS, width) if chunk is None else chunk) // m)
    if not is_traced():
        # A divisor of the number of steps, if one is near, so that nothing has to be padded.
        size = min(size, count)
        size = next((s for s in range(size, size // 2, -1) if count % s == 0), size)
    present = [t for t in (first, *steps) if t is not None]
    keep = torch.is_grad_enabled() and is_plain(*present) and any(t.requires_grad for t in present)
    run = _Scan.forward if is_exporting() or is_jit_traced() else _Scan.of
    out, last, *_ = run(first, *steps, tau, size, last_only, dtype, backend, keep)
    return out, last


def one_by_one(steps: Steps, first: Tensor, tau: str) -> tuple[Tensor, Tensor]:
    """Runs one reflection after the other in float64; for ONNX as one node, in float32 if keys and values are."""
    q, k, v, _, decay = steps
    m, state = k.shape[2], tuple(first.shape[1:])
    wide = {name: t.double() for name, t in steps._asdict().items() if t is not None and name != "q"}
    shapes = [t.shape[2:] for t in wide.values()]
    rows = torch.cat([t.flatten(2) for t in wide.values()], -1).transpose(0, 1)

    def step(row: Tensor, flat: Tensor) -> Tensor:
        h = flat.unflatten(-1, state)
        split = row.split([shape.numel() for shape in shapes], -1)
        of = {name: t.unflatten(-1, tuple(shape)) for name, t, shape in zip(wide, split, shapes, strict=True)}
        if decay is not None:
            h = h * of["decay"].clamp_min(LEAST).exp()[..., None, None]
        for i in range(m):
            key = of["k"][:, i]
            square = key.square().sum(-1)
            scale = of["beta"][:, i] if tau == "free" else 2 / square.masked_fill(square == 0, torch.inf)
            if tau == "gated" and i == m - 1:
                scale = scale * of["beta"]
            u = -(key[..., None] * h).sum(-2)
            u = u if q is None else u + of["v"][:, i]
            h = h + key[..., None] * (scale[..., None] * u)[..., None, :]
        return (h if q is not None or v is None else h + of["v"]).flatten(1)

    flat = first.double().flatten(1)
    if is_exported():
        states, last = exported_loop(step, rows.detach(), flat.detach(), False)
    else:
        states, last = loop(step, rows, flat)
    assert states is not None
    states, last = states.transpose(0, 1).unflatten(-1, state), last.unflatten(-1, state)
    return (states if q is None else (states * q.double()[..., None]).sum(-2)), last


class _Scan(Function):
    """The scan with its first derivative by chunks; derivatives of higher order are those of the loop."""

    generate_vmap_rule = False

    @staticmethod
    def forward(first, q, k, v, beta, decay, tau, size, last_only, dtype, backend, keep) -> tuple[Any, ...]:
        return tuple(reflect(first, q, k, v, beta, decay, tau, size, last_only, dtype, backend, keep))

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.tau, ctx.size, ctx.last_only, _, ctx.backend, _ = inputs
        ctx.save_for_backward(*tensors, *output[2:])
        ctx.mark_non_differentiable(*(t for t in output[2:] if t is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, g_out: Tensor | None, g_last: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        first, q, k, v, beta, decay, states, *kept = ctx.saved_tensors
        tensors, g_out = (first, q, k, v, beta, decay), None if ctx.last_only else g_out
        if not is_traced() and (torch.is_grad_enabled() or not is_plain(*tensors, g_out, g_last)):
            grads = _gradients_of_loop(tensors, g_out, g_last, ctx.tau)
        else:
            grads = reflect_back(*tensors, states, g_out, g_last, ctx.tau, ctx.size, ctx.backend, *kept)
        found = iter(grads)
        return (*(None if t is None else next(found) for t in tensors), *(None,) * 6)

    @staticmethod
    def vmap(info, in_dims: tuple[int | None, ...], *args) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def folded(t: Tensor | None, dim: int | None) -> Tensor | None:
            if t is None:
                return None
            return (t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)).flatten(0, 1)

        out, last, states = _Scan.of(*map(folded, args[:6], in_dims), *args[6:])
        one = (info.batch_size, -1)
        return (out.unflatten(0, one), last.unflatten(0, one), states.unflatten(1, one)), (0, 0, 1)


def _gradients_of_loop(
    tensors: tuple[Tensor | None, ...], g_out: Tensor | None, g_last: Tensor | None, tau: str
) -> list[Tensor]:
    def results(given: dict[str, Tensor]) -> list[Tensor]:
        found = one_by_one(Steps(*map(given.get, Steps._fields)), given["first"], tau)  # type: ignore[arg-type]
        return [t.to(g.dtype) for t, g in zip(found, (g_out, g_last), strict=True) if g is not None]

    given = {name: t for name, t in zip(("first", *Steps._fields), tensors, strict=True) if t is not None}
    pull = torch.func.vjp(results, given)[1]
    return list(pull([g for g in (g_out, g_last) if g is not None])[0].values())


def _times(batch_sizes: Sequence[int], device: torch.device) -> Tensor:
    sizes = torch.tensor(batch_sizes, device=device)
    return torch.arange(batch_sizes[0], device=device) < sizes[:, None]


def unpacked(rows: Tensor, batch_sizes: Sequence[int]) -> Tensor:
    """Returns packed rows as sequences (B, T, ...), zero behind their ends."""
    times = _times(batch_sizes, rows.device)
    return rows.new_zeros(*times.shape, *rows.shape[1:]).index_put((times,), rows).transpose(0, 1)


def packed(t: Tensor, batch_sizes: Sequence[int]) -> Tensor:
    """Returns sequences (B, T, ...) as packed rows, a batch of one."""
    return t.transpose(0, 1)[_times(batch_sizes, t.device)].unsqueeze(0)


def _checked(
    who: str,
    tau: str,
    batch: int,
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor | None,
    decay: Tensor | None,
    initial: Tensor | None,
) -> tuple[Steps, Tensor, bool]:
    """Returns tensors of the shapes of `Steps`, the first state (B, H, D, V), and whether states are vectors."""
    leading = next((t for t in (q, v if q is None else None, decay) if t is not None), None)
    needs(k.dim() in (4, 5), ShapeError, who, "k of shape (B, T, m, H, D) or (B, T m, H, D)", tuple(k.shape))
    if k.dim() == 4:
        count = k.shape[1] if leading is None else leading.shape[1]
        whole = count > 0 and k.shape[1] % count == 0 and k.shape[1] > 0
        needs(whole, ShapeError, who, "k with m >= 1 keys a step", f"{k.shape[1]} keys of {count} steps")
        k = k.unflatten(1, (count, -1))
    rows, count, m, heads, width = k.shape
    needs(min(k.shape[1:]) > 0, ShapeError, who, "k with T, m, H and D >= 1", tuple(k.shape))
    of_steps, of_keys = (rows, count, heads), (rows, count, m, heads)
    gates = of_keys if tau == "free" else of_steps
    if tau == "exact":
        needs(beta is None, OptionError, who, 'no beta with tau="exact"', "one")
    else:
        needs(beta is not None, OptionError, who, f'beta of shape {gates} with tau="{tau}"', "None")
    needs(q is None or v is not None, OptionError, who, "values v for queries", "None")
    needs(v is not None or initial is not None, OptionError, who, "an initial state if nothing is added to it", "None")

    def by_step(t: Tensor | None, dims: int) -> Tensor | None:
        return t if t is None or t.dim() >= dims or t.shape[1] != count * m else t.unflatten(1, (count, m))

    if q is not None:
        v = by_step(v, 5)
    elif v is not None and v.dim() == 4:
        v = v.unsqueeze(-1)
    beta = by_step(beta, 4) if tau == "free" else beta
    is_vector = q is None and (initial.dim() == 3 if initial is not None else v is not None and v.shape[-1] == 1)
    state = initial.unsqueeze(-1) if is_vector and initial is not None else initial
    like = state if v is None else v
    assert like is not None
    columns = like.shape[-1]
    wanted = {"q": (q, (*of_steps, width)), "v": (v, (*(of_keys if q is not None else (*of_steps, width)), columns))}
    first = batch, heads, width, columns
    check_shapes(who, **wanted, beta=(beta, gates), decay=(decay, of_steps), initial=(state, first))
    return Steps(q, k, v, beta, decay), k.new_zeros(first) if state is None else state, is_vector


def _check_values(who: str, tau: str, steps: Steps) -> None:
    """Raises for numbers that are none, or a beta out of range, where reading them holds no device up."""
    present = [t for t in steps if t is not None]
    if not (all(map(may_sync_host, present)) and is_plain(*present)):
        return
    for name, t in steps._asdict().items():
        if t is not None:
            # A sum is infinite or NaN if a number is; a decay may be zero, of the logarithm -infinity.
            total = t.detach().sum(dtype=torch.float64)
            is_fit = not total.isnan() if name == "decay" else total.isfinite()
            needs(bool(is_fit), NonFiniteError, who, f"finite numbers in {name}", "NaN or infinity")
    if steps.beta is not None and steps.beta.numel():
        most, (low, high) = (1 if tau == "gated" else 2), (x.item() for x in steps.beta.detach().aminmax())
        fits = 0 <= low and high <= most
        needs(fits, OptionError, who, f'beta between 0 and {most} with tau="{tau}"', f"{low:.4g} to {high:.4g}")
