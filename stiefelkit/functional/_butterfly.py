"""Meshes of plane rotations in the pattern of the fast Fourier transform, as elementwise products of two factors.

With a wire as the pair (a, i) of its high and low bits, the first half of the layers mixes a for each i and the second
i for each a, so W[(a, i), (b, j)] = low[a][i, j] high[j][a, b].
"""

import torch
from torch import Tensor

from stiefelkit.functional._product import product

__all__ = ["butterfly", "butterfly_inverse", "rotate_butterfly"]


def butterfly(angle: Tensor, phase: Tensor | None = None, *, n: int) -> Tensor:
    r"""Returns F_k ... F_2 F_1 for k = log2(n) layers of rotations at the distances n/2, n/4, ..., 1.

    Each rotation of the rows (q, q + n / 2^i) is [[cos t, -e^{i f} sin t], [sin t, e^{i f} cos t]], with f = 0 in a
    real mesh. Those of layer i come in the order of EURNN: pairs (2 d b + r, 2 d b + r + d), d = n / 2^i, b fastest.

    Costs one pass over W forward and four backward. Differentiable any number of times.

    Args:
        angle: t in radians, layer by layer, shape (*, n / 2 log2(n)), float32 or float64: W is made in its dtype.
        phase: f, same shape, makes W complex.
        n: a power of two.

    Returns:
        Unitary matrices of shape (*, n, n).
    """
    high, low = _factors(angle, phase, n)
    if n == 1:
        # Without rotations, yet connected to the empty coordinates.
        low = low + sum(v.sum(-1)[..., None, None, None] for v in (angle, phase) if v is not None)
    w = low.unsqueeze(-2) * high.movedim(-3, -1).unsqueeze(-3)
    return w.reshape(*w.shape[:-4], n, n)


def rotate_butterfly(x: Tensor, angle: Tensor, phase: Tensor | None = None) -> Tensor:
    """Rows W x of the rows x: `butterfly` applied in n^1.5 operations a row; one matrix, no batch.

    Args:
        x: rows of shape (m, n), of the dtype of W.
        angle: as for `butterfly`, shape (n / 2 log2(n),).
        phase: same shape.

    Returns:
        Tensor of shape (m, n).
    """
    high, low = _factors(angle, phase, x.shape[-1])
    x = product(high, x.unflatten(-1, (low.shape[-3], -1)).movedim(0, -1).transpose(0, 1))
    return product(low, x.transpose(0, 1)).flatten(0, 1).T


def _factors(angle: Tensor, phase: Tensor | None, n: int) -> tuple[Tensor, Tensor]:
    """The high factor (*, n2, n1, n1) and the low one (*, n1, n2, n2), n1 n2 = n."""
    count = n.bit_length() - 1
    n1 = 1 << (count // 2)
    n2 = n // n1
    c, s = angle.cos(), angle.sin()
    e = None if phase is None else torch.complex(phase.cos(), phase.sin())
    dtype = c.dtype if e is None else e.dtype
    found = []
    for size, copies, first, last in ((n1, n2, 0, count // 2), (n2, n1, count // 2, count)):
        x = torch.eye(size, dtype=dtype, device=angle.device).expand(*angle.shape[:-1], copies, size, size)
        for layer in range(first, last):
            turns = [_of_layer(v, layer, n, n1) for v in (c, s) + (() if e is None else (e,))]
            x = _turned(x, *turns)
        found.append(x)
    return found[0], found[1]


def _of_layer(v: Tensor, layer: int, n: int, n1: int) -> Tensor:
    """The values of a layer as (*, copies, b, r, 1): for each copy of a factor, b outer and r inner indices."""
    v = v[..., layer * n // 2 : (layer + 1) * n // 2].unflatten(-1, (-1, 1 << layer))
    if 1 << layer < n1:
        return v.unflatten(-2, (-1, n // n1)).movedim(-2, -3).mT.unsqueeze(-1)
    return v.unflatten(-1, (n1, -1)).movedim(-3, -1).unsqueeze(-1)


def _turned(x: Tensor, c: Tensor, s: Tensor, e: Tensor | None = None) -> Tensor:
    """Rotates rows of X, (*, copies, size, size), at the distance that the shape of c tells."""
    b, r = c.shape[-3:-1]
    p, q = x.unflatten(-2, (b, 2, r)).unbind(-3)
    q = q if e is None else e * q
    return torch.stack([c * p - s * q, s * p + c * q], dim=-3).flatten(-4, -2)


def butterfly_inverse(w: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Finds angles, phases and a diagonal with W = D F_k ... F_1, layer by layer, for W in the image.

    The halves of W = (U0 + U1) F_1, a direct sum times rotations of the columns (q, q + n / 2), give the cosines as
    norms of their columns.

    Args:
        w: matrices of shape (*, n, n), n a power of two, float64 or complex128; outside the image the result is of no
            use.

    Returns:
        Angles in [-pi/2, pi/2], phases (None if W is real), and the diagonal D, (*, n), signs if W is real.
    """
    blocks = w.unsqueeze(-3)
    angles, phases = [blocks[..., 0, 0, :0].real], [blocks[..., 0, 0, :0].real]
    while blocks.shape[-1] > 1:
        half = blocks.shape[-1] // 2
        (w00, w10), (w01, w11) = (side.split(half, dim=-2) for side in blocks.split(half, dim=-1))
        s = torch.linalg.vector_norm(torch.cat([w10, w01], dim=-2), dim=-2, keepdim=True)
        c = torch.linalg.vector_norm(torch.cat([w00, w11], dim=-2), dim=-2, keepdim=True)
        t = torch.atan2(s, c)
        s, c = t.sin(), t.cos()
        e = (w10.conj() * w11 - w00.conj() * w01).sum(dim=-2, keepdim=True).sgn()
        e = torch.where(e == 0, 1.0, e)
        if not w.is_complex():
            t, s, e = t * e, s * e, torch.ones_like(e)
        angles.append(t.squeeze(-2).mT.flatten(-2))
        phases.append(e.angle().squeeze(-2).mT.flatten(-2))
        blocks = torch.stack([w00 * c - w01 * e.conj() * s, w10 * s + w11 * e.conj() * c], dim=-3).flatten(-4, -3)
    return torch.cat(angles, dim=-1), torch.cat(phases, dim=-1) if w.is_complex() else None, blocks[..., 0, 0].sgn()
