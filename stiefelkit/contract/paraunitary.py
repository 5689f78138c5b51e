"""Kernels whose convolutions keep norms: a frame at every frequency, made of projectors and one frame."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stiefelkit.contract.composite import Composite, Inner, made_elsewhere
from stiefelkit.contract.param import Parametrization, Position, Traits, check_tensor
from stiefelkit.errors import ImageError, NotAFrameError, ShapeError, needs
from stiefelkit.functional import polish
from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.functional._packing import remembered
from stiefelkit.metrics import frame_tolerance, orthogonality_error, permitted_error
from stiefelkit.tensors import coarser, working_dtype


class Paraunitary(Composite):
    """A kernel K whose Fourier transform is a frame at every frequency, in each group, or the adjoint of one if wide.

    :math:`K(z) = R(z) F_1(z) ... F_t(z)`, cut to as many columns as there are: :math:`F_i(z) = P_i + (I - P_i) z` along
    one axis, axes in turn, every second one along an axis the other way round, :math:`(I - P_i) + P_i z`.
    :math:`P_i = Q_i Q_i^H` projects on half of m channels; R is a frame that reads one patch of the size of the stride.
    All :math:`Q_i` are one call of an inner map, R is another; coordinates and charts carry the prefixes `projectors.`
    and `frame.`. Polished, multiplied in float64 and rounded once.

    Image: a subset of all such kernels, those of rank m // 2; without factors (a kernel no larger than the stride) all
    that R reaches. One channel has no factors: zeros stand around a patch. A wide kernel of stride 1 is the adjoint of
    a tall one.

    Right inverse: :math:`P_i` holds the range of the first taps along its axis, and none of that of the last; it is
    divided off, and the next one stands at the ends. There is none for kernels with a stride of more outputs than a
    patch has inputs; and few inputs, below about a quarter of the outputs, may leave a :math:`P_i` open: what does not
    come back is refused.

    Args:
        shape: of the kernel, (rows, columns / groups, *taps).
        groups: that divide the rows.
        stride: along each axis, as far as taps see it, at most as many as there are taps.
        parametrization: of :math:`Q_i` and R, a registered name or a class.
        options: of both maps.
        dtype, device: of the kernel, and where charts live.
    """

    coordinate_names: ClassVar[tuple[str, ...]] = ("frame.*", "projectors.*")
    examples = made_elsewhere

    def __init__(
        self,
        shape: Sequence[int],
        *,
        groups: int,
        stride: Sequence[int],
        parametrization: Parametrization,
        options: Mapping[str, Any],
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ):
        torch.nn.Module.__init__(self)
        self.shape, self.dtype, self.precision = tuple(shape), dtype, "exact"
        self.groups, self.stride = groups, tuple(stride)
        rows, columns, patch = shape[0] // groups, shape[1], math.prod(stride)
        self.is_turned = patch == 1 and rows < columns
        self.rows, self.columns = (columns, rows) if self.is_turned else (rows, columns)
        self.channels = m = max(self.columns, self.rows // patch)
        more = [taps - step for taps, step in zip(shape[2:], stride, strict=True)]
        wanted = "two channels a group or more where taps exceed a stride of 1 (sk.nn.CayleyConv2d takes one)"
        is_fit = m >= 2 or patch > 1 or not any(more)
        needs(is_fit, ShapeError, "An orthogonal convolution", wanted, f"shape {tuple(shape)}")
        # Nothing projects on half of one channel: the kernel has a patch of taps then, and zeros around it.
        self.zeros = [(k - k // 2, k // 2) if m < 2 else (0, 0) for k in more]
        more = [k if m >= 2 else 0 for k in more]
        self.steps = [(axis, j % 2) for j in range(max(more)) for axis, most in enumerate(more) if j < most]
        inner, sides = Inner(parametrization, options), (self.rows, m * patch)
        self.is_wide = sides[0] < sides[1]
        self.frame = inner.build(self, (groups, max(sides), min(sides)), device)
        frames = (groups, len(self.steps), m, m // 2)
        self.projectors = inner.build(self, frames, device) if self.steps else None

    @property
    def traits(self) -> Traits:
        """The traits of R's map, but not onto, and inexact: each frequency sums the rounding of all taps."""
        return replace(self.frame.traits, onto=False, invertible=False, exact=False)

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes of R's map; "identity", :math:`R = I` and equal :math:`P_i`, is a shift by half of the taps."""
        return self.frame.schemes

    def options(self) -> dict[str, Any]:
        inner = {key: part.options() for key, part in self._named()}
        return {"groups": self.groups, "stride": list(self.stride), **inner}

    def error_bound(self, *coordinates: Tensor) -> float:
        """Returns twice that of an exact frame of the columns that `frames` gives."""
        sides = (self.shape[0] // self.groups, self.shape[1] * math.prod(self.stride))
        return 2 * permitted_error(min(sides) * (1 if self.is_complex else 2), self.dtype)

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws R by a scheme, and all :math:`Q_i` by it if it is "identity", else by their map's default scheme."""
        return self._joined(
            part.initial(scheme if part is self.frame or scheme == "identity" else part.schemes[0], generator)
            for _, part in self._named()
        )

    @torch.no_grad()
    def solve(self, w: Tensor) -> Position:
        check_tensor(self, w)
        who, dtype = "An orthogonal convolution", coarser(self.dtype, w.dtype)
        wanted = "a stride of 1, or no more outputs than a patch has inputs, to be assigned a kernel"
        is_divisible = math.prod(self.stride) == 1 or self.columns == self.channels
        needs(is_divisible, ImageError, who, wanted, f"{self.rows} for {self.columns}, stride {self.stride}")
        k = w.to(working_dtype(self.dtype))
        frames = self.frames(k)
        error, permitted = orthogonality_error(frames).max().item(), frame_tolerance(frames.shape[-1], dtype)
        wanted = f"a kernel with ||W^H W - I||_F <= {permitted:.2g} at each frequency"
        needs(error <= permitted, NotAFrameError, who, wanted, f"{error:.2g}")
        r, q = self._factors(k, 4 * torch.finfo(dtype).eps * math.sqrt(self.channels))
        off = torch.linalg.vector_norm(self._multiplied(r, q) - k).item()
        wanted = f"a kernel of projectors on {self.channels // 2} of {self.channels} channels, which its taps determine"
        permitted = frame_tolerance(frames.shape[-1] * self.groups, dtype) + math.sqrt(self.groups) * error
        needs(off <= permitted, ImageError, who, wanted, f"one that is {off:.2g} off")
        r = r.mH.resolve_conj() if self.is_wide else r
        return self._joined([self.frame.solve(r), *([] if self.projectors is None else [self.projectors.solve(q)])])

    def _factors(self, kernel: Tensor, noise: float) -> tuple[Tensor, Tensor]:
        """Returns R and all :math:`Q_i`, which multiply up to a kernel that is in the image."""
        k = kernel.unflatten(0, (self.groups, -1))
        k = k.transpose(1, 2).conj() if self.is_turned else k
        for axis, (before, after) in enumerate(self.zeros):
            k = k.narrow(3 + axis, before, k.shape[3 + axis] - before - after)
        # With strides K^H = F_t^H ... F_1^H R^H, without K = (R F_1 R^H) ... (R F_t R^H) R.
        is_patch = math.prod(self.stride) > 1
        steps = self.steps[::-1] if is_patch else self.steps
        k = (k.transpose(1, 2).conj() if is_patch else k).resolve_conj()
        rest, q = zip(*(_divided(own, steps, self.channels // 2, noise) for own in k), strict=True)
        rest, q = torch.stack(rest), torch.stack(q)
        u, _, v = torch.linalg.svd((rest.transpose(1, 2).conj() if is_patch else rest).flatten(2), full_matrices=False)
        if is_patch:
            return u @ v, q.flip(1)
        r = _completed(u @ v)
        return r, r.mH[:, None] @ q

    def forward(self, *coordinates: Tensor) -> Tensor:
        first, dtype = len(self.frame.coordinates), working_dtype(self.dtype)
        r = polish(self.frame(*coordinates[:first]).to(dtype))
        q = None if self.projectors is None else polish(self.projectors(*coordinates[first:]).to(dtype))
        return self._multiplied(r.mH if self.is_wide else r, q).to(self.dtype).resolve_conj()

    def _multiplied(self, r: Tensor, q: Tensor | None) -> Tensor:
        """Returns the kernel of R, (groups, rows, m * patch), and all :math:`Q_i`, (groups, steps, m, m // 2)."""
        dims = len(self.stride)
        is_by_taps = q is None or may_sync_host(q)
        if q is None or is_by_taps:
            x = torch.eye(self.channels, self.columns, dtype=r.dtype, device=r.device)
            x = x.expand(self.groups, -1, -1).reshape(self.groups, self.channels, self.columns, *(1,) * dims)
            steps = [] if q is None else [*zip(self.steps, q.unbind(1), strict=True)]
            for (axis, is_swapped), each in reversed(steps):
                projected = (each @ (each.mH @ x.flatten(2))).view_as(x)
                parts = (projected, x - projected)
                x = _shifted_sum(parts[::-1] if is_swapped else parts, axis - dims)
        else:
            x = self._multiplied_by_frequency(q)
        # One product of all rows and places of a patch with all columns and taps; then taps of both add up.
        r = r.unflatten(2, (self.channels, *self.stride)).movedim(2, -1)
        y = (r.flatten(1, -2) @ x.flatten(2)).unflatten(1, r.shape[1:-1]).unflatten(-1, x.shape[2:])
        if is_by_taps or math.prod(self.stride) == 1:
            for axis in range(dims):
                y = _shifted_sum(y.unbind(2), axis - dims) if y.shape[2] > 1 else y.squeeze(2)
        else:
            y = _folded(y, self.stride)
        if any(map(any, self.zeros)):
            y = F.pad(y, [k for ends in reversed(self.zeros) for k in ends])
        y = y.transpose(1, 2).conj() if self.is_turned else y
        return y.flatten(0, 1)

    def _multiplied_by_frequency(self, q: Tensor) -> Tensor:
        """Returns all taps of :math:`F_1 ... F_t`, (groups, m, columns, *taps), by few operators, as devices want it.

        All :math:`F_i` at all frequencies that tell their taps apart are multiplied pair by pair.
        """
        lengths = tuple(1 + sum(axis == at for axis, _ in self.steps) for at in range(len(self.stride)))
        of = tuple(self.steps), lengths, q.is_complex(), q.device
        a, b = _constant_part(*of, self.channels), _symbols(*of)[1]
        is_in_order = len(self.steps) < 3
        chosen = (q if is_in_order else q.index_select(1, _order_of_tree(len(self.steps), q.device))).transpose(0, 1)
        projectors = (chosen @ chosen.mH)[:, :, None]  # x is (steps, groups, frequencies, m, m)
        if q.is_complex():
            x = torch.addcmul(a, b, projectors)
        else:
            parts = torch.addcmul(torch.view_as_real(a), torch.view_as_real(b), projectors[..., None])
            x = torch.view_as_complex(parts)
        while len(x) > 1:
            left, right = x.split(len(x) // 2)
            x = left @ right
        x = x.squeeze(0)[..., : self.columns]
        counts = lengths if q.is_complex() else (*lengths[:-1], lengths[-1] // 2 + 1)
        axes = tuple(range(1, 1 + len(lengths)))
        x = (torch.fft.ifftn if q.is_complex() else torch.fft.irfftn)(x.unflatten(1, counts), lengths, axes)
        return x.movedim(axes, tuple(range(3, 3 + len(axes))))

    def frames(self, weight: Tensor) -> Tensor:
        """Returns the kernel's Fourier transform at as many frequencies as decide over all, adjoint if wide.

        A sum of 2 q - 1 exponentials is 1 everywhere if it is at 2 q - 1 points, q the taps over the stride. Complex
        frames W of a real kernel are [[Re W, -Im W], [Im W, Re W]], in the kernel's dtype.
        """
        w = weight.detach().to(working_dtype(weight.dtype)).unflatten(0, (self.groups, -1))
        for axis, step in enumerate(self.stride):
            at = 3 + axis  # (groups, rows, columns, *taps / stride, *stride)
            w = w.movedim(at, -1)
            w = F.pad(w, (0, -w.shape[-1] % step)).unflatten(-1, (-1, step)).movedim(-2, at)
        axes = tuple(range(3, 3 + len(self.stride)))
        lengths = [2 * w.shape[axis] - 1 for axis in axes]
        w = (torch.fft.fftn if w.is_complex() else torch.fft.rfftn)(w, lengths, axes)
        w = w.movedim(axes, tuple(range(len(axes)))).flatten(-1 - len(axes))
        w = w.mH if w.shape[-2] < w.shape[-1] else w
        if not weight.is_complex():
            w = torch.cat([torch.cat([w.real, -w.imag], -1), torch.cat([w.imag, w.real], -1)], -2)
        return w.to(weight.dtype).resolve_conj()


def _shifted_sum(parts: Sequence[Tensor], axis: int) -> Tensor:
    """Returns the sum of equal tensors, part j shifted by j places along an axis, counted from the last."""
    after = (0, 0) * (-1 - axis)
    return functools.reduce(torch.add, (F.pad(part, (*after, j, len(parts) - 1 - j)) for j, part in enumerate(parts)))


def _folded(y: Tensor, stride: Sequence[int]) -> Tensor:
    """Returns y, (groups, rows, *stride, columns, *taps), with all places of a patch added up, by one operator."""
    dims, ones = len(stride), (1,) * (2 - len(stride))
    y = y.movedim(tuple(range(2, 2 + dims)), tuple(range(3, 3 + dims)))
    sizes = [taps + step - 1 for taps, step in zip(y.shape[3 + dims :], stride, strict=True)]
    columns = y.reshape(1, -1, y.shape[3 + dims :].numel())
    return F.fold(columns, (*ones, *sizes), (*ones, *stride)).view(*y.shape[:3], *sizes)


@remembered
def _order_of_tree(count: int, device: torch.device) -> Tensor:
    """Returns the order of factors in which halves times halves multiply neighbours; 0 in the places to spare."""
    order = torch.zeros(1, dtype=torch.int64, device=device)
    while len(order) < count:
        order = torch.cat([2 * order, 2 * order + 1])
    return torch.where(order < count, order, 0)


@remembered
def _symbols(
    steps: tuple[tuple[int, int], ...], lengths: tuple[int, ...], is_complex: bool, device: torch.device
) -> Tensor:
    """Returns a and b of :math:`F_i = a I + b P_i` at all frequencies, in that order, (2, steps, 1, frequencies, 1, 1).

    Real kernels need half of the last axis.
    """
    counts = lengths if is_complex else (*lengths[:-1], lengths[-1] // 2 + 1)
    turns = (torch.arange(n, dtype=torch.float64, device=device) / of for n, of in zip(counts, lengths, strict=True))
    grid = torch.meshgrid(*turns, indexing="ij")
    shifts = [torch.polar(torch.ones_like(grid[axis]), -2 * math.pi * grid[axis]).flatten() for axis, _ in steps]
    one = torch.ones_like(shifts[0])
    pairs = [
        torch.stack([one, z - 1] if is_swapped else [z, 1 - z])
        for z, (_, is_swapped) in zip(shifts, steps, strict=True)
    ]
    pairs += [torch.stack([one, 0 * one])] * (len(_order_of_tree(len(steps), device)) - len(steps))
    return torch.stack(pairs, 1)[:, _order_of_tree(len(pairs), device), None, :, None, None]


@remembered
def _constant_part(
    steps: tuple[tuple[int, int], ...], lengths: tuple[int, ...], is_complex: bool, device: torch.device, m: int
) -> Tensor:
    """Returns a I of `_symbols`, for m channels."""
    a = _symbols(steps, lengths, is_complex, device)[0]
    return a * torch.eye(m, dtype=a.dtype, device=device)


def _divided(x: Tensor, steps: Sequence[tuple[int, int]], rank: int, noise: float) -> tuple[Tensor, Tensor]:
    """Divides factors off the left of a kernel (m, n, *taps), one a step; returns the rest and their Q, stacked."""
    found = x.new_empty(len(steps), len(x), rank)
    for i, (axis, is_swapped) in enumerate(steps):
        taps, last = [tap.flatten(1) for tap in x.unbind(2 + axis)], x.shape[2 + axis] - 1
        q = found[i] = _range_of_first(taps[::-1] if is_swapped else taps, rank, noise)
        projected = (q @ (q.mH @ x.flatten(1))).view_as(x)
        parts = (x - projected, projected) if is_swapped else (projected, x - projected)
        x = parts[0].narrow(2 + axis, 0, last) + parts[1].narrow(2 + axis, 1, last)
    return x, found


def _range_of_first(taps: Sequence[Tensor], rank: int, noise: float) -> Tensor:
    """Returns an orthonormal basis of so many vectors, first of the range of the first taps, last of that of the last.

    What neither reaches, the taps behind them decide in the same way.
    """
    middle, first, last = torch.eye(len(taps[0]), dtype=taps[0].dtype, device=taps[0].device), [], []
    for one, other in zip(taps[: max(1, len(taps) // 2)], reversed(taps), strict=False):
        values, vectors = torch.linalg.eigh(middle.mH @ (_modulus(one) - _modulus(other)) @ middle)
        turned = (middle @ vectors).flip(1)
        above, below = int((values > noise).sum()), int((values < -noise).sum())
        first, last = [*first, turned[:, :above]], [turned[:, turned.shape[1] - below :], *last]
        middle = turned[:, above : turned.shape[1] - below]
    return torch.cat([*first, middle, *last], 1)[:, :rank]


def _modulus(m: Tensor) -> Tensor:
    """Returns :math:`(M M^H)^{1/2}`."""
    u, s, _ = torch.linalg.svd(m, full_matrices=False)
    return (u * s) @ u.mH


def _completed(w: Tensor) -> Tensor:
    """Returns square frames that begin with the columns of tall ones, rotations if real."""
    n, p = w.shape[-2:]
    if n == p:
        return w
    rest = torch.linalg.qr(w, mode="complete")[0][..., p:].clone()
    if not w.is_complex():
        rest[..., -1] *= torch.cat([w, rest], -1).det().sign()[..., None]
    return torch.cat([w, rest], -1)
