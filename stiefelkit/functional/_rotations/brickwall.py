"""Meshes of plane rotations in a brick pattern, applied in blocks, their exact backward.

Layers of rotations of neighbouring wires alternate between the pairs (0, 1), (2, 3), ... and (1, 2), (3, 4), ... . The
rotations are joined, four by four, into diamonds, matrices of 2m wires that stand for m^2 rotations. Diamonds of one
row act on disjoint wires, and a few rows of them make the mesh. With B in front, L and R on the upper and lower wires
and A behind, a diamond is (I + A + I)(L + R)(I + B + I), direct sums. The rotation of wires (q, q + 1) in layer l sits
at (u, v) = ((l + q) / 2, (l - q) / 2 - 1) of a lattice in which each feeds (u + 1, v) and (u, v + 1), so that an m x m
square of the lattice is a diamond.

The backward saves the rotated matrix alone. With H = g y^H behind a unitary factor F and K = H - H^H, the derivative
along a rotation of (p, q) is Re K[q, p] right behind it, and K in front of F is F^H K F: it takes matrices back from
row to row, and K from a diamond to its four quarters.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from stiefelkit._torch import is_differentiated, is_view
from stiefelkit.errors import ShapeError, needs
from stiefelkit.functional._arithmetic.function import Context, Function, by_transposing, keep
from stiefelkit.functional._arithmetic.product import opaque, product
from stiefelkit.functional._kernels.columns import rotated_columns, rotated_columns_gradient, takes_mesh
from stiefelkit.functional._packing import check_complex, check_size, remembered, rotations
from stiefelkit.numbers import check_counts
from stiefelkit.tensors import check_tensors

_SMALLEST_ELEMENTWISE = 100


def mesh_size(n: int, layers: int) -> int:
    """Returns the number of rotations in `layers` layers of a brick pattern on n wires.

    >>> mesh_size(6, 6), mesh_size(7, 7), mesh_size(7, 3)
    (15, 21, 9)
    """
    check_counts("mesh_size", n=n, layers=layers)
    return (layers + 1) // 2 * (n // 2) + layers // 2 * ((n - 1) // 2)


def check_angles(who: str, angle: Tensor, phase: Tensor | None, size: int) -> None:
    """Raises ShapeError unless there are so many angles, and as many phases where there are phases."""
    check_size(who, "angles", angle, size)
    if phase is not None:
        check_size(who, "phases", phase, size)


def brickwall(x: Tensor, angle: Tensor, phase: Tensor | None = None, *, layers: int) -> Tensor:
    r"""Returns :math:`F_L ... F_2 F_1 X` for L layers of rotations in a brick pattern.

    :math:`F_1` rotates the rows (0, 1), (2, 3), ..., :math:`F_2` the rows (1, 2), (3, 4), ..., and so on in turns; each
    rotation is :math:`[[cos t, -e^{i f} sin t], [sin t, e^{i f} cos t]]`, with :math:`f = 0` in a real mesh.

    Costs about 2 layers / n products of the size of X forward and 6 backward; saves the result and the angles, nothing
    between the layers. Computes in the dtype of X, with zero for entries below :math:`eps^2`, which products of many
    sines fall to: below 1e-38 some processors take many times as long.

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
    if x.dim() < 2:
        needs(False, ShapeError, "brickwall", "matrices of shape (*, n, p)", tuple(x.shape))
    check_angles("brickwall", angle, phase, mesh_size(x.shape[-2], layers))
    batch = torch.broadcast_shapes(x.shape[:-2], angle.shape[:-1])
    x, angle = x.expand(*batch, *x.shape[-2:]), angle.expand(*batch, angle.shape[-1])
    if phase is not None:
        if not x.is_complex():
            check_complex("brickwall", x.dtype, phase)
        phase = phase.expand(*batch, phase.shape[-1])
    elif x.is_complex():
        phase = torch.zeros_like(angle)
    return _Brickwall.of(x, angle, phase, layers)


