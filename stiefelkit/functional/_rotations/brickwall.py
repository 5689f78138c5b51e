"""Meshes of plane rotations in a brick pattern, applied in blocks, their exact backward.

Layers of rotations of neighbouring wires alternate between the pairs (0, 1), (2, 3), ... and (1, 2), (3, 4), ... . The
rotations are joined, four by four, into diamonds, matrices of 2m wires that stand for m^2 rotations. Diamonds of one
row act on disjoint wires, and a few rows of them make the mesh.

The backward saves the rotated matrix alone. With H = g y^H behind a unitary factor F and K = H - H^H, the derivative
along a rotation of (p, q) is Re K[q, p] right behind it, and K in front of F is F^H K F: matrices are taken back from
row to row, and K from a diamond to its four quarters.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_view
from stiefelkit.functional._arithmetic.function import Function, keep, transposed
from stiefelkit.functional._arithmetic.product import opaque
from stiefelkit.functional._rotations.diamonds import diamonds, flush, multiply, quartered
from stiefelkit.functional._rotations.plan import Plan
from stiefelkit.numbers import check_counts
from stiefelkit.tensors import check_tensors

__all__ = ["brickwall"]


def brickwall(x: Tensor, angle: Tensor, phase: Tensor | None = None, *, layers: int) -> Tensor:
    r"""Returns F_L ... F_2 F_1 X for L layers of rotations in a brick pattern.

    F_1 rotates the rows (0, 1), (2, 3), ..., F_2 the rows (1, 2), (3, 4), ..., and so on in turns; each rotation is
    [[cos t, -e^{i f} sin t], [sin t, e^{i f} cos t]], with f = 0 in a real mesh.

    Costs about 2 layers / n products of the size of X forward and 6 backward; saves the result and the angles, nothing
    between the layers. Works in the dtype of X; entries below eps^2, which products of many sines fall to, count as
    zero, since some processors take many times as long for those below 1e-38.

    Args:
        x: matrices of shape (*, n, p), float32, float64, complex64 or complex128.
        angle: t in radians, layer by layer from the top, shape (*, mesh_size(n, layers)), float32 or float64.
        phase: f, same shape; needs a complex X. Zero when None.
        layers: number of layers.

    Returns:
        Tensor of the shape (batch dimensions broadcast) and dtype of X.
    """
    check_tensors("brickwall", x, angle)
    check_counts("brickwall", layers=layers)
    batch = torch.broadcast_shapes(x.shape[:-2], angle.shape[:-1])
    x, angle = x.expand(*batch, *x.shape[-2:]), angle.expand(*batch, angle.shape[-1])
    if phase is not None:
        phase = phase.expand(*batch, phase.shape[-1])
    elif x.is_complex():
        phase = torch.zeros_like(angle)
    return _Brickwall.apply(x, angle, phase, layers)  # type: ignore[return-value]


class _Brickwall(Function):
    @staticmethod
    def forward(x: Tensor, angle: Tensor, phase: Tensor | None, layers: int) -> Tensor:  # type: ignore[override]
        return _rotated(x, angle, phase, layers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, angle, phase, ctx.layers = inputs
        keep(ctx, output, angle, phase)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y, angle, phase = ctx.saved_tensors
        # Second derivatives come from differentiating the formulas of the first.
        differentiable = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        pull_back = _gradients if differentiable else _brickwall_gradients
        gx, g_angle, g_phase = pull_back(g, y, angle, phase, ctx.layers, ctx.needs_input_grad[0])
        return gx if ctx.needs_input_grad[0] else None, g_angle, None if phase is None else g_phase, None

    @staticmethod
    def tangent(ctx: Any, tx: Tensor | None, ta: Tensor | None, tp: Tensor | None, _: None) -> Tensor:  # type: ignore[override]
        y, angle, phase = ctx.saved_tensors
        ty = torch.zeros_like(y) if tx is None else _Brickwall.apply(tx, angle, phase, ctx.layers)
        if ta is None and tp is None:
            return ty  # type: ignore[return-value]

        def pull_back(g: Tensor) -> tuple[Tensor, ...]:
            return _gradients(g, y, angle, phase, ctx.layers, False)[1 : 2 if phase is None else 3]

        return ty + transposed(pull_back, y, *(ta, tp)[: 1 if phase is None else 2])  # type: ignore[operator, return-value]


@opaque(lambda x, angle, phase, layers: x.new_empty(x.shape))
def _rotated(x: Tensor, angle: Tensor, phase: Tensor | None, layers: int) -> Tensor:
    n = x.shape[-2]
    plan = Plan.of(n, layers)
    rows = plan.rows_of(diamonds(angle, phase, plan, x.dtype)[-1])
    z = plan.pad(x)
    for t, s in enumerate(rows):
        z = flush(plan.unroll(torch.bmm(s, plan.cut(plan.roll(z, t))), t))
    y = z[:, :n].reshape(x.shape)
    return y.clone() if is_view(y) else y  # forward mode would take a view for one of X


def _gradients(
    g: Tensor, y: Tensor, angle: Tensor, phase: Tensor | None, layers: int, with_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of X (empty unless asked for), angles and phases (empty if there are none)."""
    n, p = y.shape[-2:]
    plan = Plan.of(n, layers)
    levels = diamonds(angle, phase, plan, y.dtype)
    rows = plan.rows_of(levels[-1])
    gx = y.new_empty((*y.shape[:-2], 0, 0))
    # In multiples of n: the factors take 6 L p, K takes n p + 4 L n.
    if with_x or n * p >= layers * (6 * p - 4 * n):
        k, z = _by_factors(plan, rows, g, y, with_x)
        gx = z.reshape(y.shape) if with_x else gx
    else:
        k = _by_conjugation(plan, rows, g, y)
    k = quartered(k, levels).movedim(0, -1)
    g_angle = plan.gather(k[1, 0].real if k.is_complex() else k[1, 0], angle)
    if phase is None:
        g_phase = g_angle.new_empty((*angle.shape[:-1], 0))
    else:
        (c, _), (s, _), i = *levels[0].movedim(0, -1).real, k.imag
        g_phase = plan.gather((s * s * i[0, 0] + c * c * i[1, 1]) / 2 - s * c * i[1, 0], angle)
    return gx, g_angle, g_phase


