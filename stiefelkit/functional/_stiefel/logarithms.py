"""Tangent vectors whose geodesics lead from frame to frame, in float64 or complex128."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.functional._arithmetic.function import Function
from stiefelkit.functional._packing import check_alike
from stiefelkit.functional._polish import polished
from stiefelkit.functional._stiefel.completion import nearest_completion, shorten, skew_from, spectrum
from stiefelkit.functional._stiefel.geodesics import geodesic
from stiefelkit.functional._stiefel.shooting import shoot
from stiefelkit.functional._stiefel.tangents import METRICS, alpha_of
from stiefelkit.metrics import defect

__all__ = ["geodesic_logarithm"]

_CERTAIN = {False: 0.89 * math.pi, True: 0.5 * math.pi}
"""A geodesic of at most this length is the only shortest one, in real and in complex spaces."""

_OTHER_STARTS = 2


def geodesic_logarithm(w: Tensor, y: Tensor, metric: str = "canonical") -> tuple[Tensor, Tensor]:
    """Finds a tangent U at W whose geodesic ends at Y.

    Square frames: W log(W^H Y), the shortest. Tall ones in the canonical metric: in a basis of W and of what Y adds,
    m = min(n, 2p), Y is completed to a unitary m x m matrix with the shortest logarithm. Newton's method with trust
    regions descends to a minimum from anywhere, and every minimum is a geodesic; it is the least if U is no longer than
    0.89 pi (complex: pi / 2), or if real and n = p + 1 or p = 1. For longer ones the shortest of three starts is taken.

    0.89 pi < pi / sqrt(5 / 4): the curvature is 5 / 4 at most, and no closed geodesic is shorter than 2 pi. In complex
    spaces the curvature is at most 4, as ||[X, Y]||_F^2 <= 2 ||X||_F^2 ||Y||_F^2, and no closed geodesic is shorter
    than sqrt(2) pi, the length of W e^{it}; some tangent vectors of length 0.66 pi are not the shortest.

    In the Euclidean metric tall frames are joined by shooting: U is the only shortest one if it is real and shorter
    than pi; if longer there may be a shorter one, and some pairs have none. The frames of one column are a sphere in
    that metric, complex ones too, and real ones in both: U is the great circle in closed form, up to the opposite pole.

    Costs some 10 to 20 Hermitian eigenvalue problems of m x m for each start; by shooting 4 to 100 problems and up to
    60 times eight products of m x m for each.

    Args:
        w: frames of shape (*, n, p), float64 or complex128, ||W^H W - I||_F <= 1e-9 (1 + sqrt p)^2.
        y: frames of the same shape.
        metric: "canonical" or "euclidean".

    Returns:
        U of the same shape, which leads from the frame nearest to W to that nearest to Y, and which were found, shape
        (*): those whose geodesic was checked to end there; NaN in the others, which are square real frames with
        different determinants, what is no frame, and tall frames that shooting did not join. U has no derivative, and
        raises NotImplementedError when asked for one.

    Raises:
        ShapeError: W has more columns than rows, or Y another shape.
        OptionError: no metric has that name.

    References:
        Zimmermann, A matrix-algebraic algorithm for the Riemannian logarithm on the Stiefel manifold under the
        canonical metric, SIAM J. Matrix Anal. 38, 2017; its step is the one of steepest descent here.
        Rentmeesters, Algorithms for data fitting on some common homogeneous spaces, thesis, Louvain, 2013: curvature.
        Böttcher, Wenzel, The Frobenius norm and the commutator, Linear Algebra Appl. 429, 2008.
        Zimmermann, Stoye, The injectivity radius of the compact Stiefel manifold under the Euclidean metric, SIAM J.
        Matrix Anal. 46, 2025: it is pi.
    """
    check_alike("geodesic_logarithm", w, y)
    alpha_of("geodesic_logarithm", metric)
    return _Logarithm.apply(*torch.broadcast_tensors(w, y), metric)  # type: ignore[return-value]


class _Logarithm(Function):
    @staticmethod
    def forward(w: Tensor, y: Tensor, metric: str) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        u, exists = _logarithm(w.reshape(-1, *w.shape[-2:]), y.reshape(-1, *y.shape[-2:]), metric)
        return u.view(w.shape), exists.view(w.shape[:-2])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError("The logarithm of a frame has no derivative here.")


def _logarithm(w: Tensor, y: Tensor, metric: str) -> tuple[Tensor, Tensor]:
    u = torch.full_like(w, torch.nan)
    exists = _is_frame(w) & _is_frame(y)
    frames = exists.nonzero().squeeze(-1)
    if not len(frames):
        return u, exists
    w, y = polished(w[frames]), polished(y[frames])
    n, p = w.shape[-2:]
    u_frames = w @ skew_from(*spectrum(w.mH @ y), w.dtype) if n == p else _tall(w, y, metric)
    off = torch.linalg.matrix_norm(geodesic(w, u_frames, metric=metric)[0] - y)
    exists[frames] = off <= 2e-13 * math.sqrt(min(n, 2 * p))
    u[frames] = u_frames
    return u.masked_fill(~exists[:, None, None], torch.nan), exists


def _is_frame(w: Tensor) -> Tensor:
    # What is left, by `polished`, of the frames that manifolds move; one step more takes it below the end's tolerance.
    return torch.linalg.matrix_norm(defect(w)) <= 1e-9 * (1 + w.shape[-1] ** 0.5) ** 2


def _tall(w: Tensor, y: Tensor, metric: str) -> Tensor:
    p = w.shape[-1]
    q, _ = torch.linalg.qr(torch.cat([w, y], dim=-1))
    # Q holds W up to a unitary factor, and as many columns of a basis of the rest of both as there are.
    basis = torch.cat([w, q[..., p:]], dim=-1)
    if p == 1 and (metric == "euclidean" or not w.is_complex()):
        return basis @ _great_circle(basis.mH @ y)
    if metric == "euclidean":
        return basis @ shoot(basis.mH @ y, METRICS[metric])
    v = nearest_completion(basis.mH @ y)
    log, rest = shorten(v, p)
    k = v.shape[-1] - p
    doubtful = (rest > 1e-11) | (_length(log) > _CERTAIN[v.is_complex()])
    which = doubtful.nonzero().squeeze(-1)
    if len(which) and (k > 1 or v.is_complex()):
        for phi in _turns(k, v.dtype).to(v.device):
            turned = torch.cat([v[which, :, :p], v[which, :, p:] @ phi], dim=-1)
            other, other_rest = shorten(turned, p)
            better = (other_rest <= 1e-11) & ((rest[which] > 1e-11) | (_length(other) < _length(log[which]) - 1e-9))
            log[which[better]], rest[which[better]] = other[better], other_rest[better]
    return basis @ log[..., :p]


def _great_circle(y: Tensor) -> Tensor:
    """Returns the tangent vector at the first unit vector that leads to Y (b, 2, 1), of length one, around a sphere."""
    along, x = y[..., :1, :].real, y.clone()
    x[..., :1, :] -= along
    sine = torch.linalg.matrix_norm(x, keepdim=True)
    # At the opposite pole every direction leads there.
    x[..., 1:, :] += (sine == 0) & (along < 0)
    return x * torch.atan2(sine, along) / torch.where(sine == 0, 1.0, sine)


def _length(log: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(log) / math.sqrt(2)


@functools.lru_cache(maxsize=16)
def _turns(k: int, dtype: torch.dtype) -> Tensor:
    """Fixed unitary matrices for the other starts, the same for all, so that members do not depend on each other."""
    with torch.inference_mode(False):
        phi = init.haar((_OTHER_STARTS, k, k), dtype, torch.Generator().manual_seed(k))
        if not dtype.is_complex:
            phi[..., 0] *= torch.linalg.det(phi).sign().unsqueeze(-1)
        return phi
