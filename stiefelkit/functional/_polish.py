"""One Newton step towards the nearest frame."""

import torch
from torch import Tensor

from stiefelkit.metrics import defect, orthogonality_error

__all__ = ["nearest_frame", "polish"]


def polish(w: Tensor) -> Tensor:
    r"""Returns W - W (W^H W - I) / 2, whose defect is of the order of the square of W's.

    One Newton-Schulz step of the polar decomposition. A frame's defect d becomes 3/4 d^2, down to the rounding of
    the dtype it is computed in, which is that of W.

    Args:
        w: nearly orthonormal columns, shape (*, n, p), defect below about 0.1.

    Returns:
        The polished matrix, same shape and dtype.
    """
    return w - (w @ defect(w)) / 2


def nearest_frame(w: Tensor) -> Tensor:
    """Returns the orthogonal polar factor of W: the frame nearest to it in the Frobenius norm.

    An SVD unless W is nearly a frame already, then `polish` until the defect is that of rounding.

    Args:
        w: matrices of shape (*, n, p), n >= p, float64 or complex128, of full column rank (else the factor is not
            unique, and one of them is returned).

    Returns:
        Frames of the same shape and dtype.
    """
    if orthogonality_error(w).max() > 0.1:
        u, _, vh = torch.linalg.svd(w, full_matrices=False)
        w = u @ vh
    while orthogonality_error(w).max() > 1e-7:
        w = polish(w)
    return polish(w)
