"""The orthogonal polar factor, the nearest frame, with its derivatives of every order."""

import math
from typing import Any

import torch
from torch import Tensor

from stiefelkit.errors import DtypeError, NonFiniteError, RankError, ShapeError
from stiefelkit.functional._arithmetic.function import Function, keep
from stiefelkit.functional._arithmetic.product import opaque
from stiefelkit.functional._polish import polished
from stiefelkit.metrics import orthogonality_error, working_dtype
from stiefelkit.numbers import FLAG

_NEARLY_A_FRAME = 0.1
_POLISHED_IN_ONE = 1e-8


def nearest_frame(w: Tensor) -> Tensor:
    """Returns the frame nearest to W in the Frobenius norm: its orthogonal polar factor, see `polar_factor`.

    An SVD unless W is nearly a frame already, then one to four `polish` steps; one value is read on the host.

    Args:
        w: matrices of shape (*, n, p) of full rank, any floating or complex dtype.

    Returns:
        Frames of the same shape and dtype, with orthonormal rows where :math:`n < p`. Differentiable any number of
        times.

    Raises:
        ShapeError, DtypeError, NonFiniteError, RankError: as `polar_factor`.

    >>> nearest_frame(torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]]))
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    return _factor("nearest_frame", w, False)


def polar_factor(x: Tensor, *, well_conditioned: bool = False) -> Tensor:
    r"""Returns the frame Q of :math:`X = Q H` with H Hermitian and positive: the frame nearest to X.

    The derivative is :math:`dQ = Q Z + (I - Q Q^H) dX H^{-1}`, where the skew Z solves
    :math:`H Z + Z H = Q^H dX - dX^H Q`; it is finite wherever X has full rank, also at repeated singular values, and so
    are those of it. Differentiable any number of times, once of them in forward mode; composes with vmap. Worked out in
    float64 or complex128 and rounded once. Wide matrices are done as their adjoint, :math:`Q(X) = Q(X^H)^H`.

    Args:
        x: matrices of shape (*, n, p) of full rank, any size from 1e-300 to 1e300, any floating or complex dtype.
        well_conditioned: says that the condition of X is below about 1e6; Q then comes from the eigenvectors of
            :math:`X^H X` instead of an SVD, no value is branched on, and the rank is not checked.

    Returns:
        Frames of the same shape and dtype, with orthonormal rows where :math:`n < p`.

    Raises:
        ShapeError: X is a vector or a number.
        DtypeError: X is no tensor, or of integers.
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
        raise DtypeError(f"{who} needs a floating or complex tensor, got {getattr(x, 'dtype', type(x).__name__)}.")
    if x.dim() < 2:
        raise ShapeError(f"{who} needs matrices of shape (*, n, p), got shape {tuple(x.shape)}.")


def _factor(who: str, x: Tensor, well_conditioned: bool) -> Tensor:
    check_matrices(who, x)
    exact = x.to(working_dtype(x.dtype)).resolve_conj()
    if x.shape[-2] < x.shape[-1]:
        q = _Polar.of(exact.mH.resolve_conj(), who, well_conditioned).mH.resolve_conj()  # type: ignore[union-attr]
    else:
        q = _Polar.of(exact, who, well_conditioned)
    return q.to(x.dtype).contiguous()  # type: ignore[union-attr]


class _Polar(Function):
    """Saves X and Q itself, on which a backward of differentiable operations keeps further derivatives right."""

    @staticmethod
    def forward(x: Tensor, who: str, well_conditioned: bool) -> Tensor:  # type: ignore[override]
        return _by_eigenvectors(x, who) if well_conditioned else _nearest(x, who)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep(ctx, inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        x, q = ctx.saved_tensors
        return _derivative(x, q, g), None, None

    @staticmethod
    def tangent(ctx: Any, t: Tensor, *_: None) -> Tensor:  # type: ignore[override]
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
    def forward(h: Tensor, s: Tensor) -> Tensor:  # type: ignore[override]
        values, v = torch.linalg.eigh(h)
        return v @ ((v.mH @ s @ v) / (values.unsqueeze(-1) + values.unsqueeze(-2))) @ v.mH

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        keep(ctx, inputs[0], output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        h, z = ctx.saved_tensors
        y = _Lyapunov.of(h, g)
        return -(y @ z.mH + z.mH @ y), y  # type: ignore[operator, return-value]

    @staticmethod
    def tangent(ctx: Any, th: Tensor | None, ts: Tensor | None) -> Tensor:  # type: ignore[override]
        h, z = ctx.saved_tensors
        ts = torch.zeros_like(z) if ts is None else ts
        return _Lyapunov.of(h, ts if th is None else ts - th @ z - z @ th)  # type: ignore[return-value]


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
    if (ranks < p).any():
        raise RankError(
            f"{who} needs {p} linearly independent columns (rows, if wide), got a matrix of rank {int(ranks.min())}, "
            "to which many frames are equally near; draw one by an init scheme."
        )
    return u @ vh


def scaled(x: Tensor) -> Tensor:
    """Returns X divided by powers of 2 to entries around 1, so that squares neither overflow nor vanish."""
    parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.unsqueeze(-1)
    largest = parts.abs().amax((-3, -2, -1), keepdim=True)
    # The logarithm of the largest number is rounded up, to that of infinity.
    most = math.frexp(torch.finfo(x.dtype).max)[1] - 1
    parts = parts / torch.where(largest == 0, 1.0, largest.log2().floor().clamp(max=most).exp2())
    return torch.view_as_complex(parts) if x.is_complex() else parts.squeeze(-1)


def _not_finite(who: str) -> NonFiniteError:
    return NonFiniteError(f"{who} needs finite entries, got a matrix with NaN or infinity.")
