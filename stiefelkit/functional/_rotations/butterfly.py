"""Meshes of plane rotations in the pattern of the fast Fourier transform, as elementwise products of small factors.

From an input to an output, bits i_1 i_2 ... and o_1 o_2 ..., highest first, there is one path, so an entry of the
matrix is a product of one number a layer. Some layers in a row that turn bits i into o make a factor [b, o, i, r],
where b are the bits already turned and r those still to turn; two of them in a row make the factor
[b, oo', ii', r] = X[b, o, i, i'r] Y[bo, o', i', r].
"""

from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_differentiated
from stiefelkit.errors import ShapeError, needs
from stiefelkit.functional._arithmetic.function import Context, Function, keep
from stiefelkit.functional._arithmetic.product import bilinear_tangent, product
from stiefelkit.functional._packing import check_complex, check_size, check_square, rotations
from stiefelkit.functional._rotations.brickwall import check_angles
from stiefelkit.numbers import check_counts
from stiefelkit.tensors import check_tensors, dtype_of_parts


def butterfly(
    angle: Tensor, d: Tensor, phase: Tensor | None = None, *, n: int, dtype: torch.dtype | None = None
) -> Tensor:
    r"""Returns :math:`D F_k ... F_2 F_1`, :math:`k = log_2 n`: layers of rotations at the distances n/2, n/4, ..., 1.

    Each rotation of the rows :math:`(q, q + n / 2^i)` is :math:`[[cos t, -e^{i f} sin t], [sin t, e^{i f} cos t]]`,
    with :math:`f = 0` in a real mesh. Those of layer i come in the order of EURNN: pairs
    :math:`(2 c b + r, 2 c b + r + c)`, :math:`c = n / 2^i`, b fastest.

    Costs one pass over W, (*, n, n), forward and two backward. Differentiable any number of times.

    Args:
        angle: t in radians, layer by layer, shape (*, n / 2 log2(n)), float32 or float64: W has its precision.
        d: the diagonal of D, shape (*, n), real or complex, which makes W complex.
        phase: f, shape of the angles, makes W complex.
        n: a power of two.
        dtype: W is rounded to it once; that of the factors when None.
    """
    check_tensors("butterfly", angle, d)
    check_counts("butterfly", n=n)
    _check("butterfly", n, angle, phase)
    check_size("butterfly", "a diagonal", d, n)
    high, low = _factors(angle, phase, n)
    wide = dtype_of_parts(low.dtype, True) if d.is_complex() and not low.is_complex() else low.dtype
    if dtype is not None and wide.is_complex:
        check_complex("butterfly", dtype, d if phase is None else phase)
    high, low = high.to(wide), low * d.to(wide).reshape(*d.shape[:-1], *low.shape[-4:-2], 1, 1)
    if n == 1:
        return (low * high).flatten(-3).to(dtype)
    return _Outer.of(high, low, low.dtype if dtype is None else dtype)


def rotate_butterfly(x: Tensor, angle: Tensor, phase: Tensor | None = None) -> Tensor:
    """Returns rows :math:`W x` of rows x, (m, n), W one `butterfly` of :math:`D = I`, its dtype, `angle` and `phase`.

    Takes :math:`n^{1.5}` operations a row. Angles are in radians, of shape (n / 2 log2(n),).
    """
    check_tensors("rotate_butterfly", x, angle)
    _check("rotate_butterfly", x.shape[-1] if x.dim() else 0, angle, phase)
    check_complex("rotate_butterfly", x.dtype, phase)
    high, low = _factors(angle, phase, x.shape[-1])
    z = product(high[0].movedim(-1, 0), x.unflatten(-1, (-1, high.shape[-1])).movedim(0, -1).transpose(0, 1))
    return product(low[..., 0], z.transpose(0, 1)).flatten(0, 1).T