class _Brickwall(Function):
    @staticmethod
    def forward(x: Tensor, angle: Tensor, phase: Tensor | None, layers: int) -> Tensor:
        return _rotated(x, angle, phase, layers)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, angle, phase, ctx.layers = inputs
        keep(ctx, angle, phase, output)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor | None, ...]:
        return _pulled_back(ctx, g, ctx.needs_input_grad[0])

    tangent = by_transposing(lambda ctx, g: _pulled_back(ctx, g, True))


def _pulled_back(ctx: Context, g: Tensor, with_x: bool) -> tuple[Tensor | None, ...]:
    angle, phase, y = ctx.saved_tensors
    # Second derivatives come from differentiating the formulas of the first.
    differentiable = is_differentiated() and not torch.compiler.is_compiling()
    pull_back = _gradients if differentiable else _brickwall_gradients
    gx, g_angle, g_phase = pull_back(g, y, angle, phase, ctx.layers, with_x)
    return gx if with_x else None, g_angle, None if phase is None else g_phase, None


@opaque(lambda x, angle, phase, layers: x.new_empty(x.shape))
def _rotated(x: Tensor, angle: Tensor, phase: Tensor | None, layers: int) -> Tensor:
    n = x.shape[-2]
    if takes_mesh(angle, n, x.shape[-1], x.dtype):
        return rotated_columns(x, angle, phase, layers)
    mesh = MeshLayout.of(n, layers)
    rows = mesh.rows_of(_diamonds(angle, phase, mesh, x.dtype)[-1])
    z = mesh.pad(x)
    for t, s in enumerate(rows):
        z = _flush(mesh.unroll(torch.bmm(s, mesh.cut(mesh.roll(z, t))), t))
    y = z[:, :n].reshape(x.shape)
    return y.clone() if is_view(y) else y  # forward mode would take a view for one of X


