"""Initial frames, drawn in float64 and independent of any parametrization.

Each scheme is a function `(shape, dtype, generator) -> W` with shape (*, n, p); `draw` picks one by name.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stiefelkit.errors import OptionError, ShapeError, did_you_mean, shown
from stiefelkit.metrics import defect
from stiefelkit.numbers import one_of, sizes
from stiefelkit.tensors import check_dtype, working_dtype

__all__ = ["SCHEMES", "draw", "haar", "henaff", "identity", "unit_circle"]


def haar(shape: Sequence[int], dtype: torch.dtype = torch.float64, generator: torch.Generator | None = None) -> Tensor:
    """Draws frames, exact to rounding, from the uniform (Haar) measure of St(n, p), each of a batch independently.

    Args:
        shape: (*, n, p), n >= p.
        dtype: of the frames, real or complex; drawn in float64 or complex128, and rounded once.
        generator: source of randomness, on whose device the frames are; torch's default when None.

    Raises:
        ShapeError: the shape is no sequence, or that of no tall or square matrix.
        DtypeError: the dtype is neither floating nor complex.

    >>> haar((2, 5, 3)).shape
    torch.Size([2, 5, 3])
    """
    shape = _check("haar", shape, dtype)
    gaussian = torch.randn(*shape, dtype=working_dtype(dtype), device=device_of(generator), generator=generator)
    q, r = torch.linalg.qr(gaussian)
    # QR leaves the phases of R's diagonal free; making them positive makes Q unique, hence Haar (Mezzadri 2007).
    w = q * torch.sgn(r.diagonal(dim1=-2, dim2=-1))[..., None, :]
    if dtype == w.dtype:  # LAPACK's Q is off by up to 13 eps, more than an exact frame may be: one Newton step
        w = torch.sub(w, w @ defect(w), alpha=0.5)
    return w.to(dtype).contiguous()


def identity(
    shape: Sequence[int], dtype: torch.dtype = torch.float64, generator: torch.Generator | None = None
) -> Tensor:
    """Returns the first p columns of the identity.

    Args:
        shape: (*, n, p), n >= p.
        dtype: of the frames, real or complex; float64 by default.
        generator: source of randomness; torch's default when None.
    """
    shape = _check("identity", shape, dtype)
    eye = torch.eye(shape[-2], shape[-1], dtype=dtype, device=device_of(generator))
    return eye.expand(*shape).clone()


def henaff(
    shape: Sequence[int], dtype: torch.dtype = torch.float64, generator: torch.Generator | None = None
) -> Tensor:
    """Rotates consecutive pairs of axes by angles uniform on (-pi, pi) (Henaff, Szlam, LeCun 2016).

    An odd last axis stays where it is. The eigenvalues e^{it}, e^{-it} are uniform on the unit circle.

    Args:
        shape: (*, n, p), n >= p.
        dtype: of the frames, real or complex; float64 by default.
        generator: source of randomness; torch's default when None.
    """
    shape = _check("henaff", shape, dtype)
    *batch, n, p = shape
    t = uniform((*batch, n // 2), generator) * (2 * math.pi) - math.pi
    w = identity((*batch, n, n), torch.float64, generator)
    even, odd = torch.arange(0, n - 1, 2, device=t.device), torch.arange(1, n, 2, device=t.device)
    w[..., even, even] = w[..., odd, odd] = t.cos()
    w[..., odd, even] = t.sin()
    w[..., even, odd] = -t.sin()
    return w[..., :p].to(dtype).contiguous()


def unit_circle(
    shape: Sequence[int], dtype: torch.dtype = torch.float64, generator: torch.Generator | None = None
) -> Tensor:
    """Draws frames with eigenvalues uniform on the unit circle: `henaff` for real, diag(e^{it}) for complex frames.

    Args:
        shape: (*, n, p), n >= p.
        dtype: of the frames, real or complex; float64 by default.
        generator: source of randomness; torch's default when None.
    """
    shape = _check("unit_circle", shape, dtype)
    if not dtype.is_complex:
        return henaff(shape, dtype, generator)
    *batch, _, p = shape
    t = uniform((*batch, p), generator) * (2 * math.pi) - math.pi
    return (identity(shape, dtype, generator) * torch.exp(1j * t)[..., None, :]).to(dtype)


SCHEMES: dict[str, Callable[..., Tensor]] = {
    "haar": haar,
    "identity": identity,
    "henaff": henaff,
    "unit_circle": unit_circle,
}
"""Name to function of the shape, dtype and generator, of what every map can start from."""


def draw(
    scheme: str, shape: Sequence[int], dtype: torch.dtype = torch.float64, generator: torch.Generator | None = None
) -> Tensor:
    """Draws initial frames by the name of the scheme.

    Args:
        scheme: a name in `SCHEMES`.
        shape: (*, n, p), n >= p.
        dtype: of the frames, real or complex; float64 by default.
        generator: source of randomness; torch's default when None.

    Raises:
        OptionError: no scheme has this name.
    """
    if not one_of(*SCHEMES).holds(scheme):
        raise OptionError(f"No init scheme is named {shown(scheme)}{did_you_mean(scheme, SCHEMES)}")
    return SCHEMES[scheme](shape, dtype, generator)


def _check(who: str, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the shape as Python's integers, once it is one of frames, and the dtype as well."""
    frame = sizes(shape)
    if frame is None or len(frame) < 2 or frame[-2] < frame[-1] or min(frame) < 0:
        raise ShapeError(
            f"sk.init.{who} needs a shape (*, n, p) with n >= p, got {shown(shape if frame is None else frame)}; "
            ".mH of a tall frame is wide."
        )
    check_dtype(f"sk.init.{who}", dtype)
    return frame


def device_of(generator: torch.Generator | None) -> torch.device | None:
    """Returns where a generator draws; None, torch's default, without one; raises OptionError for what is none."""
    if generator is None:
        return None
    if not isinstance(generator, torch.Generator):
        raise OptionError(f"A draw needs a torch.Generator or None, got {shown(generator)}.")
    return generator.device


def uniform(shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Draws coordinates uniform on [0, 1)."""
    return torch.rand(*shape, dtype=torch.float64, device=device_of(generator), generator=generator)


def symmetric(shape: Sequence[int], bound: float, generator: torch.Generator | None) -> Tensor:
    """Draws coordinates uniform on (-bound, bound)."""
    return (2 * uniform(shape, generator) - 1) * bound


def gaussian(shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
    """Draws coordinates from N(0, 1)."""
    return torch.randn(*shape, dtype=torch.float64, device=device_of(generator), generator=generator)
