"""A layer of rotations with its weights, run by few programs of a GPU: what they compute, and the road to them."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stiefelkit._torch import is_in_forward_mode
from stiefelkit.functional._arithmetic.function import Context, Function
from stiefelkit.functional._arithmetic.product import FullPrecision, is_plain, product
from stiefelkit.functional._kernels.launch import start
from stiefelkit.scan.engines.planes import on_gpu, planes_of
from stiefelkit.scan.engines.triton import PACKAGE

BLOCK = 1024  # numbers that a program takes at a time


class Transition(NamedTuple):
    """The weights of `RotationRNN` in one layer and direction, None for those that it has not; and what it does."""

    u: Tensor
    angle: Tensor
    bias: Tensor | None
    basis: Tensor | None
    rate: Tensor | None
    scale: Tensor | None
    heads: int
    normalize: bool
    logarithms: bool


def plain_weights(w: Transition) -> tuple[Tensor, Tensor, Tensor]:
    """Returns U^T, scaled for each head, with the bias as a last row, and angles and decays of planes in float64."""
    u, heads = w.u, w.heads
    angle = w.angle.double().exp() if w.logarithms else w.angle.double()
    g = torch.ones_like(angle)
    if w.rate is not None:
        # Beyond these bounds a decay is 0 or 1 in float64.
        rate = w.rate.double().clamp(-600, 100).exp()
        g = torch.exp(-rate).repeat_interleave(len(angle) // heads)
        if w.scale is not None:
            u = (u.unflatten(0, (heads, -1)) * torch.exp(w.scale.to(u.dtype))[:, None, None]).flatten(0, 1)
        elif w.normalize:
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


def takes(x: Tensor, weights: Transition) -> bool:
    """Returns whether programs run inputs through a layer: in eager mode, in float32, with real states."""
    held = [x, *(t for t in weights[:6] if t is not None)]
    return all(t.dtype == torch.float32 for t in held) and is_plain(*held) and not is_in_forward_mode()


def run(x: Tensor, weights: Transition, reverse: bool, plain: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Returns all states of a layer, without first ones, and the last; its derivatives are of first order.

    Those of higher order are of `plain`, which takes inputs and the tensors of weights, by operators of torch.
    """
    out, last, *_ = _Run.of(x, *weights, reverse, plain)
    return out, last