def _check(who: str, n: int, angle: Tensor | None = None, phase: Tensor | None = None) -> None:
    if n & (n - 1) or not n:
        needs(False, ShapeError, who, "n to be a power of two", n)
    if angle is not None:
        check_angles(who, angle, phase, n // 2 * (n.bit_length() - 1))


def _factors(angle: Tensor, phase: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
    """Returns the first half of the layers, (*, 1, n1, n1, n2), and the second, (*, n1, n2, n2, 1), n1 n2 = n."""
    layers = n.bit_length() - 1
    gates = rotations(angle, phase, -2)
    if not layers:
        # No rotations, yet connected to the empty coordinates.
        one = (gates.sum((-2, -1)) + 1)[..., None, None, None, None]
        return one, one

    def factor(first: int, last: int) -> Tensor:
        if last - first == 1:
            layer = gates[..., first * n // 2 : last * n // 2].unflatten(-1, (-1, 1 << first))
            return layer.movedim(-1, -3).unflatten(-2, (2, 2))
        middle = (first + last) // 2
        x, y = _aligned(factor(first, middle), factor(middle, last))
        return (x * y).flatten(-3, -2).flatten(-4, -3)

    if layers == 1:
        return gates.new_ones(1, 1, 1, 2), factor(0, 1)
    return factor(0, layers // 2), factor(layers // 2, layers)


def _aligned(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two factors in a row as (*, b, o, o', i, i', r), to be multiplied."""
    x = x.unflatten(-1, (-1, y.shape[-1])).unsqueeze(-4)
    return x, y.unflatten(-4, (-1, x.shape[-5])).unsqueeze(-3)


class _Outer(Function):
    """The last product, (n1 n2)^2 entries in a dtype, in which the backward sums."""

    @staticmethod
    def forward(high: Tensor, low: Tensor, dtype: torch.dtype) -> Tensor:
        x, y = _aligned(high, low)
        w = (x * y).to(dtype)
        return w.squeeze(-1).squeeze(-5).flatten(-2).flatten(-3, -2)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        high, low, _ = inputs
        keep(ctx, high, low)
        ctx.dtype = output.dtype

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        high, low = ctx.saved_tensors
        x, y = _aligned(high.to(g.dtype).conj(), low.to(g.dtype).conj())
        n1, n2 = x.shape[-3], x.shape[-2]
        g = g.unflatten(-1, (n1, n2)).unflatten(-3, (n1, n2)).unsqueeze(-5).unsqueeze(-1)
        g_high = _summed(g, y, -4).flatten(-2).to(high.dtype)
        g_low = _summed(g, x, -3).flatten(-5, -4).to(low.dtype)
        return g_high.sum_to_size(high.shape), g_low.sum_to_size(low.shape), None

    @staticmethod
    def tangent(ctx: Context, th: Tensor | None, tl: Tensor | None, _: None) -> Tensor:
        high, low = ctx.saved_tensors
        return bilinear_tangent(lambda high, low: _Outer.of(high, low, ctx.dtype), high, low, th, tl)


def _summed(g: Tensor, other: Tensor, dim: int) -> Tensor:
    """Sums g times the other over dim, without the whole product in memory unless a derivative has to pass."""
    if is_differentiated():
        return (g * other).sum(dim)
    parts = list(zip(g.unbind(dim), other.resolve_conj().unbind(dim), strict=True))
    out = parts[0][0] * parts[0][1]
    for a, b in parts[1:]:
        out = out.addcmul_(a, b)
    return out


def butterfly_inverse(w: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Finds angles, phases and a diagonal with :math:`W = D F_k ... F_1`, layer by layer, for W in the image.

    The halves of :math:`W = (U_0 + U_1) F_1`, a direct sum times rotations of the columns :math:`(q, q + n / 2)`, give
    the cosines as norms of their columns.

    Args:
        w: matrices of shape (*, n, n), n a power of two, float64 or complex128, in the image.

    Returns:
        Angles in :math:`[-π/2, π/2]`, phases (None if W is real), and the diagonal D, (*, n), signs if W is real.
    """
    check_square("butterfly_inverse", w)
    _check("butterfly_inverse", w.shape[-1])
    blocks = w.unsqueeze(-3)
    angles, phases = [blocks[..., 0, 0, :0].real], [blocks[..., 0, 0, :0].real]
    while blocks.shape[-1] > 1:
        half = blocks.shape[-1] // 2
        (w00, w10), (w01, w11) = (side.split(half, dim=-2) for side in blocks.split(half, dim=-1))
        s = torch.linalg.vector_norm(torch.cat([w10, w01], dim=-2), dim=-2, keepdim=True)
        c = torch.linalg.vector_norm(torch.cat([w00, w11], dim=-2), dim=-2, keepdim=True)
        t = torch.atan2(s, c)
        s, c = t.sin(), t.cos()
        e = (w10.conj() * w11 - w00.conj() * w01).sum(dim=-2, keepdim=True).sgn()
        e = torch.where(e == 0, 1.0, e)
        if not w.is_complex():
            t, s, e = t * e, s * e, torch.ones_like(e)
        angles.append(t.squeeze(-2).mT.flatten(-2))
        phases.append(e.angle().squeeze(-2).mT.flatten(-2))
        blocks = torch.stack([w00 * c - w01 * e.conj() * s, w10 * s + w11 * e.conj() * c], dim=-3).flatten(-4, -3)
    return torch.cat(angles, dim=-1), torch.cat(phases, dim=-1) if w.is_complex() else None, blocks[..., 0, 0].sgn()