def _gradients(
    g: Tensor, y: Tensor, angle: Tensor, phase: Tensor | None, layers: int, with_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of X (empty unless `with_x`), angles and phases (empty if there are none)."""
    n, p = y.shape[-2:]
    mesh = MeshLayout.of(n, layers)
    levels = _diamonds(angle, phase, mesh, y.dtype)
    rows = mesh.rows_of(levels[-1])
    gx = y.new_empty((*y.shape[:-2], 0, 0))
    # In multiples of n: the factors take 6 L p, K takes n p + 4 L n.
    if with_x or n * p >= layers * (6 * p - 4 * n):
        k, z = _by_factors(mesh, rows, g, y, with_x)
        gx = z.reshape(y.shape) if with_x else gx
    else:
        k = _by_conjugation(mesh, rows, g, y)
    for d in reversed(levels[:-1]):  # to K behind each rotation, (rotations, 2, 2)
        order = _MatrixOrder.of(d.shape[-1] // 2, len(k))
        k = order.quarter(order.store(k), d)
    k = k.movedim(0, -1)
    g_angle = mesh.gather(k[1, 0].real if k.is_complex() else k[1, 0], angle)
    if phase is None:
        g_phase = g_angle.new_empty((*angle.shape[:-1], 0))
    else:
        (c, _), (s, _), i = *levels[0].movedim(0, -1).real, k.imag
        g_phase = mesh.gather((s * s * i[0, 0] + c * c * i[1, 1]) / 2 - s * c * i[1, 0], angle)
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
    if takes_mesh(angle, y.shape[-2], y.shape[-1], y.dtype):
        return rotated_columns_gradient(g, y, angle, phase, layers, with_x)
    return _gradients(g, y, angle, phase, layers, with_x)


@dataclass(frozen=True)
class MeshLayout:
    """Cuts a mesh into rows of diamonds.

    Rows t = 0, 1, ... of diamonds of size m are centred on the layers tm; even rows cut the wires at multiples of 2m,
    odd ones m further on, where the last diamond wraps around (the rotation at the seam is the identity).
    """

    n: int
    layers: int
    m: int

    @classmethod
    @functools.lru_cache(maxsize=None, typed=True)  # 8.0 is equal to 8, and no number of wires
    def of(cls, n: int, layers: int) -> "MeshLayout":
        """Returns the layout of a mesh."""
        m = 1
        while 4 * m <= layers and 8 * m <= n and 32 * m <= n + 64:
            m *= 2
        return cls(n, layers, m)

    @property
    def wires(self) -> int:
        """Number of wires, with idle ones, a multiple of 2m."""
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

    def rows_of(self, d: Tensor) -> Sequence[Tensor]:
        """Returns the diamonds of each row, for matrices of a batch in turn, (batch * across, 2m, 2m)."""
        return d.contiguous().unflatten(0, (self.rows, -1)).unbind()

    def pad(self, x: Tensor) -> Tensor:
        """Flattens the batch and adds the idle wires."""
        x = x.reshape(-1, *x.shape[-2:])
        return F.pad(x, (0, 0, 0, self.wires - self.n)) if self.wires > self.n else x

    def cut(self, z: Tensor) -> Tensor:
        """Returns the rows of Z for each diamond of a row, (batch * across, 2m, p)."""
        return z.reshape(-1, 2 * self.m, z.shape[-1])

    def diagonal(self, k: Tensor) -> Tensor:
        """Returns the diagonal blocks of K, (batch * across, 2m, 2m)."""
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
        """Orders coordinates (*, d) as the smallest diamonds, with zeros where there is no rotation."""
        count = self.m * self.m * self.rows * self.across
        v = v.reshape(v.shape[:-1].numel(), v.shape[-1])
        full = v.new_zeros(len(v), count).index_copy(1, _index(self, v.device), v)
        return full.unflatten(1, (-1, self.across)).transpose(0, 1).reshape(-1)

    def gather(self, full: Tensor, like: Tensor) -> Tensor:
        """Applies the adjoint of `scatter`, in the shape and dtype of the coordinates."""
        batch = like.shape[:-1].numel()
        full = full.reshape(-1, batch, self.across).transpose(0, 1).reshape(batch, -1)
        return full.index_select(1, _index(self, full.device)).reshape(like.shape).to(like.dtype)


@remembered
def _index(mesh: MeshLayout, device: torch.device) -> Tensor:
    # In numpy: while tracing with fake tensors a mask would give one of unknown size.
    there = numpy.add.outer(numpy.arange(mesh.layers), numpy.arange(max(mesh.n - 1, 0))) % 2 == 0
    layer, q = numpy.nonzero(there)
    u, v = (layer + q) // 2, (layer - q) // 2 - 1
    du, dv = u // mesh.m, v // mesh.m
    row, centre = du + dv + 1, (du - dv) % (2 * mesh.across)
    place = row * mesh.across + centre // 2
    u, v = u % mesh.m, v % mesh.m
    total = mesh.rows * mesh.across
    for size in reversed(mesh.sizes[:-1]):
        place = place + (2 * (u // size % 2) + v // size % 2) * total
        total *= 4
    return torch.tensor(place, device=device)


def _by_factors(mesh: MeshLayout, rows: Sequence[Tensor], g: Tensor, y: Tensor, with_x: bool) -> tuple[Tensor, Tensor]:
    """Takes G and Y back through the rows: returns K behind every diamond, and G in front if `with_x`."""
    z, ks = [mesh.pad(g), mesh.pad(y)], []
    for t, s in reversed(list(enumerate(rows))):
        z = [mesh.cut(mesh.roll(v, t)) for v in z]
        h = _multiply(z[0], z[1].mH)
        ks.append(h - h.mH)
        if t or with_x:
            z = [mesh.unroll(_multiply(s.mH, v), t) for v in z]
    return torch.cat(ks[::-1]), z[0][:, : mesh.n]


def _by_conjugation(mesh: MeshLayout, rows: Sequence[Tensor], g: Tensor, y: Tensor) -> Tensor:
    """Takes all of K back through the rows: returns its blocks behind every diamond."""
    h = _multiply(g.reshape(-1, *g.shape[-2:]), y.reshape(-1, *y.shape[-2:]).mH)
    h = mesh.pad(mesh.pad(h).mH)
    k, sign, ks = h.mH - h, 1, []
    for t, s in reversed(list(enumerate(rows))):
        k = k.roll((mesh.m, mesh.m), (-2, -1)) if t % 2 else k
        ks.append(sign * mesh.diagonal(k))
        if t:
            # F^H (F^H K)^H = -F^H K F
            k = _multiply(s.mH, mesh.cut(k)).reshape(k.shape).mH
            k, sign = _multiply(s.mH, mesh.cut(k)).reshape(k.shape), -sign
            k = k.roll((-mesh.m, -mesh.m), (-2, -1)) if t % 2 else k
    return torch.cat(ks[::-1])


def _diamonds(angle: Tensor, phase: Tensor | None, mesh: MeshLayout, dtype: torch.dtype) -> list[Tensor]:
    """Returns diamonds of every size 1, 2, 4, ..., each a tensor (count, 2m, 2m) in order of their quarters."""
    t = mesh.scatter(angle.to(dtype.to_real()))
    f = None if phase is None else mesh.scatter(phase.to(dtype.to_real()))
    levels = [rotations(t, f, 0).view(2, 2, *t.shape).movedim(-1, 0)]
    for m in mesh.sizes[:-1]:
        order = _MatrixOrder.of(m, len(levels[-1]) // 4)
        levels[-1] = order.store(levels[-1])
        levels.append(_flush(order.join(levels[-1])))
    return levels


@dataclass(frozen=True)
class _MatrixOrder:
    """Order in memory of small matrices: entry by entry (`last`, for elementwise products) or matrix by matrix."""

    last: bool

    @classmethod
    def of(cls, m: int, count: int) -> "_MatrixOrder":
        """Returns the faster order to join so many diamonds from, or take them apart into, four of size m."""
        return cls(count >= _SMALLEST_ELEMENTWISE * m)

    def store(self, d: Tensor) -> Tensor:
        return d.movedim(0, -1).contiguous().movedim(-1, 0) if self.last else d.contiguous()

    def times(self, a: Tensor, b: Tensor) -> Tensor:
        if not self.last:
            return _multiply(a, b)
        columns, rows = a.movedim(0, -1).unsqueeze(2).unbind(1), b.movedim(0, -1).unbind(0)
        out = columns[0] * rows[0]
        for column, row in zip(columns[1:], rows[1:], strict=True):
            out = torch.addcmul(out, column, row) if is_differentiated() else out.addcmul_(column, row)
        return out.movedim(-1, 0)

    def empty(self, like: Tensor, count: int, size: int, columns: int) -> Tensor:
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
        out[:, m : 3 * m] = self.times(a, _unwritten(out[:, m : 3 * m]))
        return out

    def quarter(self, k: Tensor, d: Tensor) -> Tensor:
        """Takes K behind diamonds of 4m wires to K behind each of their quarters D; overwrites K."""
        m = d.shape[-1] // 2
        _, l, r, a = d.chunk(4)
        count, inner = len(k), slice(m, 3 * m)
        out = self.empty(k, 4 * count, 2 * m, 2 * m)
        out[3 * count :] = k[:, inner, inner]
        k[:, :, inner] = self.times(_unwritten(k[:, :, inner]), a)
        k[:, inner] = self.times(a.mH, _unwritten(k[:, inner]))
        out[count : 2 * count] = k[:, : 2 * m, : 2 * m]
        out[2 * count : 3 * count] = k[:, 2 * m :, 2 * m :]
        l, r = l[:, :, m:], r[:, :, :m]
        z = self.empty(k, count, 4 * m, 2 * m)
        z[:, :, :m] = self.times(k[:, :, : 2 * m], l)
        z[:, :, m:] = self.times(k[:, :, 2 * m :], r)
        out[:count, :m] = self.times(l.mH, z[:, : 2 * m])
        out[:count, m:] = self.times(r.mH, z[:, 2 * m :])
        return out


def _unwritten(x: Tensor) -> Tensor:
    """Returns X for a product to keep for its derivative while X is overwritten."""
    return x.clone() if is_differentiated() else x


def _flush(x: Tensor) -> Tensor:
    """Puts zeros for entries below eps^2 in place, unless a derivative may pass."""
    if is_differentiated():
        return x
    parts = torch.view_as_real(x) if x.is_complex() else x
    torch.hardshrink(parts, torch.finfo(x.dtype).eps ** 2, out=parts)
    return x


def _multiply(a: Tensor, b: Tensor) -> Tensor:
    # The opaque operators that call it are in full precision.
    return product(a, b) if is_differentiated() else torch.bmm(a, b)
