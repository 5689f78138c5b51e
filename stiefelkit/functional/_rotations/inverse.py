"""The angles of a brick-pattern mesh of rotations: from a given matrix, and from the Haar measure."""

import math

import numpy as np
import torch
from torch import Tensor

from stiefelkit.functional._packing import check_tall
from stiefelkit.numbers import check_counts
from stiefelkit.tensors import check_tensors


def brickwall_inverse(q: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Finds angles, phases and a diagonal with :math:`Q = D F_n ... F_1` for any frame Q (if tall, its first columns).

    Nulls the lower triangle along its antidiagonals, odd ones from the right, even ones from the left, so that the
    rotations fall into a brick pattern (Clements et al. 2016), and moves the diagonal that remains to the front. A
    diagonal Q has all angles and phases zero. Costs :math:`6 n^3` operations, one rotation after another.

    Args:
        q: frames of shape (*, n, p), exact to rounding in float64 or complex128.

    Returns:
        Angles in :math:`[-π/2, π/2]` (in :math:`[0, π/2]` if Q is complex), shape (*, n(n - 1)/2), in the order of
        `brickwall`; phases, same shape, None if Q is real; the diagonal D, shape (*, n), signs if Q is real.
    """
    check_tall("brickwall_inverse", q)
    *batch, n, p = q.shape
    q = torch.cat([q, torch.linalg.qr(q, mode="complete")[0][..., p:]], dim=-1) if p < n else q
    w = q.detach().cpu().resolve_conj().reshape(-1, n, n).numpy().copy()
    tables = np.empty((3, n, n, len(w)), w.dtype)
    for i, matrix in enumerate(w):
        tables[..., i] = _nulled(matrix)
    sine, cosine, turn = torch.from_numpy(tables)
    w = torch.from_numpy(w)
    d = w.diagonal(dim1=-2, dim2=-1).sgn().T.clone()
    for layer in range(n):
        # P R diag(x, y) = x P R diag(1, y / x): the left rotations of a layer let the diagonal pass.
        first = n - 1 - layer + (n - 1) % 2
        upper, lower = slice(first, n - 1, 2), slice(first + 1, n, 2)
        x, y = d[upper].clone(), d[lower].clone()
        s, e = sine[layer, upper], turn[layer, upper].clone()
        if q.is_complex():
            idle = s == 0
            turn[layer, upper] = torch.where(idle, 1.0, y * x.conj())
            d[lower] = torch.where(idle, e * y, e * x)
        else:
            sine[layer, upper] = s * x * y
    angle = torch.atan2(sine.real, cosine.real) if q.is_complex() else torch.atan2(sine, cosine)
    layers, wires = _places(n, n)

    def packed(table: Tensor) -> Tensor:
        return table[layers, wires].T.reshape(*batch, len(layers)).to(q.device)

    return packed(angle), packed(turn.angle()) if q.is_complex() else None, d.T.reshape(*batch, n).to(q.device)


def _nulled(w: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Makes W diagonal in place, in numpy; returns sines, cosines and phase factors by layer and upper wire."""
    n = len(w)
    sine, cosine, turn = np.zeros_like(w), np.ones_like(w), np.ones_like(w)
    for i in range(1, n):
        for j in range(i):
            # b is nulled, a is kept: neighbours in a row for odd i, in a column for even i.
            if i % 2:
                layer, row, column = j, n - 1 - j, i - 1 - j
                wire = column
                b, a = w[row, column : column + 2].tolist()
            else:
                layer, row, column = n - 1 - j, n - 1 - i + j, j
                wire = row
                a, b = w[row : row + 2, column].tolist()
            if b == 0:
                continue
            size = math.hypot(abs(a), abs(b))
            c, s = abs(a) / size, abs(b) / size
            e = (b / abs(b)) * (a / abs(a)).conjugate() if a else 1.0
            if i % 2:
                e = e.conjugate()
            if not isinstance(e, complex):
                s, e = s * e, 1.0
            sine[layer, wire], cosine[layer, wire], turn[layer, wire] = s, c, e
            back = e.conjugate()
            if i % 2:
                block, gate = w[: row + 1, column : column + 2], [[c, s], [-s * back, c * back]]
                block[:] = block @ np.array(gate)
            else:
                block, gate = w[row : row + 2, column:], [[c, s * back], [-s, c * back]]
                block[:] = np.array(gate) @ block
    return sine, cosine, turn


def _places(n: int, layers: int) -> tuple[Tensor, Tensor]:
    """Returns the layer and upper wire of each rotation, in the order of the coordinates."""
    check_counts("haar_indices", n=n, layers=layers)
    layer = torch.arange(layers, device="cpu")[:, None]
    q = torch.arange(max(n - 1, 0), device="cpu")
    there = (layer + q) % 2 == 0
    return layer.expand_as(there)[there], q.expand_as(there)[there]


def layer_inverse(q: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Finds angles, phases and a diagonal with :math:`Q = D F` for one layer of rotations of (0, 1), (2, 3), ...

    Args:
        q: frames of shape (*, n, p), float64 or complex128; entries that couple other rows are not read.

    Returns:
        Angles of shape (*, n // 2), phases, same shape, None if Q is real, and the diagonal D, shape (*, n).
    """
    check_tall("layer_inverse", q)
    n, p = q.shape[-2:]
    rest = torch.eye(n, dtype=q.dtype, device=q.device)[:, p:].expand(*q.shape[:-1], n - p)
    w = torch.cat([q, rest], dim=-1)
    if p % 2 and p < n:
        w[..., p - 1, p], w[..., p, p] = -w[..., p, p - 1].conj(), w[..., p - 1, p - 1].conj()
    even, odd = torch.arange(0, n - 1, 2, device=q.device), torch.arange(1, n, 2, device=q.device)
    blocks = [torch.stack([w[..., i, even], w[..., i, odd]], dim=-1) for i in (even, odd)]
    angle, phase, d = brickwall_inverse(torch.stack(blocks, dim=-2))
    d = torch.cat([d.flatten(-2), w[..., n // 2 * 2 :, -1].sgn()], dim=-1)
    return angle.flatten(-2), None if phase is None else phase.flatten(-2), d


def haar_indices(n: int, layers: int) -> Tensor:
    """Returns the index of the density of each of a Haar matrix's angles, for a mesh of n wires.

    It is inputs before plus outputs after less :math:`n + 1`, and 1, that of a single rotation, at least, which counts
    with fewer layers than n. Integers of shape (mesh_size(n, layers),), up to :math:`n - 1`.
    """
    layer, q = _places(n, layers)
    before, after = layer, layers - 1 - layer
    reach = sum((q + 1 + k).clamp(max=n - 1) - (q - k).clamp(min=0) + 1 for k in (before, after))
    assert isinstance(reach, Tensor)
    return (reach - n - 1).clamp(min=1)


def haar_angles(
    index: Tensor, batch: tuple[int, ...], is_complex: bool, generator: torch.Generator | None = None
) -> Tensor:
    """Draws angles with the densities that the Haar measure has in a full mesh (Hurwitz 1897; Russell et al. 2017).

    With index k, complex: :math:`cos t sin^{2k - 1} t` on :math:`(0, π/2)`; real: :math:`|sin t|^{k - 1}` on
    :math:`(-π, π)`. Angles have the shape (*batch, d), in float64.

    Args:
        index: k for each angle, shape (d,), see `haar_indices`.
        batch: batch dimensions.
        is_complex: which density.
        generator: source of randomness; torch's default when None.
    """
    check_tensors("haar_angles", index)
    device = None if generator is None else generator.device
    k = index.to(device=device, dtype=torch.float64)
    u, v = torch.rand(2, *batch, len(k), dtype=torch.float64, device=device, generator=generator)
    if is_complex:
        return (-torch.expm1(torch.log1p(-u) / k)).sqrt().acos()
    # The first two entries of a uniform unit vector of k + 1 have 1 - r^2 = u^(2 / (k - 1)).
    radius = (-torch.expm1(torch.log1p(-u) * 2 / (k - 1))).sqrt().nan_to_num(1.0)
    angle = (radius * (2 * math.pi * v).cos()).acos()
    return torch.where(v < 0.5, angle, -angle)