class _Run(Function):
    @staticmethod
    def forward(x: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
        *weights, reverse, _ = args
        with FullPrecision(x.device):
            return transition_forward(x, Transition(*weights), reverse)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        out, _, z, *parts = output
        ctx.settings, ctx.reverse, ctx.plain = inputs[7:-2], *inputs[-2:]
        ctx.save_for_backward(*inputs[:7], out if z is None else z, *parts)
        ctx.mark_non_differentiable(*(t for t in output[2:] if t is not None))
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, g_out: Tensor | None, g_last: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        x, *weights, states, rows, factor = ctx.saved_tensors
        needs, unneeded = ctx.needs_input_grad[:7], (None,) * 5
        given = [g for g in (g_out, g_last) if g is not None]
        if not given:
            return (None,) * 12
        if torch.is_grad_enabled() or not is_plain(*given):
            with torch.enable_grad():
                found = ctx.plain(x, *weights)
            results = [t for t, g in zip(found, (g_out, g_last), strict=True) if g is not None and t is not None]
            wanted = [t for t, needed in zip((x, *weights), needs, strict=True) if needed]
            grads = iter(torch.autograd.grad(results, wanted, given, create_graph=True, allow_unused=True))
            return (*(next(grads) if needed else None for needed in needs), *unneeded)
        g = given[0]
        if g_last is not None:
            g = torch.zeros_like(states) if g_out is None else g_out.clone()
            g[0 if ctx.reverse else -1] += g_last
        with FullPrecision(x.device):
            of_layer = x, Transition(*weights, *ctx.settings)
            found = transition_backward(*of_layer, states, rows, factor, g, ctx.reverse, needs[0])
        return (*(t if needed else None for t, needed in zip(found, needs, strict=True)), *unneeded)


def transition_forward(x: Tensor, weights: Transition, reverse: bool) -> tuple[Tensor | None, ...]:
    """Returns all states and the last; states in the basis, if there is one; rows of inputs (n, m or m + 1); factors.

    Rows are U, scaled, and beside it the bias, both out of the basis.
    """
    (n, m), basis = weights.u.shape, weights.basis
    rows = x.new_empty(n, m + (weights.bias is not None))
    factor = x.new_empty(len(weights.angle), dtype=torch.complex128)
    _start("prepare", weights, (), (rows, torch.view_as_real(factor)), (rows.shape[1],))
    inward, flat = by_heads(rows.mT, basis), x.flatten(0, 1)
    driven = flat @ inward if weights.bias is None else torch.addmm(inward[m], flat, inward[:m])
    turned, last, _ = on_gpu(planes_of(driven.view(*x.shape[:2], n)), None, factor, reverse, False)
    states, last = (torch.view_as_real(t).flatten(-2) for t in (turned, last))
    if basis is None:
        return states, last, None, rows, factor
    out = by_heads(states.flatten(0, 1), basis.mT).view(states.shape)
    return out, out[0 if reverse else -1].clone(), states, rows, factor


def transition_backward(
    x: Tensor, weights: Transition, z: Tensor, rows: Tensor, factor: Tensor, g: Tensor, reverse: bool, needs_x: bool
) -> list[Tensor | None]:
    """Returns the gradients by inputs and weights, None where there is none, from those by all states."""
    (n, m), basis = weights.u.shape, weights.basis
    flat, g_flat = x.flatten(0, 1), g.reshape(-1, n)
    g_planes = planes_of(by_heads(g_flat, basis).view(g.shape))
    a, _, pull = on_gpu(g_planes, None, factor, not reverse, False, states=planes_of(z))
    assert pull is not None
    a = torch.view_as_real(a).view(-1, n)
    g_inward = torch.empty_like(rows.mT, memory_format=torch.contiguous_format)
    torch.mm(flat.mT, a, out=g_inward[:m])
    if weights.bias is not None:
        torch.sum(a, 0, out=g_inward[m])
    g_rows, g_basis = g_inward.mT, None
    if basis is not None:
        heads, size = basis.shape[:2]
        parts = g_inward.view(-1, heads, size).transpose(0, 1)  # (heads, m or m + 1, d)
        g_rows = torch.bmm(basis, parts.mT).view(n, -1)
        g_basis = torch.bmm(g_flat.view(-1, heads, size).permute(1, 2, 0), z.view(-1, heads, size).transpose(0, 1))
        g_basis.baddbmm_(rows.view(heads, size, -1), parts)
    found = [None if t is None else torch.empty_like(t) for i, t in enumerate(weights[:6]) if i != 3]
    _start("prepare_back", weights, (g_rows, torch.view_as_real(pull)), found, g_rows.stride())
    dx = (a @ by_heads(rows.mT, basis)[:m].mT).view(x.shape) if needs_x else None
    return [dx, *found[:3], g_basis, *found[3:]]


def _start(
    name: str, w: Transition, given: Sequence[Tensor], results: Sequence[Tensor | None], strides: Sequence[int]
) -> None:
    held = w.u, w.angle, *((w.bias,) if name == "prepare" else ()), w.rate, w.scale
    contiguous = (None if t is None else t.contiguous() for t in held)
    sizes = w.u.shape[1], *strides, len(w.angle) // w.heads
    fixed = {"NORMALIZE": w.normalize and w.rate is not None, "LOGARITHMS": w.logarithms, "BLOCK": BLOCK}
    start(PACKAGE, name, w.heads, w.u, *contiguous, *given, *results, *sizes, **fixed, num_warps=8)


def by_heads(rows: Tensor, matrices: Tensor | None) -> Tensor:
    """Returns rows (*, n) times one matrix for each head, (heads, d, d), if there are some, in full precision."""
    if matrices is None:
        return rows
    if len(matrices) == 1:
        return product(rows, matrices[0])
    parts = rows.reshape(-1, *matrices.shape[:2]).transpose(0, 1)
    return product(parts, matrices).transpose(0, 1).reshape(rows.shape)
