r"""Riemannian Hessians on the Stiefel manifold from Euclidean ones, in float64 or complex128.

With b = 1 for the canonical and b = 2 for the Euclidean metric, inner(Z, Z) = (b / 2) ||W^H Z||_F^2 + ||V||_F^2 for
Z = W Y + V, W^H V = 0. The geodesic that leaves W in the direction Z has the acceleration
W (Y^2 - V^H V) + (2 - b) V Y, so that, S = W^H G,

    inner(Z, Hess Z) = Re tr(Z^H E) + Re tr(G^H (W (Y^2 - V^H V) + (2 - b) V Y)),    E the Euclidean Hessian along Z.
"""

import torch
from torch import Tensor

from stiefelkit.functional._packing import check_alike
from stiefelkit.functional._stiefel.tangents import alpha_of, tangent_part

__all__ = ["riemannian_hessian"]


def riemannian_hessian(w: Tensor, g: Tensor, h: Tensor, u: Tensor, metric: str = "canonical") -> Tensor:
    r"""Turns the Euclidean Hessian of a function along U into the Riemannian one.

    With U = W Y + V, W^H V = 0, S = W^H G, G' = G - W S, a = 1 - alpha / 2, and P the orthogonal projection on the
    tangent space:

        Hess U = T + a / (1 - a) W W^H T,    T = P(H - W (S Y + Y S) / 2 - V (S + S^H) / 2 - a G' Y + a W V^H G).

    For alpha = 2 that is P(H - U (S + S^H) / 2), as the Weingarten map has it. Costs some seven products of n p^2.

    Args:
        w: frames, shape (*, n, p), float64 or complex128.
        g: Euclidean gradients there, same shape.
        h: derivatives of the Euclidean gradient in the direction U, same shape.
        u: tangent vectors, same shape.
        metric: "canonical" (alpha = 1) or "euclidean" (alpha = 2).

    Returns:
        Tangent vectors of the same shape.

    Raises:
        ShapeError: W has more columns than rows, or the others another shape.
        OptionError: no metric has that name.

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, SIAM J. Matrix Anal. 20, 1998:
        Hessians are second derivatives along geodesics.
        Absil, Mahony, Trumpf, An extrinsic look at the Riemannian Hessian, Geometric Science of Information, 2013:
        alpha = 2.
    """
    check_alike("riemannian_hessian", w, g, h, u)
    alpha = alpha_of("riemannian_hessian", metric)
    s, y = w.mH @ g, w.mH @ u
    v = u - w @ y
    e = h - (w @ (s @ y + y @ s) + v @ (s + s.mH)) / 2
    if alpha == 2:
        return tangent_part(w, e)
    a = 1 - alpha / 2
    t = tangent_part(w, e + a * (w @ (v.mH @ g) - (g - w @ s) @ y))
    return torch.add(t, w @ (w.mH @ t), alpha=a / (1 - a))
