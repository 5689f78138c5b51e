"""Distances of matrices from frames, what rounding alone causes, and the singular values of layers as operators."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.errors import OptionError, ShapeError, needs, suggest_names
from stiefelkit.metrics.operators import Lipschitz, lipschitz
from stiefelkit.numbers import check_counts
from stiefelkit.tensors import check_dtype, check_tensors, working_dtype

__all__ = [
    "FRAME_TOLERANCE", "Lipschitz", "bits_lost", "defect", "frame_tolerance", "lipschitz", "orthogonality_error",
    "permitted_error", "permitted_return", "rounding_limit", "scale_of", "working_dtype",
]  # fmt: skip
suggest_names(__name__)

FRAME_TOLERANCE = 100
"""A frame has :math:`‖W^H W - I‖_F` at most this many times the rounding limit of its dtype.

In bfloat16 and float16, where that would admit any matrix, at most 4 limits or 0.1, the larger.
"""


def orthogonality_error(w: Tensor) -> Tensor:
    r"""Returns :math:`‖W^H W - I‖_F` in float64, shape (*), for matrices w of shape (*, n, p), of any dtype.

    Of a wide weight, whose rows are orthonormal, pass `.mT`.

    >>> import torch
    >>> orthogonality_error(torch.eye(3)).item()
    0.0
    """
    if not isinstance(w, Tensor):
        check_tensors("orthogonality_error", w)
    if w.dim() < 2 or w.shape[-2] < w.shape[-1]:
        got = f"shape {tuple(w.shape)}; of a wide weight pass .mT"
        needs(False, ShapeError, "orthogonality_error", "matrices of shape (*, n, p), n >= p", got)
    return torch.linalg.matrix_norm(defect(w.detach().to(working_dtype(w.dtype))))


def defect(w: Tensor) -> Tensor:
    """Returns :math:`W^H W - I` of matrices w, (*, n, p), in their dtype, summed over blocks of max(16, p) rows.

    In one long sum the rounding errors of equal rows align and grow as :math:`n eps`.
    """
    n, p = w.shape[-2:]
    rows = max(16, p)
    if n <= rows:
        gram = w.mH @ w
    else:
        even = n - n % rows
        blocks = w[..., :even, :].unflatten(-2, (even // rows, rows))
        gram = (blocks.mH @ blocks).sum(-3)
        gram = gram if even == n else w[..., even:, :].mH @ w[..., even:, :] + gram
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    return gram


def rounding_limit(p: int, dtype: torch.dtype) -> float:
    r"""Returns the cost of rounding an exact p x p frame to a dtype: :math:`0.30 eps √p` in :math:`‖W^H W - I‖_F`.

    A tall frame of n rows whose entries are alike costs about :math:`√(p / n)` of it, one with few rows up to several.

    Measured on Haar, Cayley and polar frames; :math:`3.6 · 10^{-8} √p` in float32. Below p = 16 single draws scatter by
    up to one eps around it.

    >>> import torch
    >>> round(rounding_limit(64, torch.float32) / 2.9e-7, 1)
    1.0
    """
    check_counts("rounding_limit", p=p)
    check_dtype("rounding_limit", dtype)
    return _limit(p, dtype)


def _limit(p: int, dtype: torch.dtype) -> float:
    return 0.30 * torch.finfo(dtype).eps * math.sqrt(p)


def frame_tolerance(p: int, dtype: torch.dtype) -> float:
    """Returns the largest :math:`‖W^H W - I‖_F` taken for a frame of p columns in a dtype; see `FRAME_TOLERANCE`."""
    limit = _limit(p, dtype)
    return min(FRAME_TOLERANCE * limit, max(4 * limit, 0.1))


def scale_of(w: Tensor, dtype: torch.dtype) -> float | None:
    """Returns the s of matrices w = s W, (*, n, p), W frames up to the tolerance of a dtype; None if there is none."""
    s = torch.linalg.svdvals(w.detach().to(working_dtype(w.dtype)))
    scale = (s.max() + s.min()).item() / 2
    if not 0 < scale < math.inf:
        return None
    error = orthogonality_error(w / scale).max().item()
    return scale if error <= frame_tolerance(w.shape[-1], dtype) else None


def permitted_error(p: int, dtype: torch.dtype) -> float:
    """Returns the largest :math:`‖W^H W - I‖_F` of an exact frame of p columns in a dtype.

    1.2 limits + eps, in double precision 20 limits.
    """
    limit = rounding_limit(p, dtype)
    return 20 * limit if dtype in (torch.float64, torch.complex128) else 1.2 * limit + torch.finfo(dtype).eps


def permitted_return(shape: Sequence[int], dtype: torch.dtype, *, unspared: bool = False) -> float:
    """Returns how far a frame of a shape (*, n, p) and dtype, exact to rounding, may come back from its coordinates.

    8 limits; 100 for every 64 rows in float64 and complex128, where the inverse of the map has nothing finer to hide
    its rounding in, and where the map is `unspared`: its fixed chart may put the frame where rounding costs as much.
    """
    wide = unspared or dtype == working_dtype(dtype)
    return (100 * max(1.0, shape[-2] / 64) if wide else 8) * rounding_limit(shape[-1], dtype)


def bits_lost(w: Tensor | float, limit: float | None = None) -> float:
    """Returns the bits of orthogonality lost beyond rounding: :math:`log_2(max(error / limit, 1))`.

    Of tall matrices, whose rounding may cost less than the limit, up to :math:`log_2 √(n / p)` more are not seen.

    Args:
        w: matrices (*, n, p), real or complex, of which the worst counts, and wide ones by rows; or an error.
        limit: of an error; that of a matrix follows from its shape and dtype, as `rounding_limit` says.

    >>> bits_lost(torch.eye(8, 4)), bits_lost(8e-7, 1e-7)
    (0.0, 3.0)
    """
    if limit is None:
        if not isinstance(w, Tensor):
            raise OptionError(f"bits_lost needs a matrix, or an error and its limit, got {w!r} alone.")
        tall = w if w.dim() < 2 or w.shape[-2] >= w.shape[-1] else w.mH
        w, limit = orthogonality_error(tall).max().item(), rounding_limit(tall.shape[-1], tall.dtype)
    return math.log2(max(float(w) / limit, 1.0))
