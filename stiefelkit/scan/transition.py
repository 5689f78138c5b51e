"""A layer of rotations with its weights, run by few programs of a GPU: what they compute, and the road to them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stiefelkit._torch import is_in_forward_mode
from stiefelkit.functional._arithmetic.function import Context, Function
from stiefelkit.functional._arithmetic.product import is_plain, opaque
from stiefelkit.functional._kernels.launch import start
from stiefelkit.scan.engines.planes import on_gpu
from stiefelkit.scan.engines.triton import PACKAGE

BLOCK = 1024
"""Numbers that a program takes at a time."""


class Transition(NamedTuple):
    """The weights of `RotationRNN` in one layer and direction, as it holds them; None for those that it has not."""

    u: Tensor
    angle: Tensor
    bias: Tensor | None
    basis: Tensor | None
    rate: Tensor | None
    scale: Tensor | None


def angles_of(turns: Tensor, logarithms: bool) -> Tensor:
    """Returns angles in float64."""
    return turns.double().exp() if logarithms else turns.double()


def plain_weights(w: Transition, heads: int, normalize: bool, logarithms: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Returns U^T, scaled for each head, with the bias as a last row, and angles and decays of planes in float64."""
    u, angle = w.u, angles_of(w.angle, logarithms)
    g = torch.ones_like(angle)
    if w.rate is not None:
        # Beyond these bounds a decay is 0 or 1 in float64.
        rate = w.rate.double().clamp(-600, 100).exp()
        g = torch.exp(-rate).repeat_interleave(len(angle) // heads)
        if w.scale is not None:
            u = (u.unflatten(0, (heads, -1)) * torch.exp(w.scale.to(u.dtype))[:, None, None]).flatten(0, 1)
        elif normalize:
            u = _normalized(u.unflatten(0, (heads, -1)), rate).flatten(0, 1)
    return (u.mT if w.bias is None else torch.cat([u.mT, w.bias.to(u.dtype)[None]])), angle, g


def _normalized(u: Tensor, rate: Tensor) -> Tensor:
    """Returns inputs of each head, (heads, d, m), of length √(1 - g^2), for a decay g that may round to one."""
    # The result depends on no scale of u: its largest number is divided out first.
    parts = torch.view_as_real(u).flatten(-2) if u.is_complex() else u
    largest = parts.detach().abs().amax((1, 2), keepdim=True)
    is_zero = largest == 0
    parts = parts / torch.where(is_zero, 1, largest)
    size = torch.where(is_zero, 1, parts.square().sum((1, 2), keepdim=True)).sqrt()
    parts = parts / size * (-torch.expm1(-2 * rate)).sqrt().to(parts.dtype)[:, None, None]
    return torch.view_as_complex(parts.unflatten(-1, (-1, 2))) if u.is_complex() else parts


Plain = Callable[..., tuple[Tensor | None, Tensor]]
"""Runs inputs through a `Transition`, handed over as tensors, by operators of torch."""


def takes(x: Tensor, weights: Transition) -> bool:
    """Returns whether programs run inputs through a layer: in eager mode, in float32, with real states."""
    held = [x, *(t for t in weights if t is not None)]
    return all(t.dtype == torch.float32 for t in held) and is_plain(*held) and not is_in_forward_mode()


def run(x: Tensor, weights: Transition, settings: tuple[int, bool, bool, bool], plain: Plain) -> tuple[Tensor, Tensor]:
    """Returns all states of a layer, without first ones, and the last; see `plain_weights`.

    Settings are those of `plain_weights` and `reverse`. Derivatives of higher order are those of `plain`.
    """
    out, last, *_ = _Run.of(x, *weights, *settings, plain)
    return out, last


class _Run(Function):
    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        return transition_forward(*args[:-1])

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.settings, ctx.plain = inputs[7:-1], inputs[-1]
        ctx.save_for_backward(*inputs[:7], output[0], *output[2:])
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, g_out: Tensor | None, g_last: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        x, *weights, out, z, rows, factor = ctx.saved_tensors
        needs = ctx.needs_input_grad[: 1 + len(weights)]
        given = [g for g in (g_out, g_last) if g is not None]
        if not given:
            return (None,) * (len(needs) + 5)
        if torch.is_grad_enabled() or not is_plain(*given):
            with torch.enable_grad():
                found = ctx.plain(x, *weights)
            results = [t for t, g in zip(found, (g_out, g_last), strict=True) if g is not None and t is not None]
            wanted = [t for t, needed in zip((x, *weights), needs, strict=True) if needed]
            grads = iter(torch.autograd.grad(results, wanted, given, create_graph=True, allow_unused=True))
            return (*(next(grads) if needed else None for needed in needs), *[None] * 5)
        if g_last is not None:
            end = 0 if ctx.settings[-1] else -1
            g_out = torch.zeros_like(out) if g_out is None else g_out.clone()
            g_out[end] += g_last
        states = out if not z.numel() else z
        found = transition_backward(x, *weights, states, rows, factor, g_out, *ctx.settings, needs[0])
        return (*(t if needed else None for t, needed in zip(found, needs, strict=True)), *[None] * 5)


WEIGHTS = "Tensor x, Tensor u, Tensor angle, Tensor? bias, Tensor? basis, Tensor? rate, Tensor? scale"
SETTINGS = "int heads, bool normalize, bool logarithms, bool reverse"


def _like_forward(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    weights = Transition(*args[:6])
    (n, m), has_bias = weights.u.shape, weights.bias is not None
    out, factor = x.new_empty(*x.shape[:2], n), x.new_empty(len(weights.angle), dtype=torch.complex128)
    z = out.new_empty(0) if weights.basis is None else torch.empty_like(out)
    return out, out.new_empty(out.shape[1:]), z, x.new_empty(n, m + has_bias), factor


@opaque(_like_forward, dims=None, schema=f"({WEIGHTS}, {SETTINGS}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)")
def transition_forward(x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns all states and the last; states in the basis, if there is one; rows of inputs (n, m or m + 1); factors.

    Rows are U, scaled, and beside it the bias, both out of the basis.
    """
    weights, (*settings, reverse) = Transition(*args[:6]), args[6:]
    m, basis = weights.u.shape[1], weights.basis
    out, last, z, rows, factor = _like_forward(x, *args)
    _start("prepare", weights, (), (rows, torch.view_as_real(factor)), (rows.shape[1],), *settings)
    inward = rows.mT if basis is None else by_heads(rows.mT, basis)
    flat = x.flatten(0, 1)
    driven = flat @ inward if weights.bias is None else torch.addmm(inward[m], flat, inward[:m])
    turned, last, _ = on_gpu(planes_of(driven.view(out.shape)), None, factor, reverse, False)
    states, last = (torch.view_as_real(t).flatten(-2) for t in (turned, last))
    if basis is None:
        return states, last, z, rows, factor
    out = by_heads(states.flatten(0, 1), basis.mT).view(out.shape)
    return out, out[0 if reverse else -1].clone(), states, rows, factor


def _like_backward(x: Tensor, *args: Any) -> list[Tensor]:
    return [x.new_empty(0) if t is None else torch.empty_like(t) for t in (x, *args[:6])]


@opaque(
    _like_backward,
    dims=None,
    schema=f"({WEIGHTS}, Tensor z, Tensor rows, Tensor factor, Tensor g, {SETTINGS}, bool needs_x) -> Tensor[]",
)
def transition_backward(x: Tensor, *args: Any) -> list[Tensor]:
    """Returns the gradients by inputs and weights, empty where there is none, from those by all states."""
    weights, (z, rows, factor, g, *settings, reverse, needs_x) = Transition(*args[:6]), args[6:]
    (n, m), basis = weights.u.shape, weights.basis
    dx, *found = _like_backward(x, *weights)
    flat, g_flat = x.flatten(0, 1), g.reshape(-1, n)
    g_planes = g_flat if basis is None else by_heads(g_flat, basis)
    a, _, pull = on_gpu(planes_of(g_planes.view(g.shape)), None, factor, not reverse, False, states=planes_of(z))
    a = torch.view_as_real(a).view(-1, n)
    g_inward = torch.empty_like(rows.mT, memory_format=torch.contiguous_format)
    torch.mm(flat.mT, a, out=g_inward[:m])
    if weights.bias is not None:
        torch.sum(a, 0, out=g_inward[m])
    g_rows, inward = g_inward.mT, rows.mT
    if basis is not None:
        heads, size = basis.shape[:2]
        parts = g_inward.view(-1, heads, size).transpose(0, 1)  # (heads, m or m + 1, d)
        g_rows = torch.bmm(basis, parts.mT).view(n, -1)
        torch.bmm(g_flat.view(-1, heads, size).permute(1, 2, 0), z.view(-1, heads, size).transpose(0, 1), out=found[3])
        found[3].baddbmm_(rows.view(heads, size, -1), parts)
        inward = by_heads(rows.mT, basis) if needs_x else inward
    assert pull is not None
    results = [None if t is None else found[i] for i, t in enumerate(weights) if i != 3]
    given = g_rows, torch.view_as_real(pull)
    _start("prepare_back", weights, given, results, g_rows.stride(), *settings)
    return [(a @ inward[:m].mT).view(x.shape) if needs_x else dx, *found]


def _start(
    name: str,
    weights: Transition,
    given: Sequence[Tensor],
    results: Sequence[Tensor | None],
    strides: Sequence[int],
    heads: int,
    normalize: bool,
    logarithms: bool,
) -> None:
    """Starts a program of weights, one for each head."""
    u, angle, bias, _, rate, scale = (None if t is None else t.contiguous() for t in weights)
    assert u is not None
    assert angle is not None
    held = (u, angle, bias, rate, scale) if name == "prepare" else (u, angle, rate, scale)
    sizes = u.shape[1], *strides, len(angle) // heads
    fixed = {"NORMALIZE": normalize and rate is not None, "LOGARITHMS": logarithms, "BLOCK": BLOCK, "num_warps": 8}
    start(PACKAGE, name, heads, u, *held, *given, *results, *sizes, **fixed)


def planes_of(h: Tensor) -> Tensor:
    """Returns states (*, n) as complex numbers (*, n / 2), complex ones as they are."""
    return h if h.is_complex() else torch.view_as_complex(h.contiguous().unflatten(-1, (-1, 2)))


def by_heads(rows: Tensor, matrices: Tensor, times: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Tensor:
    """Returns rows (*, n) times one matrix for each head, (heads, d, d)."""
    if len(matrices) == 1:
        return times(rows, matrices[0])
    parts = rows.reshape(-1, *matrices.shape[:2]).transpose(0, 1)
    return times(parts, matrices).transpose(0, 1).reshape(rows.shape)
