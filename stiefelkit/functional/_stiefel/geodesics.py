r"""Geodesics of the Stiefel manifold, and the tangent vectors whose geodesics lead from frame to frame.

All in float64 or complex128. With U = W Om + V, W^H V = 0, and A = alpha W Om W^H + V W^H - W V^H, the geodesics are
exp(A) W exp((1 - alpha) Om), with alpha = 1 for the canonical and alpha = 2 for the Euclidean metric. A maps the span
of W and V into itself.

Canonical logarithms come from completions of a frame to a unitary matrix with the shortest logarithm. V = [Y, Z] is
unitary, Y its first p columns, and L = log V is skew with eigenvalues in i [-pi, pi]. All completions are
V diag(I, Phi), with det V = 1 where real. The function F = ||L||_F^2 / 2 of the completion has the gradient C, the
lower right block of L, and the Hessian X -> P h(ad_L) X, h(i t) = (t / 2) cot(t / 2) <= 1, where P takes the lower
right block. At a minimum C = 0, and exp(t L) takes the first p columns of the identity to Y along a geodesic, of length
sqrt(F); the least of the minima is a shortest one.
"""

import math
from typing import Any, NoReturn

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.function import Context, Function
from stiefelkit.functional._exponential.packed import on_span, skew_logarithm
from stiefelkit.functional._exponential.taylor import exponential
from stiefelkit.functional._packing import check_alike
from stiefelkit.functional._polar import polished
from stiefelkit.functional._stiefel.conjugate_gradients import truncated
from stiefelkit.functional._stiefel.tangents import alpha_of, skew_part, tangent_parts
from stiefelkit.metrics import defect

_MOST_STEPS = 200
_MOST_INNER = 60


def geodesic(w: Tensor, u: Tensor, *vectors: Tensor, metric: str = "canonical") -> tuple[Tensor, ...]:
    """Moves frames along the geodesic that leaves W in the direction U, for unit time.

    The factors :math:`exp(A)` and :math:`exp((1 - α) Ω)` transport tangent vectors, isometrically in either metric.
    Exponentials are at most 2p x 2p, with k vectors :math:`(2 + k) p`. Differentiable any number of times.

    Args:
        w: frames, shape (*, n, p), float64 or complex128.
        u: tangent vectors, same shape; of other vectors the tangent part counts.
        vectors: tangent vectors to transport, same shape.
        metric: "canonical" or "euclidean".

    Returns:
        A tuple of the frames, then of each of the vectors there.

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, SIAM J. Matrix Anal. 20, 1998.
        Hüper, Markina, Silva Leite, A Lagrangian approach to extremal curves on Stiefel manifolds, J. Geom. Mech. 13,
        2021.
    """
    check_alike("geodesic", w, u, *vectors)
    alpha, (n, p) = alpha_of("geodesic", metric), w.shape[-2:]
    om, v = tangent_parts(w, u)
    if n <= (2 + len(vectors)) * p:  # exp(A), n x n, is the smaller matrix
        left = v @ w.mH
        factor = exponential(alpha * (w @ om @ w.mH) + left - left.mH, skew=True)
        moved = tuple(factor @ z for z in (w, *vectors))
    else:
        moved = _thin(w, om, v, vectors, alpha)
    if alpha == 1:
        return moved
    right = exponential((1 - alpha) * om, skew=True)
    return tuple(z @ right for z in moved)


def _thin(w: Tensor, om: Tensor, v: Tensor, vectors: tuple[Tensor, ...], alpha: int) -> tuple[Tensor, ...]:
    """Applies exp(A) on the span of B, A B = B M, to Z by A Z = B N: exp(A) Z = Z + B phi(M) N, phi = (e^x - 1) / x."""
    p = w.shape[-1]
    m, b, c = on_span(alpha * om, v)
    # N of each: [alpha Om W^H Z - V^H Z; C W^H Z].
    inside = ((w.mH @ z, z) for z in vectors)
    right = [torch.cat([alpha * (om @ along) - v.mH @ z, c @ along], dim=-2) for along, z in inside]
    block = torch.cat([m, *right], dim=-1)
    block = torch.cat([block, block.new_zeros(*block.shape[:-2], len(right) * p, block.shape[-1])], dim=-2)
    top = exponential(block)[..., : 2 * p, :]
    basis = torch.cat([w, b], dim=-1)
    steps = (basis @ top[..., k * p : (k + 1) * p] for k in range(2, 2 + len(vectors)))
    return basis @ top[..., :p], *(z + step for z, step in zip(vectors, steps, strict=True))


