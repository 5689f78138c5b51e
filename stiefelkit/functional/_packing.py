"""Matrices from flat real coordinates: skew-symmetric and skew-Hermitian ones, trapezoids, diagonals and rotations.

A frame W (n x p) near the first p columns of the identity is reached from the tangent vector [A11; A21], A11 (p x p)
skew-Hermitian and A21 ((n - p) x p) free. Its real coordinates, in reading order:

* real: the entries of A11 below the diagonal, row by row, then A21 column by column: np - p(p + 1)/2 numbers, the
  dimension of St(n, p);
* complex: a p x p table whose strict lower triangle is Re A11 and whose upper triangle with the diagonal is Im A11,
  row by row (the basis of Hyland and Ratsch 2017), then Re A21 and Im A21 column by column: 2np - p^2 numbers.

By columns, since products of A21 with a p x p factor are up to twice as fast in that layout.

Beside their frame maps have a diagonal D, fixed signs or trained phases.
"""

from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor

from stiefelkit._torch import constant_in_traced_code, is_traced, is_transformed, unwrapped
from stiefelkit.errors import DtypeError, ShapeError, needs
from stiefelkit.numbers import check_counts
from stiefelkit.tensors import check_tensors

SMALLEST_COPIED = 256  # rows from which subtracting while transposing crawls through memory
_LARGEST_CACHED = 1 << 24
_known: dict[tuple[Any, ...], Tensor] = {}


def skew_size(n: int, p: int, is_complex: bool) -> int:
    """Returns the number of real coordinates of a tangent vector at an n x p frame: the dimension of :math:`St(n, p)`.

    If `is_complex`, :math:`p^2` for :math:`A_{11}` and :math:`2 (n - p) p` for :math:`A_{21}`.

    >>> skew_size(5, 5, False), skew_size(5, 2, False), skew_size(5, 5, True)
    (10, 7, 25)
    """
    check_counts("skew_size", n=n, p=p)
    return p * p + 2 * (n - p) * p if is_complex else n * p - p * (p + 1) // 2


