"""`reflector_scan`: linear recurrences whose transition is a product of reflections by keys, parallel over time."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_exported, is_in_forward_mode
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
from stiefelkit.functional._arithmetic.product import is_plain
from stiefelkit.functional._arithmetic.reads import may_sync_host
from stiefelkit.numbers import FLAG, integer, optional
from stiefelkit.scan.checks import DTYPES, lengths, row_counts
from stiefelkit.scan.engines.borders import takes_borders
from stiefelkit.scan.engines.reflections import Steps, chunked, one_by_one
from stiefelkit.scan.engines.triton import unsupported_device

REFLECTOR_BACKENDS = ("auto", "reference", "chunks", "triton")
"""Names that `reflector_scan` takes as `backend`."""
TAUS = ("exact", "gated", "free")
"""Names that `reflector_scan` takes as `tau`."""


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
    sizes = row_counts(who, batch_sizes)
    if sizes is not None:
        lead = next(t for t in (q, v, k) if t is not None)
        lengths(who, lead.flatten(1), sizes)
        given |= {name: None if given[name] is None else given[name].unsqueeze(0) for name in list(given)[:5]}
    steps = _checked(who, tau, *list(given.values())[:5])
    _check_values(who, tau, steps)
    first, is_vector = _first(who, steps, initial, None if sizes is None else sizes[0])
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
    times = None
    if batch_sizes is not None:
        # Behind its end a sequence has zero keys and values, which change no state.
        sizes = torch.tensor(batch_sizes, device=first.device)
        times = torch.arange(batch_sizes[0], device=first.device) < sizes[:, None]
        steps = steps.each(lambda t: _unpacked(t[0], times))
    if reverse:
        steps = steps.each(lambda t: t.flip(1))
    if is_exported() or backend == "reference" or (not torch.compiler.is_compiling() and is_in_forward_mode()):
        out, last = one_by_one(steps, first, tau)
        last = last.to(torch.promote_types(dtype, torch.float32))
    else:
        fits = takes_borders(first)
        if backend == "triton":
            flaw = unsupported_device(first.device) or (None if fits else f"D at most 128, got {first.shape[-2]}")
            if flaw is not None:
                raise OptionError(f'reflector_scan with backend="triton" needs {flaw}.')
        how = "triton" if fits and (backend == "triton" or (backend == "auto" and first.is_cuda)) else "chunks"
        out, last = chunked(steps, first, tau, chunk, last_only, dtype, how)
    if last_only:
        return None, last
    out = out.flip(1) if reverse else out
    return (out if times is None else out.transpose(0, 1)[times].unsqueeze(0)).to(dtype), last


def _unpacked(t: Tensor, times: Tensor) -> Tensor:
    return t.new_zeros(*times.shape, *t.shape[1:]).index_put((times,), t).transpose(0, 1)


def _checked(
    who: str,
    tau: str,
    q: Tensor | None,
    k: Tensor,
    v: Tensor | None,
    beta: Tensor | None,
    decay: Tensor | None,
) -> Steps:
    """Returns tensors of the shapes of `Steps`, a vector state as a matrix of one column."""
    leading = next((t for t in (q, v if q is None else None, decay) if t is not None), None)
    needs(k.dim() in (4, 5), ShapeError, who, "k of shape (B, T, m, H, D) or (B, T m, H, D)", tuple(k.shape))
    if k.dim() == 4:
        steps = k.shape[1] if leading is None else leading.shape[1]
        whole = steps > 0 and k.shape[1] % steps == 0 and k.shape[1] > 0
        needs(whole, ShapeError, who, "k with m >= 1 keys a step", f"{k.shape[1]} keys of {steps} steps")
        k = k.unflatten(1, (steps, -1))
    batch, steps, m, heads, width = k.shape
    needs(min(k.shape[1:]) > 0, ShapeError, who, "k with T, m, H and D >= 1", tuple(k.shape))
    folded: dict[str, Tensor | None] = {"v": v, "beta": beta}
    for name, dims in (("v", 5), ("beta", 4)) if q is not None else (("beta", 4),):
        t = folded[name]
        if t is not None and t.dim() == dims - 1 and (name == "v" or tau == "free") and t.shape[1] == steps * m:
            folded[name] = t.unflatten(1, (steps, m))
    v, beta = folded.values()
    needs(q is None or v is not None, OptionError, who, "values v for queries", "None")
    if q is not None:
        assert v is not None
        _require(who, "q", q, (batch, steps, heads, width))
        _require(who, "v", v, (batch, steps, m, heads, v.shape[-1]))
    elif v is not None:
        v = v if v.dim() == 5 else v.unsqueeze(-1)
        _require(who, "v", v, (batch, steps, heads, width, v.shape[-1]))
    if tau == "exact":
        needs(beta is None, OptionError, who, 'no beta with tau="exact"', "one")
    else:
        wanted = (batch, steps, heads) if tau == "gated" else (batch, steps, m, heads)
        needs(beta is not None, OptionError, who, f'beta of shape {wanted} with tau="{tau}"', "None")
        assert beta is not None
        _require(who, "beta", beta, wanted)
    if decay is not None:
        _require(who, "decay", decay, (batch, steps, heads))
    return Steps(q, k, v, beta, decay)


def _require(who: str, name: str, t: Tensor, shape: tuple[int, ...]) -> None:
    if t.dim() != len(shape) or any(a != b for a, b in zip(t.shape, shape, strict=True)):
        raise ShapeError(f"{who} needs {name} of shape {shape}, got {tuple(t.shape)}.")


def _check_values(who: str, tau: str, steps: Steps) -> None:
    """Raises for numbers that are none, or a beta out of range, where reading them holds no device up."""
    present = [t for t in steps if t is not None]
    if not (all(map(may_sync_host, present)) and is_plain(*present)):
        return
    for name, t in steps._asdict().items():
        if t is not None and name != "decay" and t.numel():
            # A sum is infinite or NaN if a number is.
            is_finite = bool(t.detach().sum(dtype=torch.float64).isfinite())
            needs(is_finite, NonFiniteError, who, f"finite numbers in {name}", "NaN or infinity")
    if steps.decay is not None:
        needs(not bool(steps.decay.isnan().any()), NonFiniteError, who, "numbers in decay", "NaN")
    if steps.beta is not None and steps.beta.numel():
        most, (low, high) = (1 if tau == "gated" else 2), (x.item() for x in steps.beta.detach().aminmax())
        fits = 0 <= low and high <= most
        needs(fits, OptionError, who, f'beta between 0 and {most} with tau="{tau}"', f"{low:.4g} to {high:.4g}")


def _first(who: str, steps: Steps, initial: Tensor | None, batch: int | None) -> tuple[Tensor, bool]:
    """Returns the first state (B, H, D, V), and whether states are vectors."""
    k, v = steps.k, steps.v
    batch = k.shape[0] if batch is None else batch
    head = batch, k.shape[3], k.shape[4]
    if initial is None:
        needs(v is not None, OptionError, who, "an initial state if nothing is added to it", "None")
        assert v is not None
        return k.new_zeros(*head, v.shape[-1]), steps.q is None and v.shape[-1] == 1
    is_vector = initial.dim() == 3 and steps.q is None
    state = initial.unsqueeze(-1) if is_vector else initial
    columns = state.shape[-1] if v is None else v.shape[-1]
    _require(who, "initial", state, (*head, columns))
    return state, is_vector
