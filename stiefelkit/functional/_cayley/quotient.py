"""Inverses of I + A for skew A, and -2 Q (I + Q)^-1, the Cayley transform (I + Q)^-1 (I - Q) less I."""

import math

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.devices import may_sync_host, switch
from stiefelkit.functional._arithmetic.norms import norms_of, probes
from stiefelkit.functional._arithmetic.product import opaque, plus_product
from stiefelkit.metrics import working_dtype

_SMALLEST_BLOCKED = 128
_LEAF = 64
_LARGEST_NORM = {torch.float32: 100.0, torch.complex64: 100.0, torch.float64: 5e3, torch.complex128: 5e3}
"""Frobenius norm up to which blocks serve: their error grows with its square, which the Schur complements may reach."""
_TOLERANCE = 16.0  # relative error in eps, about that of the products which make Q
_DEFECT = 1 / 24  # largest error of W^H W - I by a truncated series, in eps sqrt(p): 14 % of a rounding limit
_SMALLEST_SQUARED = 256  # from here on a block of A^2 is large enough to be multiplied by itself
_SMALLEST_PROBED = 128  # from here on power steps take less time than a product
_LARGEST_SCALE = 1e6  # beyond, A^2 of a Q that counts may leave the range of float32
SHORT = 64  # terms of the sums of `short_product`
_CONTRACTS = 0.25  # ||Q||_2^2 below which Y = Q - Q Y is worth a turn; beyond, a polish follows the step anyway


def quotient_of_skew(a: Tensor, scale: float) -> Tensor:
    """Returns -2 Q (I + Q)^-1 for Q = scale A, A skew, by a polynomial in Q^2 while Q is small, else by an inverse."""
    if switch.forbidden or not a.is_cpu:
        return _by_inverse(a * scale)
    if not 1 / _LARGEST_SCALE < abs(scale) < _LARGEST_SCALE:
        a, scale = a * scale, 1.0
    square = _square_of_hermitian(a)
    (fourths,) = norms_of(square)
    total = scale * scale * max(fourths, default=0.0)
    size = total if a.is_complex() else 0.5**0.5 * total  # singular values of a real one come in pairs
    permitted = _permitted(total, a)
    c = _coefficients(size, permitted, 1 if a.shape[-1] >= _SMALLEST_PROBED else 2)
    if c is None:
        size = min(size, scale * scale * _probed_norm(square, fourths))
        c = _coefficients(size, permitted, 2)
        if c is None:
            return _by_inverse(a * scale, size)
    first = torch.sub(a, square, alpha=scale)
    if len(c) == 1:
        return first.mul_(-2 * scale)
    if len(c) == 2:
        return _combination(first, -2 * scale * c[0], square, -2 * scale**3 * c[1])
    powers = _square_of_hermitian(square, scale**2 * c[1], scale**4 * c[2])
    return _combination(first, -2 * scale * c[0], powers, -2 * scale)


def quotient_of_accretive(q: Tensor) -> Tensor:
    """Returns the same for Q whose Hermitian part is not negative, to a relative error of 16 eps."""
    if not may_sync_host(q):
        return _by_inverse(q)
    square = q @ q
    size = max(norms_of(square)[0], default=0.0)
    first = q - square
    # The truncation is not skew: five times as much of it reaches W^H W.
    permitted = _permitted(5 * size, q)
    if size <= permitted:
        return first.mul_(-2)
    if size * size <= permitted:
        return _combination(first, -2.0, square, -2.0)
    if size * size * size <= permitted:
        return _combination(first, -2.0, plus_product(square, square, square), -2.0)
    return _by_inverse(q, size)


def _probed_norm(s: Tensor, norms: list[float]) -> float:
    """Estimates the largest ||S||_2 of Hermitian matrices in a batch by six power steps, as in `norms.probe`."""
    top, add_product = max(norms, default=0.0), torch.addmm if s.dim() == 2 else torch.baddbmm
    y = before = probes(*s.shape[:-1], s.dtype, s.device).mT.contiguous()
    for _ in range(6 if 0 < top < math.inf else 0):
        before, y = y, add_product(y, y, s, beta=0, alpha=1 / top)
    lengths = torch.linalg.vector_norm(torch.stack([before, y]), dim=(-2, -1)).view(2, -1)
    last, length = lengths.nan_to_num(0.0, 0.0, 0.0).amax(1).tolist()
    return 1.1 * top * length / max(last, 1e-30)


def _permitted(total: float, q: Tensor) -> float:
    """Returns the relative error d of Y that keeps I - 2 Y unitary: |1 - 2 y|^2 - 1 is 4 |q|^2 d, 4 d total in all."""
    eps = torch.finfo(q.dtype).eps
    tolerance, share = _TOLERANCE * eps, _DEFECT * eps * q.shape[-1] ** 0.5
    return min(tolerance, share / (4 * total)) if total > 0 else tolerance


def _by_inverse(q: Tensor, size: float = math.inf) -> Tensor:
    shifted = q.clone()
    shifted.diagonal(dim1=-2, dim2=-1).add_(1)
    doubled = q @ inverse_of_accretive(shifted).mul_(-2)
    # Y = Q - Q Y: as long as Q contracts, one more turn takes away most of the inverse's rounding.
    return torch.add(q @ doubled, q, alpha=2).neg_() if size < _CONTRACTS else doubled


