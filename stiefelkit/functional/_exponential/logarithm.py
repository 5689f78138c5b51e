"""Skew logarithms of orthogonal and unitary matrices, and the tangent vectors that lead to tall frames."""

import math

import torch
from torch import Tensor

from stiefelkit.functional._packing import check_square, check_tall

_WINDOW = (-0.97, -0.8)
"""Eigenvalues of the Hermitian part below a gap in here are those near -1."""


def skew_logarithm(w: Tensor) -> tuple[Tensor, Tensor]:
    """Finds a skew A with :math:`exp(A) = W` and eigenvalues in :math:`i [-π, π]`, for any W that has one.

    With S and K the Hermitian and the skew part of W, :math:`A = K g(S)`, :math:`g(c) = arccos(c) / √{1 - c^2}`, away
    from the eigenvalue -1; near it the angles are read off K, and in real matrices eigenvalues -1 are taken in pairs,
    each a rotation by π. Repeated eigenvalues are nothing special.

    Args:
        w: orthogonal or unitary matrices of shape (*, n, n), exact to rounding in float64 or complex128.

    Returns:
        A of the same shape and dtype, and which matrices have one, shape (*): all unitary ones, and the orthogonal ones
        with :math:`det W = 1`; the others' A lacks one eigenvalue -1.
    """
    check_square("skew_logarithm", w)
    n = w.shape[-1]
    if not w.numel():
        return w.clone(), w.new_ones(w.shape[:-2], dtype=torch.bool)
    logarithms, exists = zip(*(_one(matrix) for matrix in w.reshape(-1, n, n)), strict=True)
    return torch.stack(logarithms).view(w.shape), torch.tensor(exists, device=w.device).view(w.shape[:-2])


def tall_logarithm(w: Tensor) -> tuple[Tensor, Tensor]:
    """Finds :math:`A_{21}` and R with :math:`W = exp([[0, -A_{21}^H], [A_{21}, 0]]) [I; 0] R`.

    With the polar decomposition :math:`W_1 = H R` and :math:`H = V diag(cos t) V^H`,
    :math:`A_{21} = W_2 R^H V diag(t / sin t) V^H`, where t lies in :math:`[0, π / 2]`.

    Args:
        w: frames of shape (*, n, p), exact to rounding in float64 or complex128.

    Returns:
        :math:`A_{21}` of shape (*, n - p, p) and the orthogonal or unitary R of shape (*, p, p).
    """
    check_tall("tall_logarithm", w)
    p = w.shape[-1]
    u, c, vh = torch.linalg.svd(w[..., :p, :])
    t = c.clamp(max=1.0).arccos()
    stretch = torch.where(t < 1e-4, 1 + t * t / 6, t / t.sin())
    # H = U diag(c) U^H and R = U V^H, so W2 R^H U = W2 V.
    a21 = (w[..., p:, :] @ vh.mH) * stretch.unsqueeze(-2) @ u.mH
    return a21, u @ vh


def _one(w: Tensor) -> tuple[Tensor, bool]:
    hermitian, skew = (w + w.mH) / 2, (w - w.mH) / 2
    c, q = torch.linalg.eigh(hermitian)
    c = c.clamp(-1.0, 1.0)
    near = _split(c)
    c, q_near, q = c[near:], q[:, :near], q[:, near:]
    g = torch.where(1 - c < 1e-8, 1 + (1 - c) / 3, c.arccos() / ((1 - c) * (1 + c)).sqrt())
    a = skew @ (q * g) @ q.mH
    fits = True
    if near:
        k = q_near.mH @ skew @ q_near
        angles, fits = (_complex_angles(k), True) if w.is_complex() else _real_angles(k)
        a = a + q_near @ angles @ q_near.mH
    return (a - a.mH) / 2, fits


def _split(c: Tensor) -> int:
    """Returns how many of the ascending values lie below the widest gap in the window: equal ones are not parted."""
    ends = torch.cat([c.new_tensor([_WINDOW[0]]), c[(c > _WINDOW[0]) & (c < _WINDOW[1])], c.new_tensor([_WINDOW[1]])])
    return int((c <= ends[ends.diff().argmax()]).sum())


def _complex_angles(k: Tensor) -> Tensor:
    """Returns the logarithm of a unitary matrix with eigenvalues near -1 from its skew part."""
    s, v = torch.linalg.eigh(-1j * (k - k.mH) / 2)
    s = s.clamp(-1.0, 1.0)
    t = torch.where(s >= 0, math.pi - s.asin(), -math.pi - s.asin())
    return (v * (1j * t)) @ v.mH


def _real_angles(k: Tensor, size: float = 1.0) -> tuple[Tensor, bool]:
    """Returns the same for an orthogonal matrix, real; k is its skew part divided by `size`."""
    m = k.shape[0]
    s, v = torch.linalg.eigh(1j * (k - k.mT) / 2)
    if m < 2 or -s[0] * size <= 1e-15:  # rounding
        part = torch.zeros_like(k)
        first = torch.arange(0, m - 1, 2, device=k.device)
        part[first + 1, first], part[first, first + 1] = math.pi, -math.pi
        return part, m % 2 == 0
    # Vectors of the smaller sines are not well told from their conjugates: those wait for their own unit.
    rotating = s < 0.1 * s[0]
    v_rotating = v[:, rotating]
    sines = -s[rotating] * size
    a = -2 * ((v_rotating * (math.pi - sines.clamp(max=1.0).asin())) @ v_rotating.mH).imag
    rest = m - 2 * v_rotating.shape[1]
    if not rest:
        return a, True
    basis = torch.linalg.eigh((v_rotating @ v_rotating.mH).real)[1][:, :rest]
    inner = basis.mT @ k @ basis
    norm = torch.linalg.matrix_norm(inner).item() or 1.0
    part, fits = _real_angles(inner / norm, size * norm)
    return a + basis @ part @ basis.mT, fits