def geodesic_logarithm(w: Tensor, y: Tensor, metric: str = "canonical") -> tuple[Tensor, Tensor]:
    """Finds a tangent U at W whose geodesic ends at Y.

    Square frames: :math:`W log(W^H Y)`, the shortest. Tall ones in the canonical metric: in a basis of W and of what Y
    adds, :math:`m = min(n, 2p)`, Y is completed to a unitary m x m matrix with the shortest logarithm. Newton's method
    with trust regions descends to a minimum from anywhere, and every minimum is a geodesic; it is the least if U is no
    longer than :math:`0.89 π` (complex: :math:`π / 2`), or if real and :math:`n = p + 1` or :math:`p = 1`. Longer ones
    may not be the shortest.

    :math:`0.89 π < π / √{5 / 4}`: the curvature is :math:`5 / 4` at most, and no closed geodesic is shorter than
    :math:`2 π`. In complex spaces the curvature is at most 4, as :math:`‖[X, Y]‖_F^2 ≤ 2 ‖X‖_F^2 ‖Y‖_F^2`, and no
    closed geodesic is shorter than :math:`√2 π`, the length of :math:`W e^{it}`; some tangent vectors of length
    :math:`0.66 π` are not the shortest.

    Frames of one column are a sphere in the Euclidean metric, real ones in both: U is the great circle, up to the
    opposite pole. Of tall frames with more columns that metric has no logarithm here.

    Costs some 20 to 40 Hermitian eigenvalue problems of m x m. The frames of a batch are taken one by one.

    Args:
        w: frames of shape (*, n, p), float64 or complex128, :math:`‖W^H W - I‖_F ≤ 10^{-9} (1 + √p)^2`.
        y: frames of the same shape.
        metric: "canonical"; or "euclidean", of square frames and of one column.

    Returns:
        U of the same shape, which leads from the frame nearest to W to that nearest to Y, and which were found, shape
        (*): those whose geodesic was checked to end there. U is NaN in the others: square real frames with different
        determinants, and matrices that are no frames. U has no derivative.

    References:
        Zimmermann, A matrix-algebraic algorithm for the Riemannian logarithm on the Stiefel manifold under the
        canonical metric, SIAM J. Matrix Anal. 38, 2017; its step is the one of steepest descent here.
        Rentmeesters, Algorithms for data fitting on some common homogeneous spaces, thesis, Louvain, 2013: curvature.
        Böttcher, Wenzel, The Frobenius norm and the commutator, Linear Algebra Appl. 429, 2008.
    """
    check_alike("geodesic_logarithm", w, y)
    n, p = w.shape[-2:]
    if alpha_of("geodesic_logarithm", metric) == 2 and 1 < p < n:
        raise NotImplementedError(
            'geodesic_logarithm needs metric="canonical" for tall frames of several columns, got "euclidean".'
        )
    return _Logarithm.of(*torch.broadcast_tensors(w, y), metric)


class _Logarithm(Function):
    @staticmethod
    def forward(w: Tensor, y: Tensor, metric: str) -> tuple[Tensor, Tensor]:
        if not w.numel():
            return w.clone(), torch.zeros(w.shape[:-2], dtype=torch.bool, device=w.device)
        pairs = zip(w.reshape(-1, *w.shape[-2:]), y.reshape(-1, *y.shape[-2:]), strict=True)
        u, exists = zip(*(_logarithm(*pair, metric) for pair in pairs), strict=True)
        return torch.stack(u).view(w.shape), torch.tensor(exists, device=w.device).view(w.shape[:-2])

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Context, *gradients: Tensor) -> NoReturn:
        raise NotImplementedError("The logarithm of a frame has no derivative here.")


def _logarithm(w: Tensor, y: Tensor, metric: str) -> tuple[Tensor, bool]:
    """Returns the tangent vector of one pair of frames, NaN if none was found, and whether one was."""
    if _is_frame(w) and _is_frame(y):
        w, y = polished(w), polished(y)
        n, p = w.shape
        u = w @ skew_logarithm(w.mH @ y)[0] if n == p else _tall(w, y, metric)
        if _length(geodesic(w, u, metric=metric)[0] - y) <= 2e-13 * math.sqrt(min(n, 2 * p)):
            return u, True
    return torch.full_like(w, torch.nan), False


