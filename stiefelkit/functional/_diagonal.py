"""The diagonal D that maps put beside their frame, fixed signs or trained phases, and rotations with a phase."""

import torch
from torch import Tensor

from stiefelkit._torch import is_transformed
from stiefelkit.errors import DtypeError


def diagonal(*, signs: Tensor | None = None, phase: Tensor | None = None) -> Tensor:
    """Returns entries of D in float64 or complex128, from signs of any dtype or from angles in radians, shape (*, p).

    Args:
        signs: +1 and -1, shape (*, p).
        phase: angles in radians, shape (*, p); either this or signs.
    """
    if phase is not None:
        theta = phase.double()
        return complex_of(theta.cos(), theta.sin())
    assert signs is not None
    # Averaging a model's buffers can leave 0 in a sign: read it as 1, and the frame stays one.
    return signs.double().add(0.5).sign_()


def check_complex(who: str, dtype: torch.dtype, phase: Tensor | None) -> None:
    """Raises DtypeError for phases beside a real dtype, in which their imaginary part would be lost."""
    if phase is not None and not dtype.is_complex:
        raise DtypeError(f"{who} needs a complex dtype for phases, got {dtype}.")


def phase_gradient(phase: Tensor | None, w: Tensor, g: Tensor) -> Tensor | None:
    """Returns the gradient of the phases of W = M D by that of W, both of shape (*, n, p); None if D has no phases."""
    return None if phase is None else (w.conj() * g).sum(-2).imag.to(phase.dtype)


def phase_tangent(w: Tensor, t: Tensor | None) -> Tensor:
    """Returns the tangent of W = M D, shape (*, n, p), by that of its phases, (*, p): W diag(i t), zero for None."""
    return torch.zeros_like(w) if t is None else w * complex_of(torch.zeros_like(t), t).to(w.dtype).unsqueeze(-2)


def rotations(t: Tensor, f: Tensor | None, dim: int) -> Tensor:
    """Stacks [[cos t, -e^{i f} sin t], [sin t, e^{i f} cos t]] row by row along a dimension; real for f = None."""
    c, s = t.cos(), t.sin()
    if f is None:
        return torch.stack([c, -s, s, c], dim)
    e = complex_of(f.cos(), f.sin())
    return torch.stack([c + 0j, -e * s, s + 0j, e * c], dim)


def complex_of(re: Tensor, im: Tensor) -> Tensor:
    """`torch.complex` with a gradient that torch.vmap takes, which knows none that is conjugated by a flag only."""
    z = torch.complex(re, im)
    return z * 1 if is_transformed() else z
