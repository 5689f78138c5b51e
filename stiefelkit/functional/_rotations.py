"""Meshes of plane rotations in a brick pattern, applied in blocks, their exact backward.

Layers of rotations of neighbouring wires alternate between the pairs (0, 1), (2, 3), ... and (1, 2), (3, 4), ... . The
rotation of wires (q, q + 1) in layer l sits at (u, v) = ((l + q) / 2, (l - q) / 2 - 1) of a lattice in which each
feeds (u + 1, v) and (u, v + 1), so an m x m square of the lattice, a diamond of the mesh, is a matrix of 2m wires.
Four of them make the next larger one, D = (I + A + I)(L + R)(I + B + I) with direct sums; diamonds of one row act on
disjoint wires, and a few rows of large ones, bmm by bmm, make the mesh.

The backward saves the rotated matrix alone. With H = g y^H behind a unitary factor F and K = H - H^H, the derivative
along a rotation of (p, q) is Re K[q, p] right behind it, and K in front of F is F^H K F: matrices are taken back from
row to row, and K from a diamond to its four quarters.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stiefelkit.functional._function import Function
from stiefelkit.functional._product import opaque, product

__all__ = ["brickwall", "mesh_size"]

_MANY = 100
_index: dict[tuple["_Plan", torch.device], Tensor] = {}


def mesh_size(n: int, layers: int) -> int:
    """Number of rotations of the first `layers` layers of a brick pattern on n wires.

    >>> mesh_size(6, 6), mesh_size(7, 7), mesh_size(7, 3)
    (15, 21, 9)
    """
    return (layers + 1) // 2 * (n // 2) + layers // 2 * ((n - 1) // 2)


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
        phase: f, same shape; needs a complex X.
        layers: number of layers.

    Returns:
        Tensor of the shape (batch dimensions broadcast) and dtype of X.
    """
    batch = torch.broadcast_shapes(x.shape[:-2], angle.shape[:-1])
    x, angle = x.expand(*batch, *x.shape[-2:]), angle.expand(*batch, angle.shape[-1])
    if phase is not None:
        phase = phase.expand(*batch, phase.shape[-1])
    return _Brickwall.apply(x, angle, phase, layers)  # type: ignore[return-value]