def _is_frame(w: Tensor) -> bool:
    # The error of frames that manifolds move and polish once; one step more takes it below the end's tolerance.
    return _length(defect(w)) <= 1e-9 * (1 + w.shape[-1] ** 0.5) ** 2


def _tall(w: Tensor, y: Tensor, metric: str) -> Tensor:
    p = w.shape[-1]
    q, _ = torch.linalg.qr(torch.cat([w, y], dim=-1))
    # Q holds W up to a unitary factor, and as many columns of a basis of the rest of both as there are.
    basis = torch.cat([w, q[:, p:]], dim=-1)
    y = basis.mH @ y
    if p == 1 and (metric == "euclidean" or not w.is_complex()):
        return basis @ _great_circle(y)
    return basis @ _shortest_logarithm(_nearest_completion(y), p)[:, :p]


def _great_circle(y: Tensor) -> Tensor:
    """Returns the tangent vector at the first unit vector that leads to Y (2, 1), of length one, around a sphere."""
    along, x = y[0].real.item(), y.clone()
    x[0] -= along
    sine = _length(x)
    if sine == 0 and along < 0:  # at the opposite pole every direction leads there
        x[1:] += 1
    return x * (math.atan2(sine, along) / (sine or 1.0))


def _length(m: Tensor) -> float:
    return torch.linalg.matrix_norm(m).item()


def _nearest_completion(y: Tensor) -> Tensor:
    """Completes a frame (m, p), m > p, so that Re tr V is largest, to a unitary V (m, m), det V = 1 where real."""
    p = y.shape[-1]
    rest = torch.linalg.qr(y, mode="complete")[0][:, p:]
    left, _, right = torch.linalg.svd(rest[p:])
    z = rest @ right.mH @ left.mH
    v = torch.cat([y, z], dim=-1)
    if y.is_complex() or torch.linalg.det(v) > 0:
        return v
    return torch.cat([y, z - 2 * z @ left[:, -1:] @ left[:, -1:].mH], dim=-1)


def _shortest_logarithm(v: Tensor, p: int) -> Tensor:
    """Turns all but the first p columns of a unitary matrix until its logarithm is shortest, and returns that.

    By Newton's method with trust regions, its equations solved by conjugate gradients. As h <= 1, the step -C alone
    would shorten always, but slowly; where the curvature is negative a step goes along it.
    """
    log = skew_logarithm(v)[0]
    size, radius, previous = _length(log[p:, p:]), 1.0, math.inf
    for _ in range(_MOST_STEPS):
        if size <= 1e-15 * len(v) or max(size, previous) < 1e-12:
            break
        step, promised = _newton_step(log, p, radius)
        turned = polished(torch.cat([v[:, :p], v[:, p:] @ exponential(step, skew=True)], dim=-1))
        new_log = skew_logarithm(turned)[0]
        old, new = _length(log) ** 2 / 2, _length(new_log) ** 2 / 2
        # Near the end both differences are rounding.
        slack = 1e-13 * (1 + old)
        quality = (old - new + slack) / (promised + slack)
        length = _length(step)
        if quality < 0.25:
            radius = length / 4
        elif quality > 0.75 and length > 0.99 * radius:
            radius *= 2
        previous = size
        if quality > 0.05:
            v, log = turned, new_log
            size = _length(log[p:, p:])
    return log


def _newton_step(log: Tensor, p: int, radius: float) -> tuple[Tensor, float]:
    """Returns a step within the radius, and by how much F should fall."""
    t, q = torch.linalg.eigh(-1j * log.to(torch.complex128))
    low, curvature = q[p:], _curvature(t)

    def bent(x: Tensor) -> Tensor:
        y = low @ (curvature * (low.mH @ x.to(low.dtype) @ low)) @ low.mH
        # Rounding's Hermitian part would grow: the curvature says nothing of it.
        return skew_part(y if x.is_complex() else y.real)

    model = truncated(log[p:, p:], bent, radius, 0.1, 1.0, _MOST_INNER, 1e-6)
    return model.u, model.gain


def _curvature(t: Tensor) -> Tensor:
    """Returns h of all differences, x / 2 cot(x / 2), which falls to minus infinity at 2 pi."""
    x = (t.unsqueeze(-1) - t) / 2
    small = x.abs() < 1e-4
    return torch.where(small, 1 - x * x / 3, x / torch.where(small, 1.0, x).tan()).clamp(min=-1e6)
