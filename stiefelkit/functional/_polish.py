"""One Newton step towards the nearest frame."""

import torch
from torch import Tensor

from stiefelkit.errors import ShapeError, needs
from stiefelkit.functional._arithmetic import devices
from stiefelkit.functional._arithmetic.devices import splits
from stiefelkit.functional._arithmetic.function import Context, Function
from stiefelkit.functional._arithmetic.product import product
from stiefelkit.metrics import defect
from stiefelkit.tensors import check_tensors

_SMALLEST_BLOCKED = 256


def polish(w: Tensor) -> Tensor:
    r"""Returns :math:`W - W (W^H W - I) / 2`, whose defect is of the order of the square of W's.

    One Newton-Schulz step of the polar decomposition: a frame's defect d becomes :math:`3/4 d^2`, down to the rounding
    of its dtype. :math:`W^H W - I` is computed in float64 (by `split_defect` where that is slow), the update in W's own
    dtype, so a float32 frame ends at the rounding limit. Costs 3 to 5 float32 products.

    The gradient passes straight through. That is exact up to the defect: at a frame the derivative of this step is the
    projector on the tangent space, and dW from an exact map is tangent already.

    Args:
        w: nearly orthonormal columns (rows, if wide), shape (*, n, p), float32, float64, complex64 or complex128,
            defect below about 1e-4 in float32 and 1e-8 in float64 for a result at the limit.
    """
    check_tensors("polish", w)
    if w.dim() < 2:
        needs(False, ShapeError, "polish", "matrices of shape (*, n, p)", tuple(w.shape))
    if w.shape[-2] < w.shape[-1]:
        return Polish.of(w.mH.resolve_conj()).mH.resolve_conj().contiguous()
    return Polish.of(w)


class Polish(Function):
    """A step towards the nearest frame, which gradients and tangents pass straight through."""

    @staticmethod
    def forward(w: Tensor) -> Tensor:
        return polished(w)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> Tensor:
        return g

    @staticmethod
    def tangent(ctx: Context, t: Tensor) -> Tensor:
        return t.clone()


def polished(w: Tensor) -> Tensor:
    """Does what `polish` does inside a `Function`, whose gradient it leaves alone."""
    if w.shape[-1] < _SMALLEST_BLOCKED and w.dtype in (torch.float64, torch.complex128):
        return torch.sub(w, w @ defect(w), alpha=0.5)
    return torch.sub(w, product(w, rounded_defect(w)), alpha=0.5)


def rounded_defect(w: Tensor, remainder: Tensor | None = None) -> Tensor:
    """Returns M^H M - I of M = W + remainder, computed in float64 or by `split_defect`, in W's dtype."""
    dtype = torch.complex128 if w.is_complex() else torch.float64
    if w.dtype != dtype and (not w.is_cpu or devices.declared_weak is not None) and splits(w):
        return split_defect(w, remainder)
    p, exact = w.shape[-1], w.to(dtype)
    if remainder is not None:
        exact = exact.add_(remainder) if exact.dtype != w.dtype else exact + remainder
    if p < _SMALLEST_BLOCKED and exact.dtype == w.dtype:
        return defect(exact)
    if p < _SMALLEST_BLOCKED:  # float32 hides the rounding of float64 in long sums
        gram = exact.mH @ exact
        gram.diagonal(dim1=-2, dim2=-1).sub_(1)
        return gram.to(w.dtype)
    step = -(-p // 4)
    error = w.new_empty(*w.shape[:-2], p, p)
    for start in range(0, p, step):
        here, after = slice(start, start + step), slice(start + step, p)
        rows = exact[..., here].mH @ exact[..., start:]
        rows.diagonal(dim1=-2, dim2=-1).sub_(1)
        error[..., here, start:] = rows
        error[..., after, here] = error[..., here, after].mH
    return error


def split_defect(w: Tensor, remainder: Tensor | None = None) -> Tensor:
    """Returns :math:`M^H M - I`, :math:`M = W + remainder`, to twice the digits of float32, in float32 products only.

    With :math:`H = round(2048 W) / 2048` and :math:`L = W - H` the products in :math:`H^H H` are multiples of
    :math:`2^{-22}` whose sums of modulus 1 float32 holds exactly; the rest, :math:`C + C^H` with
    :math:`C = (H + L / 2)^H L`, is small.

    Args:
        w: nearly orthonormal columns, shape (*, n, p), float32 or complex64.
        remainder: M - W, of the order of W's rounding.
    """
    check_tensors("split_defect", w)
    if w.is_complex():
        high = torch.complex((w.real * 2048).round(), (w.imag * 2048).round()) / 2048
    else:
        high = (w * 2048).round() / 2048
    low = w - high if remainder is None else w - high + remainder
    eye = torch.eye(w.shape[-1], dtype=w.dtype, device=w.device)
    cross = product((high + low / 2).mH, low)
    return (product(high.mH, high) - eye) + cross + cross.mH