@opaque(
    lambda g, y, angle, phase, layers, with_x: (
        torch.empty_like(y) if with_x else y.new_empty((*y.shape[:-2], 0, 0)),
        angle.new_empty(angle.shape),
        angle.new_empty(angle.shape if phase is not None else (*angle.shape[:-1], 0)),
    )
)
def _brickwall_gradients(
    g: Tensor, y: Tensor, angle: Tensor, phase: Tensor | None, layers: int, with_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(g, y, angle, phase, layers, with_x)


def _by_factors(plan: Plan, rows: Sequence[Tensor], g: Tensor, y: Tensor, with_x: bool) -> tuple[Tensor, Tensor]:
    """K behind every diamond of the rows, from G and Y taken back through them; and G in front, if asked for."""
    z, ks = [plan.pad(g), plan.pad(y)], []
    for t, s in reversed(list(enumerate(rows))):
        z = [plan.cut(plan.roll(v, t)) for v in z]
        h = multiply(z[0], z[1].mH)
        ks.append(h - h.mH)
        if t or with_x:
            z = [plan.unroll(multiply(s.mH, v), t) for v in z]
    return torch.cat(ks[::-1]), z[0][:, : plan.n]


def _by_conjugation(plan: Plan, rows: Sequence[Tensor], g: Tensor, y: Tensor) -> Tensor:
    """K behind every diamond of the rows, as blocks of the whole K taken back through them."""
    h = multiply(g.reshape(-1, *g.shape[-2:]), y.reshape(-1, *y.shape[-2:]).mH)
    h = plan.pad(plan.pad(h).mH)
    k, sign, ks = h.mH - h, 1, []
    for t, s in reversed(list(enumerate(rows))):
        k = k.roll((plan.m, plan.m), (-2, -1)) if t % 2 else k
        ks.append(sign * plan.diagonal(k))
        if t:
            # F^H (F^H K)^H = -F^H K F
            k = multiply(s.mH, plan.cut(k)).reshape(k.shape).mH
            k, sign = multiply(s.mH, plan.cut(k)).reshape(k.shape), -sign
            k = k.roll((-plan.m, -plan.m), (-2, -1)) if t % 2 else k
    return torch.cat(ks[::-1])
