r"""Geodesics of the Stiefel manifold and their inverse, in float64 or complex128.

With U = W Om + V, W^H V = 0, and A = alpha W Om W^H + V W^H - W V^H, the geodesics are exp(A) W exp((1 - alpha) Om),
with alpha = 1 for the canonical and alpha = 2 for the Euclidean metric. A maps the span of W and V into itself.
"""

from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional import exponential, skew_logarithm
from stiefelkit.functional._function import Function
from stiefelkit.manifolds.retractions import skew_part, tangent_parts

__all__ = ["canonical_logarithm", "geodesic"]

_MOST_STEPS = 200


def geodesic(w: Tensor, u: Tensor, *vectors: Tensor, alpha: int) -> tuple[Tensor, ...]:
    """Moves frames along the geodesic that leaves W in the direction U, for unit time.

    The factors exp(A) and exp((1 - alpha) Om) carry tangent vectors along, isometrically in either metric. Exponentials
    are at most 2p x 2p, and 3p x 3p (k vectors: (2 + k) p) where vectors are carried and n > 3p.

    Args:
        w: frames, shape (*, n, p), float64 or complex128.
        u: tangent vectors, same shape; of other vectors the tangent part counts.
        vectors: tangent vectors to carry, same shape.
        alpha: 1 for the canonical, 2 for the Euclidean metric.

    Returns:
        The frames, and the vectors carried to them.

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, SIAM J. Matrix Anal. 20, 1998.
        Hüper, Markina, Silva Leite, A Lagrangian approach to extremal curves on Stiefel manifolds, J. Geom. Mech. 13,
        2021.
    """
    n, p = w.shape[-2:]
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
    """Applies exp(A) on the span of B = [W, V C^-1] for any invertible C, where A B = B M.

    M is nearly skew for the Cholesky factor C of I + V^H V, on which nothing depends: a constant to the gradient. For
    any Z, A Z = B N and exp(A) Z = Z + B phi(M) N, phi(x) = (e^x - 1) / x: a block of the exponential of
    [[M, N], [0, 0]].
    """
    p = w.shape[-1]
    with torch.no_grad():
        gram = v.mH @ v
        shift = 1 + 1e-14 * gram.diagonal(dim1=-2, dim2=-1).real.sum(-1)[..., None, None]
        eye = torch.eye(p, dtype=w.dtype, device=w.device)
        c = torch.linalg.cholesky_ex(gram + shift * eye, upper=True)[0]
    b = torch.linalg.solve_triangular(c, v, upper=True, left=False)
    m = torch.cat([torch.cat([alpha * om, c], dim=-2), torch.cat([-(v.mH @ b), torch.zeros_like(c)], dim=-2)], dim=-1)
    right = [_image(w, om, v, c, z, alpha) for z in vectors]
    block = torch.cat([m, *right], dim=-1)
    block = torch.cat([block, block.new_zeros(*block.shape[:-2], len(right) * p, block.shape[-1])], dim=-2)
    top = exponential(block)[..., : 2 * p, :]
    basis = torch.cat([w, b], dim=-1)
    steps = (basis @ top[..., k * p : (k + 1) * p] for k in range(2, 2 + len(vectors)))
    return basis @ top[..., :p], *(z + step for z, step in zip(vectors, steps, strict=True))


def _image(w: Tensor, om: Tensor, v: Tensor, c: Tensor, z: Tensor, alpha: int) -> Tensor:
    """N with A Z = B N."""
    along = w.mH @ z
    return torch.cat([alpha * (om @ along) - v.mH @ z, c @ along], dim=-2)


def canonical_logarithm(w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Finds a tangent U at W whose canonical geodesic ends at Y.

    Square frames: W log(W^H Y), the shortest. Tall ones: an orthogonal completion of Y in a basis whose first columns
    are W is turned until its logarithm has no lower right block; converges linearly if Y is not far.

    Args:
        w: frames of shape (*, n, p), float64 or complex128.
        y: frames of the same shape.

    Returns:
        U of the same shape, and which were found, shape (*): of square real frames those in the same component. U has
        no derivative, and raises NotImplementedError when asked for one.

    References:
        Zimmermann, A matrix-algebraic algorithm for the Riemannian logarithm on the Stiefel manifold under the
        canonical metric, SIAM J. Matrix Anal. 38, 2017.
    """
    return _Logarithm.apply(w, y)  # type: ignore[return-value]


class _Logarithm(Function):
    @staticmethod
    def forward(w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return _logarithm(w, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError("The logarithm of a frame has no derivative here.")


def _logarithm(w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    n, p = w.shape[-2:]
    if n == p:
        a, found = skew_logarithm(w.mH @ y)
        return w @ a, found
    q, _ = torch.linalg.qr(torch.cat([w, y], dim=-1))
    # Q holds W up to a unitary factor, and as many columns of a basis of the rest of both as there are.
    basis = torch.cat([w, q[..., p:]], dim=-1)
    columns = basis.mH @ y
    turned = torch.linalg.qr(columns, mode="complete")[0]
    # The completion nearest to the identity is a good start.
    left, _, right = torch.linalg.svd(turned[..., p:, p:])
    v = torch.cat([columns, turned[..., p:] @ right.mH @ left.mH], dim=-1)
    if not w.is_complex():
        wrong = torch.linalg.det(v) < 0
        weakest = v[..., p:] @ left[..., -1:] @ left[..., -1:].mH
        v = torch.cat([columns, v[..., p:] - 2 * wrong[..., None, None] * weakest], dim=-1)
    a = torch.zeros_like(v)
    found = torch.zeros(v.shape[:-2], dtype=torch.bool, device=v.device)
    for _ in range(_MOST_STEPS):
        a, exists = skew_logarithm(v)
        rest = torch.linalg.matrix_norm(a[..., p:, p:])
        found = exists & (rest <= 1e-14 * v.shape[-1])
        if found.all():
            break
        turn = exponential(-a[..., p:, p:], skew=True)
        v = torch.cat([v[..., :p], v[..., p:] @ turn], dim=-1)
    return basis @ a[..., :p], found
