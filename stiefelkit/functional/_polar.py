r"""The orthogonal polar factor, the nearest frame, with derivatives of every order; and without one, by products alone.

`msign`, U V^H of X = U S V^H, takes no decomposition. An odd polynomial of X takes each singular value to its value at
the polynomial and leaves U and V. The ones here are quintics, a X + b X X^H X + c X (X^H X)^2, of which each is the
best approximation of 1 on the interval that the one before has left: Polar Express.
"""

import functools
import math
from typing import Any

import numpy
import torch
from torch import Tensor

from stiefelkit.errors import NonFiniteError, RankError, ShapeError, needs
from stiefelkit.functional._arithmetic import devices
from stiefelkit.functional._arithmetic.devices import may_sync_host, splits
from stiefelkit.functional._arithmetic.function import Context, Function, by_transposing, keep
from stiefelkit.functional._arithmetic.product import opaque, plus_product, product
from stiefelkit.metrics import defect, orthogonality_error, working_dtype
from stiefelkit.numbers import FLAG, PRECISION, at_least
from stiefelkit.tensors import check_dtype, check_tensors

_NEARLY_A_FRAME = 0.1
_POLISHED_IN_ONE = 1e-8
_SMALLEST_BLOCKED = 256
_LAST = (15 / 8, -10 / 8, 3 / 8)  # of third order at 1: an error x becomes 5/2 x^3
_NEAR = 3e-3
"""Error from which `_LAST` takes over: 7e-8 after one of it, which is rounding in float32, and nothing after two."""
_MARGIN = 1.01  # a polynomial serves up to this factor beyond its interval


