"""Checks of points and tangent vectors, and their error messages."""

import math

import torch
from torch import Tensor

from stiefelkit._torch import is_traced, is_transformed
from stiefelkit.errors import DtypeError, NotAFrameError, RankError, ShapeError, shown
from stiefelkit.functional._arithmetic.norms import unread_norms
from stiefelkit.metrics import defect, frame_tolerance, orthogonality_error, rounding_limit

_REACH = 3e-5
"""Frames within this times 1 + sqrt(p) may be moved: three times geoopt's tolerance. A polish leaves 3/4 of the square
of it, below half the rounding limit of float32 up to p = 600, and what `geodesic_logarithm` takes for frames."""
_LONG = 1e3
"""Largest entry of a vector from which on it is looked at whether a step along it ends at a frame."""
DTYPES = (torch.float32, torch.float64, torch.complex64, torch.complex128)


def checked(w: Tensor, dtype: torch.dtype) -> Tensor:
    """Widens a frame, polished if it was rounded; raises for what is no frame, or returns NaN off the CPU."""
    p = w.shape[-1]
    permitted = max(_REACH * (1 + p**0.5), 4 * rounding_limit(p, dtype))
    # Detached, since no_grad leaves forward derivatives.
    constant = w.detach()
    with torch.no_grad():
        off = defect(constant)
        correction = constant @ off if dtype != w.dtype else None
        if w.device.type != "cpu" or is_traced() or is_transformed():
            norms = torch.linalg.vector_norm(off, dim=(-2, -1), keepdim=True)
            correction = torch.where(norms <= permitted, 0.0 if correction is None else correction, torch.nan)
        # The norm of a whole batch is one operator, and no less than that of each.
        elif not torch.linalg.vector_norm(off).item() <= permitted:
            worst = torch.linalg.vector_norm(off, dim=(-2, -1)).max().item()
            if not worst <= permitted:
                raise NotAFrameError(
                    f"Stiefel needs a frame to move, ||W^H W - I||_F <= {permitted:.2g}, got {worst:.2g}; projx gives "
                    "the nearest."
                )
    # The rounding of a float32 frame would stay in every later one. The gradient passes straight through.
    return w if correction is None else torch.sub(w, correction, alpha=0.5)


def landed(moved: Tensor, u: Tensor) -> Tensor:
    """Frames after a step along U; raises RankError if that was too long for them to be any, on a CPU."""
    if moved.device.type != "cpu" or is_traced() or is_transformed() or not u.numel():
        return moved
    constant = u.detach()
    if torch.linalg.vector_norm(constant, math.inf).item() > _LONG:
        error = orthogonality_error(moved).max().item()
        if not error <= frame_tolerance(moved.shape[-1], moved.dtype):
            raise RankError(
                f"Stiefel needs a step that its arithmetic can make, got one of length "
                f"{unread_norms(constant).max().item():.2g}, which ends at ||W^H W - I||_F = {error:.2g}; shorten it."
            )
    return moved


def unit_of(u: Tensor) -> Tensor:
    """Returns a power of 2 of each matrix's size, shape (*, 1, 1): squares in units of it are ordinary numbers."""
    parts = torch.view_as_real(u.detach().resolve_conj()) if u.is_complex() else u.detach().unsqueeze(-1)
    largest = parts.abs().amax((-3, -2, -1)) if u.numel() else parts.new_zeros(parts.shape[:-3])
    ordinary = (largest > 0) & (largest < math.inf)
    return torch.where(ordinary, largest, 1.0).log2().floor().clamp(-1000, 1000).exp2()[..., None, None]


def members(missing: Tensor, most: int = 8) -> str:
    """Returns which members of a batch are missing, for an error."""
    if not missing.dim():
        return ""
    which = [str(tuple(index)) for index in missing.nonzero().tolist()]
    more = f" and {len(which) - most} more" if len(which) > most else ""
    return f' for {", ".join(which[:most])}{more} of the batch {tuple(missing.shape)} (missing="nan" keeps the rest)'


def wrong_dtype(dtype: torch.dtype) -> str:
    """Returns why a dtype holds no frames."""
    return f"Stiefel needs float32, float64, complex64 or complex128, got {shown(dtype)}; keep the frame in float32."


def judged(what: str, errors: Tensor, permitted: Tensor) -> tuple[bool, str | None]:
    """Returns whether every error is permitted, and the worst that is not; NaN never is."""
    over = ~(errors <= permitted)
    if not over.any():
        return True, None
    worst = (errors - permitted).nan_to_num(nan=torch.inf).argmax()
    return False, f"{what} = {errors.flatten()[worst]:.3g}, permitted {permitted.flatten()[worst]:.3g}"


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors in float64, or all in complex128; raises ShapeError or DtypeError unless they are matrices."""
    for t in tensors:
        if not isinstance(t, Tensor) or not (t.is_floating_point() or t.is_complex()):
            raise DtypeError(f"Stiefel needs floating or complex tensors, got {shown(t)}.")
        if t.dim() < 2:
            raise ShapeError(f"Stiefel needs tensors of shape (*, n, p), got {tuple(t.shape)}.")
    dtype = torch.complex128 if any(t.is_complex() for t in tensors) else torch.float64
    return tuple(t.to(dtype) for t in tensors)


def remedy(w: Tensor, y: Tensor) -> str:
    """Returns why no geodesic joins frames, or what does."""
    if w.shape[-2] == w.shape[-1] and not w.is_complex() and torch.linalg.det(w.mH @ y).lt(0).any():
        return "their determinants differ"
    if all((orthogonality_error(z) <= _REACH * (1 + z.shape[-1] ** 0.5)).all() for z in (w, y)):
        return 'metric="canonical" joins all'
    return "projx gives the nearest frames"