def _coefficients(size: float, permitted: float, degree: int) -> list[float] | None:
    """Returns the shortest q with |q(x) (1 - x) - 1| small enough on -size <= x <= 0, by Chebyshev, or None."""
    if size <= permitted:
        return [1.0]
    k = 2 / size
    error = 1 / (1 + 4 * k + 2 * k**2)
    if error <= permitted:
        return [1 - error, 2 * k**2 * error]
    error = 1 / (1 + 9 * k + 12 * k**2 + 4 * k**3)
    return [1 - error, (4 * k**3 + 12 * k**2) * error, 4 * k**3 * error] if error <= permitted and degree > 1 else None


def _square_of_hermitian(a: Tensor, linear: float = 0.0, quadratic: float = 1.0) -> Tensor:
    """Returns linear A + quadratic A^2 of a Hermitian A, or A^2 of a skew one; large ones from half of their blocks."""
    n = a.shape[-1]
    if n < _SMALLEST_SQUARED or a.is_cuda:
        return a @ a if not linear else _combination(a, linear, a, quadratic)
    square, step = torch.empty_like(a), -(-n // 4)
    for start in range(0, n, step):
        here, after = slice(start, start + step), slice(start + step, n)
        square[..., here, start:] = a[..., here, :] @ a[..., start:]
        square[..., after, here] = square[..., here, after].mH
    return square if not linear else square.mul_(quadratic).add_(a, alpha=linear)


def _combination(a: Tensor, constant: float, b: Tensor, linear: float) -> Tensor:
    """Returns a (constant I + linear B)."""
    if a.dim() == 2:
        return torch.addmm(a, a, b, beta=constant, alpha=linear)
    return a * constant + (a @ b) * linear


def inverse_of_accretive(m: Tensor) -> Tensor:
    """Inverts matrices whose Hermitian part is at least the identity, shape (*, n, n), of any of torch's LAPACK dtypes.

    So is that of their Schur complements, hence 2 x 2 blocks need no pivoting. On a CPU this takes 0.9 times an LU
    factorization's time at n = 128 and half of it from 256 on; smaller ones take LU. Float32 of large norm is inverted
    in float64, and of larger norm by LU. Other devices, where each step is a launch and no norm is read, take LU.
    Inverses are right to about 20 eps sqrt(n) in float32 and to 1e-10 or better in float64; NaN propagates.
    """
    if m.shape[-1] >= _SMALLEST_BLOCKED and not (m.is_cuda or switch.forbidden):
        return _blocked(m)
    # Without a call of `inverse_by_lu` where it adds nothing: weights are read so.
    return torch.linalg.inv_ex(m)[0] if m.is_cpu and not switch.forbidden else inverse_by_lu(m)


def inverse_by_lu(m: Tensor) -> Tensor:
    """Inverts by LU; NaN propagates, which a GPU's inverse may leave out."""
    inverse = torch.linalg.inv_ex(m)[0]
    if may_sync_host(m) or not m.numel():
        return inverse
    return torch.add(inverse, torch.linalg.vector_norm(m, math.inf, (-2, -1), keepdim=True), alpha=0)


@opaque(lambda m: torch.empty_like(m, memory_format=torch.contiguous_format))
def _blocked(m: Tensor) -> Tensor:
    if switch.forbidden or not m.is_cpu:
        return inverse_by_lu(m).contiguous()
    inverse = torch.empty_like(m, memory_format=torch.contiguous_format)
    n = m.shape[-1]
    for matrix, out in zip(m.reshape(-1, n, n), inverse.view(-1, n, n), strict=True):
        _invert_safely(matrix, out)
    return inverse


def _invert_safely(m: Tensor, out: Tensor) -> None:
    norm = torch.linalg.vector_norm(m).item()
    if norm <= _LARGEST_NORM[m.dtype]:
        _invert(m, out)
    elif m.dtype != working_dtype(m.dtype):
        exact = torch.empty_like(m, dtype=working_dtype(m.dtype))
        _invert_safely(m.to(exact.dtype), exact)
        out.copy_(exact)
    else:
        out.copy_(torch.linalg.inv_ex(m)[0])


def _invert(m: Tensor, out: Tensor) -> None:
    # With X = P^-1 and S = R - C X B of m = [[P, B], [C, R]]: [[X + X B S^-1 C X, -X B S^-1], [-S^-1 C X, S^-1]].
    n = m.shape[-1]
    if n <= _LEAF:
        out.copy_(torch.linalg.inv_ex(m)[0])
        return
    first, last = slice(None, n // 2), slice(n // 2, None)
    x, s = out[first, first], out[last, last]
    _invert(m[first, first], x)
    y, z = m[last, first] @ x, x @ m[first, last]
    _invert(torch.addmm(m[last, last], y, m[first, last], alpha=-1), s)
    upper, lower = out[first, last], out[last, first]
    torch.addmm(upper, z, s, beta=0, alpha=-1, out=upper)
    torch.addmm(lower, s, y, beta=0, alpha=-1, out=lower)
    x.addmm_(upper, y, alpha=-1)


def short_product(a: Tensor, b: Tensor, c: Tensor | None = None, share: float = 1.0) -> Tensor:
    """Returns A B + share C of matrices by sums of at most 64 terms, so that no processor rounds as long sums do."""
    if a.dim() != 2:
        return a @ b if c is None else torch.add(a @ b, c, alpha=share)
    k = a.shape[-1]
    if k <= SHORT or not a.is_cpu:
        return torch.mm(a, b) if c is None else torch.addmm(c, a, b, beta=share)
    here = slice(SHORT)
    ab = a[:, here] @ b[here] if c is None else torch.addmm(c, a[:, here], b[here], beta=share)
    for start in range(SHORT, k, SHORT):
        here = slice(start, start + SHORT)
        ab.addmm_(a[:, here], b[here])
    return ab
