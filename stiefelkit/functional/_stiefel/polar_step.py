r"""The polar step along the Stiefel manifold, to the nearest frame, and the split step, which lose no digits.

The frame nearest to X = W - t U, U = W C + P with W^H P = 0, is X (I + E)^(-1/2), I + E = X^H X,

    E = t^2 (C^H C + P^H P) - t (C + C^H),

so with D = (I + E)^(-1/2) - I it is W + W (D - t C - t C D) - t P (I + D): all as small as the step, and so is its
rounding. For a tangent vector C is skew and E of second order.

The split step of Kong, Wang and Tao moves a frame along -U, U = W Omega + P, first within its columns, W1 = W R,
R = (I + t Omega / 2)^-1 (I - t Omega / 2), then out of them, W' = (W1 - t P) (I + E)^(-1/2), E = t^2 P^H P. A momentum
W Y + V, V^H W = 0, keeps its Y, in the columns of the new frame, and of V the part normal to W',
V + t W' (I + E)^(-1/2) P^H V; a V along P gets back the length that it loses, a factor of (I + E)^(1/2).
"""

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.devices import may_sync_host
from stiefelkit.functional._arithmetic.norms import norms_of
from stiefelkit.functional._arithmetic.product import plus_product
from stiefelkit.functional._cayley.quotient import quotient_of_skew
from stiefelkit.functional._polar import polished, quintics, times_shifted
from stiefelkit.functional._stiefel.tangents import Tangent, times
from stiefelkit.metrics import working_dtype
from stiefelkit.tensors import check_tensors

_SERIES = (-1 / 2, 3 / 8, -5 / 16, 35 / 128, -63 / 256, 231 / 1024, -429 / 2048)  # of (1 + x)^(-1/2) - 1, from x on
_DEFECT = 1 / 48  # the truncation may add this much to ||W^H W - I||_F, in eps sqrt(p): 7 % of a rounding limit
_LOWEST = 1e-2  # without host syncs: smallest singular value of W - t U, over the largest, that the root is right for
_LONG = 1e6  # factor from which a float32 transform is computed in float64


def polar_increment(w: Tensor, direction: Tangent, step: float | Tensor, *, defect: Tensor | None = None) -> Tensor:
    """Returns the increment that moves W to the frame nearest to :math:`W - t U`, of its shape and dtype.

    Args:
        w: frames, shape (*, n, p).
        direction: U; its rotation may be any C, not only a skew one, as long as :math:`W - t U` has full rank.
        step: length t, or one for each matrix, shape (*, 1, 1).
        defect: :math:`M^H M - I` of the M that W is the rounding of, shape (*, p, p): the increment then removes it.
    """
    if not (isinstance(w, Tensor) and isinstance(direction, Tangent)):
        check_tensors("polar_increment", w, direction)
    turn = direction.rotation * step
    rest = None if direction.rest is None else direction.rest * step
    e = turn.mH @ turn - (turn + turn.mH)
    if rest is not None:
        e = plus_product(e, rest.mH, rest)
    d = inverse_root_less_one(e if defect is None else e + defect)
    along = d - plus_product(turn, turn, d)
    if rest is None:
        return w @ along
    return plus_product(w @ along, rest, d, -1).sub_(rest)


def inverse_root_less_one(e: Tensor) -> Tensor:
    """Returns (I + E)^(-1/2) - I of Hermitian E to relative rounding, by a series near multiples of I, or eigenvectors.

    Without host syncs by products, to rounding of I, which a polish removes since the error is Hermitian.
    """
    if not may_sync_host(e):
        return _by_products(e)
    p = e.shape[-1]
    mean = e.diagonal(dim1=-2, dim2=-1).real.mean(-1)[..., None, None]
    eye = torch.eye(p, dtype=e.dtype, device=e.device)
    centred = (e - mean * eye) / (1 + mean)
    size = max(norms_of(centred)[0], default=0.0) if p > 1 else 0.0
    permitted = _DEFECT * torch.finfo(e.dtype).eps * p**0.5
    power = size
    for degree, following in enumerate(_SERIES[1:]):
        if abs(following) * power * size <= permitted:
            series = _SERIES[: degree + 1]
            break
        power *= size
    else:
        return _by_eigenvectors(e)
    # (1 + c)^(-1/2) (I + f) - I = ((1 + c)^(-1/2) - 1) I + (1 + c)^(-1/2) f
    less = torch.expm1(-0.5 * torch.log1p(mean))
    f = centred * series[-1]
    for coefficient in reversed(series[:-1]):
        f = plus_product(centred * coefficient, centred, f)
    return (1 + less) * f + less * eye


