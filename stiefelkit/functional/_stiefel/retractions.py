"""Retractions on the Stiefel manifold, by name, and what each of them carries tangent vectors along with."""

from collections.abc import Callable

import torch
from torch import Tensor

from stiefelkit.functional._packing import check_alike
from stiefelkit.functional._polar import polar_factor
from stiefelkit.functional._stiefel.cayley_step import cayley_retraction
from stiefelkit.functional._stiefel.tangents import tangent_part

__all__ = ["RETRACTIONS", "polar_retraction", "qr_retraction"]


def polar_retraction(w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Moves frames to the ones nearest to W + U; carries by projection. Of second order for the Euclidean metric.

    Arguments, results and errors are those of `cayley_retraction`; steps may have a length of about 1e6.

    Args:
        w: frames of shape (*, n, p) in float64 or complex128.
        u: tangent vectors at W, same shape.
        *vectors: tangent vectors that are carried along.

    References:
        Absil, Malick, Projection-like retractions on matrix manifolds, SIAM J. Optim. 22, 2012.
    """
    check_alike("polar_retraction", w, u, *vectors)
    moved = polar_factor(w + tangent_part(w, u), well_conditioned=True)
    return moved, *(tangent_part(moved, z) for z in vectors)


def qr_retraction(w: Tensor, u: Tensor, *vectors: Tensor) -> tuple[Tensor, ...]:
    """Moves frames to the Q factor of W + U, with R's diagonal positive; carries by projection. Of first order.

    Arguments, results and errors are those of `cayley_retraction`; steps may have any length.

    Args:
        w: frames of shape (*, n, p) in float64 or complex128.
        u: tangent vectors at W, same shape.
        *vectors: tangent vectors that are carried along.

    References:
        Absil, Mahony, Sepulchre, Optimization algorithms on matrix manifolds, 2008, section 4.1.
    """
    check_alike("qr_retraction", w, u, *vectors)
    q, r = torch.linalg.qr(w + tangent_part(w, u))
    # The diagonal is real, so its signs are constants, and the Q factor of the positive R is W itself at U = 0.
    moved = q * torch.sgn(r.detach().diagonal(dim1=-2, dim2=-1)).unsqueeze(-2)
    return moved, *(tangent_part(moved, z) for z in vectors)


RETRACTIONS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "cayley": cayley_retraction,
    "polar": polar_retraction,
    "qr": qr_retraction,
}
"""Name to function of frames W, tangent vectors U and further ones to be carried, each of shape (*, n, p)."""