class _Brickwall(Function):
    @staticmethod
    def forward(x: Tensor, angle: Tensor, phase: Tensor | None, layers: int) -> Tensor:  # type: ignore[override]
        return _rotated(x, angle, phase, layers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, angle, phase, ctx.layers = inputs
        ctx.save_for_backward(output, angle, phase)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        y, angle, phase = ctx.saved_tensors
        # Second derivatives come from differentiating the formulas of the first.
        differentiable = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        pull_back = _gradients if differentiable else _brickwall_gradients
        gx, g_angle, g_phase = pull_back(g, y, angle, phase, ctx.layers, ctx.needs_input_grad[0])
        return gx if ctx.needs_input_grad[0] else None, g_angle, None if phase is None else g_phase, None


@opaque(lambda x, angle, phase, layers: x.new_empty(x.shape))
def _rotated(x: Tensor, angle: Tensor, phase: Tensor | None, layers: int) -> Tensor:
    n = x.shape[-2]
    plan = _Plan.of(n, layers)
    rows = plan.rows_of(_diamonds(angle, phase, plan, x.dtype)[-1])
    z = plan.pad(x)
    for t, s in enumerate(rows):
        z = _flush(plan.unroll(torch.bmm(s, plan.cut(plan.roll(z, t))), t))
    return z[:, :n].reshape(x.shape)


def _gradients(
    g: Tensor, y: Tensor, angle: Tensor, phase: Tensor | None, layers: int, with_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of X (empty unless asked for), angles and phases (empty if there are none)."""
    n, p = y.shape[-2:]
    plan = _Plan.of(n, layers)
    levels = _diamonds(angle, phase, plan, y.dtype)
    rows = plan.rows_of(levels[-1])
    gx = y.new_empty((*y.shape[:-2], 0, 0))
    # In multiples of n: the factors take 6 L p, K takes n p + 4 L n.
    if with_x or n * p >= layers * (6 * p - 4 * n):
        k, z = _by_factors(plan, rows, g, y, with_x)
        gx = z.reshape(y.shape) if with_x else gx
    else:
        k = _by_conjugation(plan, rows, g, y)
    for m, d in reversed(list(plan.levels(levels[:-1]))):
        layout = _layout(m, len(k))
        k = layout.quarter(layout.store(k), d)
    gates = levels[0]
    k = k.movedim(0, -1)
    g_angle = k[1, 0].real if k.is_complex() else k[1, 0]
    g_angle = plan.gather(g_angle, angle)
    if phase is None:
        g_phase = g_angle.new_empty((*angle.shape[:-1], 0))
    else:
        c, s = gates[:, 0, 0].real, gates[:, 1, 0].real
        i = k.imag
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


def _by_factors(plan: "_Plan", rows: Sequence[Tensor], g: Tensor, y: Tensor, with_x: bool) -> tuple[Tensor, Tensor]:
    """K behind every diamond of the rows, from G and Y taken back through them; and G in front, if asked for."""
    z, found = [plan.pad(g), plan.pad(y)], []
    for t, s in reversed(list(enumerate(rows))):
        z = [plan.cut(plan.roll(v, t)) for v in z]
        h = _multiply(z[0], z[1].mH)
        found.append(h - h.mH)
        if t or with_x:
            z = [plan.unroll(_multiply(s.mH, v), t) for v in z]
    return torch.cat(found[::-1]), z[0][:, : plan.n]


def _by_conjugation(plan: "_Plan", rows: Sequence[Tensor], g: Tensor, y: Tensor) -> Tensor:
    """K behind every diamond of the rows, as blocks of the whole K taken back through them."""
    h = _multiply(g.reshape(-1, *g.shape[-2:]), y.reshape(-1, *y.shape[-2:]).mH)
    h = plan.pad(plan.pad(h).mH)
    k, sign, found = h.mH - h, 1, []
    for t, s in reversed(list(enumerate(rows))):
        k = k.roll((plan.m, plan.m), (-2, -1)) if t % 2 else k
        found.append(sign * plan.diagonal(k))
        if t:
            # F^H (F^H K)^H = -F^H K F
            k = _multiply(s.mH, plan.cut(k)).reshape(k.shape).mH
            k, sign = _multiply(s.mH, plan.cut(k)).reshape(k.shape), -sign
            k = k.roll((-plan.m, -plan.m), (-2, -1)) if t % 2 else k
    return torch.cat(found[::-1])


def _flush(x: Tensor) -> Tensor:
    """Puts zeros for entries below eps^2 in place, unless a derivative may have to pass."""
    if torch.is_grad_enabled():
        return x
    parts = torch.view_as_real(x) if x.is_complex() else x
    torch.hardshrink(parts, torch.finfo(x.dtype).eps ** 2, out=parts)
    return x


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    return product(a, b) if torch.is_grad_enabled() else torch.bmm(a, b)


def _diamonds(angle: Tensor, phase: Tensor | None, plan: "_Plan", dtype: torch.dtype) -> list[Tensor]:
    """Diamonds of every size 1, 2, 4, ..., each a tensor (count, 2m, 2m), its four quarters one after another."""
    t = plan.scatter(angle.to(dtype.to_real()))
    c, s = t.cos(), t.sin()
    if phase is None:
        d = torch.stack([torch.stack([c, -s]), torch.stack([s, c])])
    else:
        f = plan.scatter(phase.to(dtype.to_real()))
        e = torch.complex(f.cos(), f.sin())
        d = torch.stack([torch.stack([c + 0j, -e * s]), torch.stack([s + 0j, e * c])])
    levels = [d.movedim(-1, 0)]
    for m in plan.sizes[:-1]:
        layout = _layout(m, len(levels[-1]) // 4)
        levels[-1] = layout.store(levels[-1])
        levels.append(_flush(layout.join(levels[-1])))
    return levels


class _Layout:
    """How many small matrices lie in memory, and what is done with them there."""

    def __init__(self, last: bool):
        self.last = last

    def store(self, d: Tensor) -> Tensor:
        """Puts matrices of another layout into this one."""
        return d.movedim(0, -1).contiguous().movedim(-1, 0) if self.last else d.contiguous()

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        """A @ B, by elementwise products if the matrices are tiny."""
        if not self.last:
            return _multiply(a, b)
        columns, rows = a.movedim(0, -1).unsqueeze(2).unbind(1), b.movedim(0, -1).unbind(0)
        out = columns[0] * rows[0]
        for column, row in zip(columns[1:], rows[1:], strict=True):
            out = torch.addcmul(out, column, row) if torch.is_grad_enabled() else out.addcmul_(column, row)
        return out.movedim(-1, 0)

    def empty(self, like: Tensor, count: int, size: int, columns: int) -> Tensor:
        """Room for matrices."""
        if self.last:
            return like.new_empty(size, columns, count).movedim(-1, 0)
        return like.new_empty(count, size, columns)

    def join(self, d: Tensor) -> Tensor:
        """Makes diamonds of 4m wires from their quarters of 2m wires."""
        m = d.shape[-1] // 2
        b, l, r, a = d.chunk(4)
        out = self.empty(d, len(b), 4 * m, 4 * m)
        out[:, 2 * m :, :m] = 0
        out[:, : 2 * m, 3 * m :] = 0
        out[:, : 2 * m, :m] = l[:, :, :m]
        out[:, : 2 * m, m : 3 * m] = self.times(l[:, :, m:], b[:, :m])
        out[:, 2 * m :, m : 3 * m] = self.times(r[:, :, :m], b[:, m:])
        out[:, 2 * m :, 3 * m :] = r[:, :, m:]
        out[:, m : 3 * m] = self.times(a, _kept(out[:, m : 3 * m]))
        return out

    def quarter(self, k: Tensor, d: Tensor) -> Tensor:
        """Takes K behind diamonds of 4m wires to K behind each of their quarters D; overwrites K."""
        m = d.shape[-1] // 2
        _, l, r, a = d.chunk(4)
        count, inner = len(k), slice(m, 3 * m)
        out = self.empty(k, 4 * count, 2 * m, 2 * m)
        out[3 * count :] = k[:, inner, inner]
        k[:, :, inner] = self.times(_kept(k[:, :, inner]), a)
        k[:, inner] = self.times(a.mH, _kept(k[:, inner]))
        out[count : 2 * count] = k[:, : 2 * m, : 2 * m]
        out[2 * count : 3 * count] = k[:, 2 * m :, 2 * m :]
        l, r = l[:, :, m:], r[:, :, :m]
        z = self.empty(k, count, 4 * m, 2 * m)
        z[:, :, :m] = self.times(k[:, :, : 2 * m], l)
        z[:, :, m:] = self.times(k[:, :, 2 * m :], r)
        out[:count, :m] = self.times(l.mH, z[:, : 2 * m])
        out[:count, m:] = self.times(r.mH, z[:, 2 * m :])
        return out


def _kept(x: Tensor) -> Tensor:
    """What a product may keep for its derivative while X is overwritten."""
    return x.clone() if torch.is_grad_enabled() else x


def _layout(m: int, count: int) -> _Layout:
    """The layout in which many diamonds of size m are joined from, or taken apart into, four."""
    return _Layout(count >= _MANY * m)


@dataclass(frozen=True)
class _Plan:
    """How a mesh is cut into diamonds.

    Rows t = 0, 1, ... of diamonds of size m are centred on the layers tm; even rows cut the wires at multiples of 2m,
    odd ones m further on, where the last diamond wraps around (the rotation at the seam is the identity).
    """

    n: int
    layers: int
    m: int

    @classmethod
    @functools.cache
    def of(cls, n: int, layers: int) -> "_Plan":
        """The plan for a mesh."""
        m = 1
        while 4 * m <= layers and 8 * m <= n and 32 * m <= n + 64:
            m *= 2
        return cls(n, layers, m)

    @property
    def wires(self) -> int:
        """Wires, idle ones included, a multiple of 2m."""
        return -(-self.n // (2 * self.m)) * 2 * self.m

    @property
    def across(self) -> int:
        """Diamonds in a row."""
        return self.wires // (2 * self.m)

    @property
    def rows(self) -> int:
        """Rows of diamonds."""
        return (self.layers - 2) // self.m + 2

    @property
    def sizes(self) -> list[int]:
        """1, 2, 4, ..., m."""
        return [1 << i for i in range(self.m.bit_length())]

    def levels(self, diamonds: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """Pairs of a size and the diamonds of that size."""
        return list(zip(self.sizes, diamonds, strict=False))

    def rows_of(self, d: Tensor) -> Sequence[Tensor]:
        """The diamonds of each row, for matrices of a batch in turn, (batch * across, 2m, 2m)."""
        return d.contiguous().unflatten(0, (self.rows, -1)).unbind()

    def pad(self, x: Tensor) -> Tensor:
        """Flattens the batch and adds the idle wires."""
        x = x.reshape(-1, *x.shape[-2:])
        return F.pad(x, (0, 0, 0, self.wires - self.n)) if self.wires > self.n else x

    def cut(self, z: Tensor) -> Tensor:
        """The rows of Z for each diamond of a row, (batch * across, 2m, p)."""
        return z.reshape(-1, 2 * self.m, z.shape[-1])

    def diagonal(self, k: Tensor) -> Tensor:
        """The diagonal blocks of K, (batch * across, 2m, 2m)."""
        k = k.unflatten(-1, (-1, 2 * self.m)).unflatten(-3, (-1, 2 * self.m))
        return self.cut(k.diagonal(dim1=-4, dim2=-2).movedim(-1, 1))

    def roll(self, z: Tensor, t: int) -> Tensor:
        """Moves the wires so that the diamonds of row t begin at the first."""
        return z.roll(self.m, -2) if t % 2 else z

    def unroll(self, z: Tensor, t: int) -> Tensor:
        """Undoes `cut` and `roll`."""
        z = z.reshape(-1, self.wires, z.shape[-1])
        return z.roll(-self.m, -2) if t % 2 else z

    def scatter(self, v: Tensor) -> Tensor:
        """Puts coordinates (*, d) into the order of the smallest diamonds, zeros where there is no rotation."""
        count = self.m * self.m * self.rows * self.across
        v = v.reshape(v.shape[:-1].numel(), v.shape[-1])
        full = v.new_zeros(len(v), count).index_copy(1, self.index(v.device), v)
        return full.unflatten(1, (-1, self.across)).transpose(0, 1).reshape(-1)

    def gather(self, full: Tensor, like: Tensor) -> Tensor:
        """The adjoint of `scatter`, in the shape and dtype of the coordinates."""
        batch = like.shape[:-1].numel()
        full = full.reshape(-1, batch, self.across).transpose(0, 1).reshape(batch, -1)
        return full.index_select(1, self.index(full.device)).reshape(like.shape).to(like.dtype)

    def index(self, device: torch.device) -> Tensor:
        """Where each rotation stands among the smallest diamonds."""
        if (self, device) in _index:
            return _index[self, device]
        with torch.inference_mode(False):
            layer, q = mesh_places(self.n, self.layers, device)
            u, v = (layer + q) // 2, (layer - q) // 2 - 1
            du, dv = u // self.m, v // self.m
            row, centre = du + dv + 1, (du - dv) % (2 * self.across)
            place = row * self.across + centre // 2
            u, v = u % self.m, v % self.m
            total = self.rows * self.across
            for size in reversed(self.sizes[:-1]):
                place = place + (2 * (u // size % 2) + v // size % 2) * total
                total *= 4
        # A fake tensor made while tracing would poison later calls.
        if type(place) is Tensor:
            _index[self, device] = place
        return place


def mesh_places(n: int, layers: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
    """Layer and upper wire of each rotation, in the order of the coordinates."""
    layer = torch.arange(layers, device=device)[:, None]
    q = torch.arange(max(n - 1, 0), device=device)
    there = (layer + q) % 2 == 0
    return layer.expand_as(there)[there], q.expand_as(there)[there]
