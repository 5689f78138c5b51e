r"""Geodesics of the Stiefel manifold, in float64 or complex128.

With U = W Om + V, W^H V = 0, and A = alpha W Om W^H + V W^H - W V^H, the geodesics are exp(A) W exp((1 - alpha) Om),
with alpha = 1 for the canonical and alpha = 2 for the Euclidean metric. A maps the span of W and V into itself.
"""

import torch
from torch import Tensor

from stiefelkit.functional._exponential.packed import on_span
from stiefelkit.functional._exponential.taylor import exponential
from stiefelkit.functional._packing import check_alike
from stiefelkit.functional._stiefel.tangents import alpha_of, skew_part, tangent_parts


def geodesic(w: Tensor, u: Tensor, *vectors: Tensor, metric: str = "canonical") -> tuple[Tensor, ...]:
    """Moves frames along the geodesic that leaves W in the direction U, for unit time.

    The factors :math:`exp(A)` and :math:`exp((1 - α) Ω)` carry tangent vectors along, isometrically in either metric.
    Exponentials are at most 2p x 2p, and 3p x 3p (k vectors: :math:`(2 + k) p`) where vectors are carried and
    :math:`n > 3p`. Differentiable any number of times.

    Args:
        w: frames, shape (*, n, p), float64 or complex128.
        u: tangent vectors, same shape; of other vectors the tangent part counts.
        vectors: tangent vectors to carry, same shape.
        metric: "canonical" or "euclidean".

    Returns:
        A tuple: the frames, then each of the vectors, carried to them; of one entry where there are no vectors.

    Raises:
        ShapeError: W has more columns than rows, or the others another shape.
        OptionError: no metric has that name.

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, SIAM J. Matrix Anal. 20, 1998.
        Hüper, Markina, Silva Leite, A Lagrangian approach to extremal curves on Stiefel manifolds, J. Geom. Mech. 13,
        2021.
    """
    check_alike("geodesic", w, u, *vectors)
    alpha, (n, p) = alpha_of("geodesic", metric), w.shape[-2:]
    if n == p:
        om = skew_part(w.mH @ u)
        half = exponential(om, skew=True)
        if not vectors:
            return (w @ half,)
        left, right = (half, None) if alpha == 1 else (exponential(alpha * om, skew=True), half.mH)
        moved = (w @ left @ (w.mH @ z) for z in vectors)
        return w @ half, *(z if right is None else z @ right for z in moved)
    om, v = tangent_parts(w, u)
    moved = _whole(w, om, v, vectors, alpha) if n <= (2 + len(vectors)) * p else _thin(w, om, v, vectors, alpha)
    if alpha == 1:
        return moved
    right = exponential((1 - alpha) * om, skew=True)
    return tuple(z @ right for z in moved)


def _whole(w: Tensor, om: Tensor, v: Tensor, vectors: tuple[Tensor, ...], alpha: int) -> tuple[Tensor, ...]:
    """Applies exp(A) as it stands, n x n: the smaller matrix where p is large."""
    left = v @ w.mH
    factor = exponential(alpha * (w @ om @ w.mH) + left - left.mH, skew=True)
    return tuple(factor @ z for z in (w, *vectors))


def _thin(w: Tensor, om: Tensor, v: Tensor, vectors: tuple[Tensor, ...], alpha: int) -> tuple[Tensor, ...]:
    """Applies exp(A) on the span of B = [W, V C^-1], where A B = B M (see `on_span`).

    For any Z, A Z = B N and exp(A) Z = Z + B phi(M) N, phi(x) = (e^x - 1) / x: a block of the exponential of
    [[M, N], [0, 0]].
    """
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