def unpack_skew(v: Tensor, n: int, p: int, is_complex: bool) -> tuple[Tensor, Tensor]:
    """Turns packed coordinates v, shape (*, skew_size(n, p, is_complex)), into the two blocks of the tangent vector.

    Returns:
        :math:`A_{11}` of shape (*, p, p), skew-Hermitian to the bit, and :math:`A_{21}` of shape (*, n - p, p).
    """
    check_tensors("unpack_skew", v)
    check_counts("unpack_skew", n=n, p=p)
    check_size("unpack_skew", "coordinates", v, p * p + 2 * (n - p) * p if is_complex else n * p - p * (p + 1) // 2)
    if n == p:
        a11 = unpack_square(v, n, is_complex)
        return a11, a11.new_empty(*v.shape[:-1], 0, p)
    if not is_complex:
        size = p * (p - 1) // 2
        a21 = v[..., size:].reshape(*v.shape[:-1], p, n - p).mT
        return unpack_square(v[..., :size], p, is_complex), a21
    re, im = v[..., p * p :].unflatten(-1, (2, p, n - p)).unbind(-3)
    return unpack_square(v[..., : p * p], p, is_complex), complex_of(re, im).mT


def unpack_square(v: Tensor, n: int, is_complex: bool, shift: int = 0) -> Tensor:
    """Turns packed coordinates into A + shift I with A skew-Hermitian to the bit, shape (*, n, n)."""
    if v.shape[-1] != (size := n * n if is_complex else n * (n - 1) // 2):  # every read comes by: no call
        check_size(f"A skew {n} x {n} matrix", "coordinates", v, size)
    if not is_complex:
        # Gathered, both triangles at once: scattering takes twice as long, subtracting the transpose as long again.
        entries = torch.cat([v, v.neg(), v.new_full((*v.shape[:-1], 1), shift)], dim=-1)
        return entries.index_select(-1, _places_of_skew(n, v.device)).reshape(*v.shape[:-1], n, n)
    table = v.unflatten(-1, (n, n))
    lower, upper = table.tril(-1), table.triu(1)
    a = complex_of(lower - lower.mT, upper + upper.mT + torch.diag_embed(table.diagonal(dim1=-2, dim2=-1)))
    if shift:
        a.diagonal(dim1=-2, dim2=-1).add_(shift)
    return a


def pack_skew(a11: Tensor, a21: Tensor | None = None) -> Tensor:
    """Reads the packed coordinates (*, d) off the blocks of a tangent vector; the left inverse of `unpack_skew`.

    Args:
        a11: skew-Hermitian blocks of shape (*, p, p); entries that the coordinates do not need are not read.
        a21: blocks of shape (*, n - p, p), None or an empty one for n = p.
    """
    if not (isinstance(a11, Tensor) and (a21 is None or isinstance(a21, Tensor))):
        check_tensors("pack_skew", a11, *([] if a21 is None else [a21]))
    if a21 is not None and a21.shape[-2] == 0:
        a21 = None
    if not a11.is_complex():
        below = _below(a11)
        return below if a21 is None else torch.cat([below, a21.mT.flatten(-2)], dim=-1)
    table = a11.real.tril(-1) + a11.imag.triu()
    if a21 is None:
        return table.flatten(-2)
    return torch.cat([table.flatten(-2), a21.real.mT.flatten(-2), a21.imag.mT.flatten(-2)], dim=-1)


def pack_skew_gradient(g11: Tensor, g21: Tensor | None = None) -> Tensor:
    """Applies the adjoint of `unpack_skew`: turns gradients with respect to the blocks into those of the coordinates.

    Gradients are torch's, :math:`∂L/∂Re + i ∂L/∂Im`.

    Args:
        g11: gradient by the square block :math:`A_{11}`, shape (*, p, p).
        g21: gradient by the block :math:`A_{21}` under it, shape (*, n - p, p); None for square frames.
    """
    check_tensors("pack_skew_gradient", g11, *([] if g21 is None else [g21]))
    s = minus_adjoint(g11)
    if not s.is_complex():
        return _below(s) if g21 is None else pack_skew(s, g21)
    s = torch.diagonal_scatter(s, s.diagonal(dim1=-2, dim2=-1) / 2, dim1=-2, dim2=-1)
    return pack_skew(s, g21)


def band_size(n: int, p: int, is_complex: bool, bandwidth: int) -> int:
    """Returns the number of the coordinates of `unpack_skew` (n, p, is_complex) at most `bandwidth` off the diagonal.

    >>> band_size(5, 5, False, 1), band_size(5, 5, False, 4), band_size(5, 5, True, 1)
    (4, 10, 13)
    """
    check_counts("band_size", n=n, p=p, bandwidth=bandwidth)
    below = sum(min(bandwidth, n - 1 - j) for j in range(p))
    return p + 2 * below if is_complex else below


def spread_band(v: Tensor, n: int, p: int, is_complex: bool, bandwidth: int) -> Tensor:
    """Puts coordinates v of a band among zeros, in the order of `unpack_skew`.

    From the shape (*, band_size(n, p, is_complex, bandwidth)) to (*, skew_size(n, p, is_complex)).
    """
    check_tensors("spread_band", v)
    check_counts("spread_band", n=n, p=p, bandwidth=bandwidth)
    index = _band_indices(n, p, is_complex, bandwidth, v.device)
    check_size("spread_band", "coordinates", v, len(index))
    return v.new_zeros(*v.shape[:-1], skew_size(n, p, is_complex)).index_copy(-1, index, v)


def pick_band(v: Tensor, n: int, p: int, is_complex: bool, bandwidth: int) -> tuple[Tensor, Tensor]:
    """Reads the coordinates of a band, as `spread_band` takes them, off all of them, v of (n, p, is_complex).

    Returns:
        Those of entries at most `bandwidth` off the diagonal, and the largest of the rest, shape (*).
    """
    check_tensors("pick_band", v)
    check_counts("pick_band", n=n, p=p, bandwidth=bandwidth)
    check_size("pick_band", "coordinates", v, skew_size(n, p, is_complex))
    index = _band_indices(n, p, is_complex, bandwidth, v.device)
    rest = v.index_fill(-1, index, 0.0).abs()
    return v.index_select(-1, index), rest.amax(-1) if rest.shape[-1] else rest.sum(-1)


def minus_adjoint(m: Tensor) -> Tensor:
    """Returns M - M^H; for large matrices through a copy."""
    if m.shape[-1] < SMALLEST_COPIED:
        return m - m.mH
    return m - m.mH.clone(memory_format=torch.contiguous_format)


def trapezoid_size(n: int, k: int, is_complex: bool) -> int:
    """Returns the number of real coordinates of a lower-trapezoidal n x k matrix, twice as many if `is_complex`.

    >>> trapezoid_size(5, 5, False), trapezoid_size(5, 2, False), trapezoid_size(5, 2, True)
    (15, 9, 18)
    """
    check_counts("trapezoid_size", n=n, k=k)
    return (n * k - k * (k - 1) // 2) * (1 + is_complex)


def unpack_trapezoid(v: Tensor, n: int, k: int, is_complex: bool) -> Tensor:
    """Turns packed coordinates v, shape (*, trapezoid_size(n, k, is_complex)), into lower-trapezoids, shape (*, n, k).

    In reading order: the top k x k block's lower triangle row by row, then the rows below column by column; for
    complex matrices all real parts first, then all imaginary parts.
    """
    check_tensors("unpack_trapezoid", v)
    check_counts("unpack_trapezoid", n=n, k=k)
    check_size("unpack_trapezoid", "coordinates", v, (n * k - k * (k - 1) // 2) * (1 + is_complex))
    if is_complex:
        re, im = v.unflatten(-1, (2, -1)).unbind(-2)
        return complex_of(unpack_trapezoid(re, n, k, False), unpack_trapezoid(im, n, k, False))
    size = k * (k + 1) // 2
    entries = torch.cat([v[..., :size], v.new_zeros(*v.shape[:-1], 1)], dim=-1)
    top = entries.index_select(-1, _places_of_lower(k, v.device)).reshape(*v.shape[:-1], k, k)
    if n == k:
        return top
    return torch.cat([top.mT, v[..., size:].unflatten(-1, (k, n - k))], dim=-1).mT


def pack_trapezoid(u: Tensor) -> Tensor:
    """Reads packed coordinates off matrices u, (*, n, k), or gradients off gradients: adjoint to `unpack_trapezoid`.

    Entries above the diagonal are not read.
    """
    check_tensors("pack_trapezoid", u)
    if u.is_complex():
        return torch.cat([pack_trapezoid(u.real), pack_trapezoid(u.imag)], dim=-1)
    k = u.shape[-1]
    top = u[..., :k, :].flatten(-2).index_select(-1, _indices(k, 0, u.device))
    return top if u.shape[-2] == k else torch.cat([top, u[..., k:, :].mT.flatten(-2)], dim=-1)


def _below(m: Tensor) -> Tensor:
    # Row by row.
    return m.flatten(-2).index_select(-1, _indices(m.shape[-1], -1, m.device))


def remembered(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Caches indices by the arguments of `make`, unless they are large: n = 4.0, which is refused, has the key of 4."""
    name = make.__name__

    def index(*of: Any) -> Tensor:
        key = (name, *of)
        if not is_traced() and key in _known:
            return _known[key]
        # An inference tensor, or a fake one made while tracing, would poison later calls.
        with torch.inference_mode(False):
            made = make(*of)
        if not is_traced() and type(made) is Tensor and not made.is_floating_point() and made.nbytes <= _LARGEST_CACHED:
            made = _known[key] = unwrapped(made)
        return made

    return index


@remembered
def _indices(k: int, diagonal: int, device: torch.device) -> Tensor:
    """Returns the flat positions of a k x k matrix's entries on and below a diagonal, row by row."""
    i, j = torch.tril_indices(k, k, diagonal, dtype=torch.int32, device=device)
    return i * k + j


@remembered
def _places_of_skew(k: int, device: torch.device) -> Tensor:
    """Returns where each entry of a skew k x k matrix stands in those below the diagonal, their negatives, one more."""
    size = k * (k - 1) // 2
    i = torch.arange(k, dtype=torch.int32, device=device).unsqueeze(-1)
    below = i * (i - 1) // 2 + i.mT
    return torch.where(i > i.mT, below, torch.where(i < i.mT, below.mT + size, 2 * size)).flatten()


@remembered
def _places_of_lower(k: int, device: torch.device) -> Tensor:
    """Returns where each entry of a lower triangular k x k matrix stands in those of the triangle, and one more."""
    i = torch.arange(k, dtype=torch.int32, device=device).unsqueeze(-1)
    return torch.where(i >= i.mT, i * (i + 1) // 2 + i.mT, k * (k + 1) // 2).flatten()


@remembered
def _band_indices(n: int, p: int, is_complex: bool, bandwidth: int, device: torch.device) -> Tensor:
    return torch.tensor(_positions_in_band(n, p, is_complex, bandwidth), device=device)


@constant_in_traced_code
def _positions_in_band(n: int, p: int, is_complex: bool, bandwidth: int) -> list[int]:
    # In numpy: how many there are is not known to a device that nobody waits for.
    off = numpy.abs(numpy.subtract.outer(numpy.arange(n), numpy.arange(p)))
    top, below = off[:p], [off[p:].T.ravel()] * (1 + is_complex)
    inside = numpy.concatenate([top.ravel() if is_complex else top[numpy.tril_indices(p, -1)], *below]) <= bandwidth
    return numpy.flatnonzero(inside).tolist()


def check_size(who: str, what: str, v: Tensor, size: int) -> None:
    """Raises ShapeError unless V is of shape (*, size)."""
    if v.shape[-1:] != (size,):
        raise ShapeError(f"{who} needs {what} of shape (*, {size}), got {tuple(v.shape)}.")


def check_tall(who: str, w: Tensor) -> None:
    """Raises ShapeError unless W is of shape (*, n, p), n >= p >= 1."""
    if not isinstance(w, Tensor):
        check_tensors(who, w)
    if w.dim() < 2 or not 0 < w.shape[-1] <= w.shape[-2]:
        remedy = "; take the adjoint" if w.dim() >= 2 and w.shape[-2] < w.shape[-1] else ""
        raise ShapeError(f"{who} needs matrices of shape (*, n, p), n >= p >= 1, got {tuple(w.shape)}{remedy}.")


def check_alike(who: str, w: Tensor, *others: Tensor) -> None:
    """Raises ShapeError unless W is of shape (*, n, p), n >= p >= 1, and so are the others."""
    check_tall(who, w)
    check_tensors(who, *others)
    for x in others:
        if x.shape[-2:] != w.shape[-2:]:
            raise ShapeError(f"{who} needs matrices of one shape (*, n, p), got {tuple(w.shape)} and {tuple(x.shape)}.")


def check_square(who: str, w: Tensor) -> None:
    """Raises ShapeError unless W is of shape (*, n, n)."""
    check_tensors(who, w)
    if w.dim() < 2 or w.shape[-2] != w.shape[-1]:
        needs(False, ShapeError, who, "square matrices of shape (*, n, n)", tuple(w.shape))


def diagonal(*, signs: Tensor | None = None, phase: Tensor | None = None) -> Tensor:
    """Returns entries of D in float64 or complex128, from `signs` of any dtype or `phase` in radians, shape (*, p)."""
    if phase is not None:
        theta = phase.double()
        return complex_of(theta.cos(), theta.sin())
    assert signs is not None
    # Averaging a model's buffers can leave 0 in a sign: read it as 1, and the frame stays one.
    return signs.double().add(0.5).sign_()


def check_complex(who: str, dtype: torch.dtype, phase: Tensor | None) -> None:
    """Raises DtypeError for phases beside a real dtype, which would lose their imaginary part."""
    if phase is not None and not dtype.is_complex:
        needs(False, DtypeError, who, "a complex dtype for phases", dtype)


def phase_gradient(phase: Tensor | None, w: Tensor, g: Tensor) -> Tensor | None:
    """Returns the gradient of the phases of W = M D by that of W, both of shape (*, n, p); None if D has no phases."""
    return None if phase is None else (w.conj() * g).sum(-2).imag.to(phase.dtype)


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