def _by_products(e: Tensor) -> Tensor:
    # With A = I + E <= c: polynomials that take G = A / c to I take Z = c^(-1/2) I to A^(-1/2).
    eye = torch.eye(e.shape[-1], dtype=e.dtype, device=e.device)
    bound = 1 + torch.linalg.matrix_norm(e, keepdim=True)
    gram, root = (e + eye) / bound, eye * (0.5 * bound.rsqrt())
    steps = quintics(_LOWEST, e.dtype == working_dtype(e.dtype))
    for i, (a, b, c) in enumerate(steps):
        share = times_shifted(gram, b, gram, c)
        root = times_shifted(root, a, share)
        if i + 1 < len(steps):
            gram = times_shifted(times_shifted(gram, a, share), a, share)
    return root + root.mH - eye


def _by_eigenvectors(e: Tensor) -> Tensor:
    fine = e.to(working_dtype(e.dtype))
    values, v = torch.linalg.eigh(fine)
    if v.dtype == e.dtype:  # LAPACK's V is off by 10 eps, and so would be W - t U times the root
        v = polished(v)
    less = torch.expm1(-0.5 * torch.log1p(values.clamp(min=-1 + 1e-15)))
    return ((v * less.unsqueeze(-2)) @ v.mH).to(e.dtype)


def turn(direction: Tangent, step: float | Tensor) -> Tensor:
    """Returns R - I of a split step, to relative rounding; of long steps in float64, for its range."""
    a = direction.rotation
    if isinstance(step, Tensor):
        return quotient_of_skew(a * step, 0.5)
    if not may_sync_host(a):
        return quotient_of_skew(a, 0.5 * step)
    if not any(direction.rotation_norms):  # as of one real column
        return torch.zeros_like(a)
    wide = a.to(working_dtype(a.dtype)) if step > _LONG else a
    return quotient_of_skew(wide, 0.5 * step).to(a.dtype)


def split_increment(
    w: Tensor, direction: Tangent, step: float | Tensor, *, defect: Tensor | None = None, unscaled: bool = False
) -> Tensor:
    """Returns the increment of a split step; unscaled without (I + E)^(-1/2), for a polar factor that follows."""
    along = turn(direction, step)
    if direction.rest is None:
        return w @ (along if defect is None else along.add_(defect, alpha=-0.5))
    rest = direction.rest * step
    if unscaled:
        return w @ along - rest
    square = rest.mH @ rest
    if defect is not None:  # by which P, projected once, is off the complement of W as well
        beside = w.mH @ rest
        square = square + (defect - beside - beside.mH)
    less = inverse_root_less_one(square)
    along = plus_product(along + less, along, less)
    return plus_product(w @ along, rest, less, -1).sub_(rest)


def transported_momentum(
    moved: Tensor, direction: Tangent, step: float | Tensor, momentum: Tangent, share: float
) -> Tensor:
    """Transports a momentum Y, V by a split step to its end W', to share W' Y + V'; the direction keeps its length."""
    within = momentum.rotation * share
    if direction.rest is None or momentum.rest is None:
        return moved @ within
    rest = direction.rest * step
    square = rest.mH @ rest
    less = inverse_root_less_one(square)
    inner = rest.mH @ momentum.rest
    inner = plus_product(inner, less, inner)
    if momentum is not direction:
        return plus_product(momentum.rest, moved, within + inner)
    lengthened = square + plus_product(less, square, less)  # (I + E)^(1/2) - I
    within = within + plus_product(inner, inner, lengthened)
    return plus_product(plus_product(momentum.rest, momentum.rest, lengthened), moved, within)


def leapt_momentum(w: Tensor, moved: Tensor, direction: Tangent, step: float | Tensor, share: float) -> Tensor:
    """Transports a momentum that is the direction, of any length: V' = (V + t W1 V^H V) (I + t^2 V^H V)^(-1/2)."""
    within = times(moved, direction.rotation.to(moved.dtype), share)
    if direction.rest is None:
        return within
    first = w.to(moved.dtype) + w.to(moved.dtype) @ turn(direction, step).to(moved.dtype)
    rest, step = direction.rest.to(moved.dtype), step.to(moved.real.dtype) if isinstance(step, Tensor) else step
    _, sizes, vectors = torch.linalg.svd(rest, full_matrices=False)
    sizes = sizes.unsqueeze(-2)
    shrunk = torch.hypot(torch.ones_like(sizes), step * sizes).reciprocal()
    turned = rest @ vectors.mH * shrunk + first @ vectors.mH * (step * sizes * shrunk * sizes)
    return within + turned @ vectors