def nearest_frame(w: Tensor) -> Tensor:
    """Returns the frame nearest to W in the Frobenius norm: its orthogonal polar factor, see `polar_factor`.

    An SVD unless W is nearly a frame already, then one to four `polish` steps; one value is read on the host.

    Args:
        w: matrices of shape (*, n, p) of full rank, any floating or complex dtype.

    Returns:
        Frames of the same shape and dtype, with orthonormal rows where :math:`n < p`. Differentiable any number of
        times.

    >>> nearest_frame(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    return _factor("nearest_frame", w, False)


def polar_factor(x: Tensor, *, well_conditioned: bool = False) -> Tensor:
    r"""Returns the frame Q of :math:`X = Q H` with H Hermitian and positive: the frame nearest to X.

    The derivative is :math:`dQ = Q Z + (I - Q Q^H) dX H^{-1}`, where the skew Z solves
    :math:`H Z + Z H = Q^H dX - dX^H Q`; it and its derivatives are finite wherever X has full rank, also at repeated
    singular values. Differentiable any number of times, once of them in forward mode; composes with vmap. Computes in
    float64 or complex128 and rounds once.

    Args:
        x: matrices of shape (*, n, p) of full rank, any size from 1e-300 to 1e300, any floating or complex dtype.
        well_conditioned: promises that the condition of X is below about 1e6; Q then comes from the eigenvectors of
            :math:`X^H X` instead of an SVD, no value is branched on, and the rank is not checked.

    Returns:
        Frames of the same shape and dtype, with orthonormal rows where :math:`n < p`.

    Raises:
        NonFiniteError: X holds NaN or infinity.
        RankError: X has linearly dependent columns (rows, if wide): many frames are equally near.

    References:
        Higham, Functions of matrices: theory and computation, 2008, chapter 8.
    """
    FLAG.require("polar_factor", "well_conditioned", well_conditioned)
    return _factor("polar_factor", x, well_conditioned)


def check_matrices(who: str, x: Tensor) -> None:
    """Raises DtypeError or ShapeError unless X is a floating or complex tensor of shape (*, n, p)."""
    if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()):
        check_tensors(who, x)
        check_dtype(who, x.dtype)
    if x.dim() < 2:
        needs(False, ShapeError, who, "matrices of shape (*, n, p)", tuple(x.shape))


def _factor(who: str, x: Tensor, well_conditioned: bool) -> Tensor:
    check_matrices(who, x)
    exact = x.to(working_dtype(x.dtype)).resolve_conj()
    is_wide = x.shape[-2] < x.shape[-1]
    q = _Polar.of(exact.mH.resolve_conj() if is_wide else exact, who, well_conditioned)
    return (q.mH.resolve_conj() if is_wide else q).to(x.dtype).contiguous()


class _Polar(Function):
    """Saves X and Q: as its backward is differentiable in both, further derivatives are right."""

    @staticmethod
    def forward(x: Tensor, who: str, well_conditioned: bool) -> Tensor:
        return _by_eigenvectors(x, who) if well_conditioned else _nearest(x, who)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep(ctx, inputs[0], output)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor, None, None]:
        x, q = ctx.saved_tensors
        return _derivative(x, q, g), None, None

    @staticmethod
    def tangent(ctx: Context, t: Tensor, *_: None) -> Tensor:
        x, q = ctx.saved_tensors
        return _derivative(x, q, t)


def _derivative(x: Tensor, q: Tensor, t: Tensor) -> Tensor:
    """Returns the derivative of the factor Q of X along T, which is its own adjoint."""
    h = q.mH @ x
    h = (h + h.mH) / 2
    along = q.mH @ t
    z = _Lyapunov.of(h, along - along.mH)
    return q @ z + torch.linalg.solve(h, t - q @ along, left=False)


class _Lyapunov(Function):
    """Solves H Z + Z H = S for a positive H, by its eigenvectors, which no derivative passes through.

    With Y the solution for dL/dZ: dL/dS = Y and dL/dH = -(Y Z^H + Z^H Y).
    """

    @staticmethod
    def forward(h: Tensor, s: Tensor) -> Tensor:
        values, v = torch.linalg.eigh(h)
        return v @ ((v.mH @ s @ v) / (values.unsqueeze(-1) + values.unsqueeze(-2))) @ v.mH

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep(ctx, inputs[0], output)

    @staticmethod
    def backward(ctx: Context, g: Tensor) -> tuple[Tensor, Tensor]:
        h, z = ctx.saved_tensors
        y = _Lyapunov.of(h, g)
        return -(y @ z.mH + z.mH @ y), y

    tangent = by_transposing(backward)


def _by_eigenvectors(x: Tensor, who: str) -> Tensor:
    x = scaled(x)
    try:
        squares, v = torch.linalg.eigh(x.mH @ x)
    except torch.linalg.LinAlgError as error:  # pyright: ignore[reportPrivateImportUsage]
        raise _not_finite(who) from error
    return polished(x @ (v * squares.rsqrt().unsqueeze(-2)) @ v.mH)


def nearest(w: Tensor, who: str = "nearest_frame") -> Tensor:
    """Returns the frames nearest to tall matrices in float64 or complex128, without a derivative."""
    if not w.numel():
        return w.clone()
    error = orthogonality_error(w).max().item()
    if not error <= _NEARLY_A_FRAME:
        w, error = _by_singular_vectors(w, who), 0.0
    while error > _POLISHED_IN_ONE:
        # That of the square of the defect E: (I - E/2) (I + E) (I - E/2) - I = -3/4 E^2 + 1/4 E^3.
        w, error = polished(w), 0.75 * error**2 + 0.25 * error**3
    return polished(w)


_nearest = opaque(lambda w, who: torch.empty_like(w, memory_format=torch.contiguous_format))(nearest)


def _by_singular_vectors(w: Tensor, who: str) -> Tensor:
    if not torch.isfinite(w).all():
        raise _not_finite(who)
    u, s, vh = torch.linalg.svd(scaled(w), full_matrices=False)
    n, p = w.shape[-2:]
    ranks = (s > n * torch.finfo(s.dtype).eps * s[..., :1]).sum(-1)
    rank = int(ranks.min())
    if rank < p:
        got = f"a matrix of rank {rank}, to which many frames are equally near; draw one by an init scheme"
        needs(False, RankError, who, f"{p} linearly independent columns (rows, if wide)", got)
    return u @ vh


def scaled(x: Tensor) -> Tensor:
    """Divides X by powers of 2 to entries around 1, so that squares neither overflow nor vanish."""
    parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.unsqueeze(-1)
    largest = parts.abs().amax((-3, -2, -1), keepdim=True)
    # The logarithm of the largest number is rounded up, to that of infinity.
    most = math.frexp(torch.finfo(x.dtype).max)[1] - 1
    parts = parts / torch.where(largest == 0, 1.0, largest.log2().floor().clamp(max=most).exp2())
    return torch.view_as_complex(parts) if x.is_complex() else parts.squeeze(-1)


def _not_finite(who: str) -> NonFiniteError:
    return NonFiniteError(f"{who} needs finite entries, got a matrix with NaN or infinity.")


def msign(x: Tensor, *, lowest: float = 1e-3, precision: str = "exact") -> Tensor:
    r"""Returns :math:`U V^H` of the singular value decomposition :math:`X = U S V^H`, by products alone.

    For X of full rank it is the frame nearest to X, the steepest direction in the spectral norm: :math:`⟨X, A⟩` over
    all A with :math:`‖A‖_2 ≤ 1` is largest there. Singular values from `lowest` times the largest on become 1, smaller
    ones stay between their share of the largest and 1, in their order; so a matrix without full rank gives its partial
    isometry up to rounding times 20 / `lowest`, and zero gives zero. No value is read on the host. NaN propagates.

    Costs 8 steps (9 in float64) of two products n x p x p and one p x p x p, about three more for each factor of 100
    in `lowest` below the default, and a polish.

    Args:
        x: matrices of shape (*, n, p), any floating or complex dtype; bfloat16 and float16 are done in float32.
        lowest: smallest singular value, over the largest, that is taken to 1; from 1e-12 to 0.5. Below 1e-6 it takes
            float64 to tell one from rounding.
        precision: "exact" ends with a polish in float64, at the rounding limit of the dtype; "fast" does not, and is
            off by a few :math:`eps √p` more.

    Returns:
        Matrices of the same shape and dtype, contiguous, without a gradient: `polar_factor` has one.

    References:
        Amsel, Persson, Musco, Gower, The Polar Express: optimal matrix sign methods and their application to the Muon
        algorithm, ICLR 2026.

    >>> msign(torch.tensor([[3.0, 0.0], [0.0, -4.0], [0.0, 0.0]]))
    tensor([[ 1.,  0.],
            [ 0., -1.],
            [ 0.,  0.]])
    """
    check_matrices("msign", x)
    PRECISION.require("msign", "precision", precision)
    lowest = at_least(1e-12, most=0.5).require("msign", "lowest", lowest)
    is_wide = x.shape[-2] < x.shape[-1]
    fine = x.detach().to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x.detach()
    fine = (fine.mH if is_wide else fine).resolve_conj().contiguous()
    signed = _signed(fine, float(lowest), precision == "exact")
    return (signed.mH.resolve_conj() if is_wide else signed).to(x.dtype).contiguous()


@opaque(lambda x, lowest, exact: torch.empty_like(x), dims=(2,))
def _signed(x: Tensor, lowest: float, exact: bool) -> Tensor:
    if not x.numel():
        return x.clone()
    if not may_sync_host(x) and x.dtype != working_dtype(x.dtype):
        x = _signed_in_few(x, lowest)
        return polished(x) if exact else x
    x = scaled(x)
    gram = x.mH @ x
    square = gram @ gram
    # ||X||_2^4 <= ||(X^H X)^2||_F, at most sqrt(p) times that.
    size = torch.linalg.matrix_norm(square, keepdim=True)
    bound = torch.where(size == 0, 1.0, size).pow(0.25)
    x, gram, square = x / bound, gram / bound.square(), square / bound.square().square()
    is_double = x.dtype == working_dtype(x.dtype)
    for i, (a, b, c) in enumerate(quintics(lowest * x.shape[-1] ** -0.125, is_double)):
        if i:
            gram = x.mH @ x
            square = gram @ gram
        x = plus_product(a * x, x, b * gram + c * square)
    return polished(x) if exact else x


def _signed_in_few(x: Tensor, lowest: float) -> Tensor:
    """Does the same in float32 or complex64 without a polish, where launches count."""
    parts, dims = (torch.view_as_real(x), (-3, -2, -1)) if x.is_complex() else (x, (-2, -1))
    size = torch.linalg.vector_norm(parts, dim=dims, keepdim=True, dtype=torch.float64)
    size = size.squeeze(-1) if x.is_complex() else size
    x = (x / size.clamp(min=torch.finfo(torch.float64).tiny)).to(x.dtype)
    gram = x.mH @ x
    # ||X||_2^4 <= ||(X^H X)^2||_F, at most sqrt(p) times that.
    size = torch.linalg.matrix_norm(gram @ gram, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny).pow(-0.25)
    x, gram = x * size, gram * size.square()
    for i, (a, b, c) in enumerate(quintics(lowest * x.shape[-1] ** -0.125, False)):
        gram = x.mH @ x if i else gram
        x = times_shifted(x, a, times_shifted(gram, b, gram, c))
    return x


def times_shifted(a: Tensor, shift: float, b: Tensor, share: float = 1.0) -> Tensor:
    """Returns A (shift I + share B), of two or three dimensions in one launch."""
    if a.dim() > 3:
        return a * shift + (a @ b) * share
    return (torch.addmm if a.dim() == 2 else torch.baddbmm)(a, a, b, beta=shift, alpha=share)


@functools.lru_cache(maxsize=64)
def quintics(lowest: float, is_double: bool) -> tuple[tuple[float, float, float], ...]:
    """Returns coefficients (a, b, c) that take singular values in [lowest, 1] to 1, up to rounding."""
    low, high = lowest, 1.0
    steps = []
    while 1 - low > _NEAR:
        # Where the interval is long, the best quintic all but vanishes inside; rounding there might change signs.
        start = max(low, 0.02407 * high)
        a, b, c = _best(start, high)
        if start > low:
            ends = sum(x * (a + x * x * (b + x * x * c)) for x in (low, high))
            a, b, c = (2 / ends * k for k in (a, b, c))
        reached = low * (a + low * low * (b + low * low * c))
        if reached < 0.5:
            # Beyond a long interval a quintic grows fast, and what rounding puts there with it.
            a, b, c = a / _MARGIN, b / _MARGIN**3, c / _MARGIN**5
        steps.append((a, b, c))
        low, high = low * (a + low * low * (b + low * low * c)), 2 - reached
    return (*steps, *[_LAST] * (2 if is_double else 1))


def _best(low: float, high: float) -> tuple[float, float, float]:
    """Finds the odd quintic nearest to 1 on an interval by Remez' exchange: errors +E, -E, +E, -E."""
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    a = b = c = 0.0
    before = math.inf
    for _ in range(50):
        points = numpy.array([low, *inner, high])
        system = numpy.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        a, b, c, error = (float(k) for k in numpy.linalg.solve(system, numpy.ones(4)))
        if abs(before - error) <= 1e-13:
            break
        before, root = error, math.sqrt(9 * b * b - 20 * a * c)
        inner = [math.sqrt((-3 * b + sign * root) / (10 * c)) for sign in (-1, 1)]
    return a, b, c


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
