"""The angles of a brick-pattern mesh of rotations: from a given matrix, and from the Haar measure."""

import math

import torch
from torch import Tensor

from stiefelkit.functional._rotations import mesh_places

__all__ = ["brickwall_inverse", "haar_angles", "haar_indices"]


def brickwall_inverse(q: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
    """Finds angles, phases and a diagonal with Q = D F_n ... F_1, for any orthogonal or unitary Q.

    Nulls the lower triangle along its antidiagonals, odd ones from the right, even ones from the left, so that the
    rotations fall into a brick pattern (Clements et al. 2016), and moves the diagonal that remains to the front. A
    diagonal Q has all angles and phases zero. Costs 6 n^3 operations, one rotation after another.

    Args:
        q: matrices of shape (*, n, n), exact to rounding in float64 or complex128.

    Returns:
        Angles in [-pi/2, pi/2] (in [0, pi/2] if Q is complex), shape (*, n(n - 1)/2), in the order of `brickwall`;
        phases, same shape, None if Q is real; the diagonal D, shape (*, n), signs if Q is real.
    """
    n = q.shape[-1]
    w = q.reshape(-1, n, n).cpu().clone()
    sine, cosine, turn = w.new_zeros(n, n, len(w)), w.new_ones(n, n, len(w)), w.new_ones(n, n, len(w))
    for i in range(1, n):
        for j in range(i):
            if i % 2:
                row, column = n - 1 - j, i - 1 - j
                b, a = w[:, row, column : column + 2].unbind(-1)
                layer, wire = j, column
            else:
                row, column = n - 1 - i + j, j
                a, b = w[:, row : row + 2, column].unbind(-1)
                layer, wire = n - 1 - j, row
            s, c, e = _nulling(a, b, bool(i % 2))
            sine[layer, wire], cosine[layer, wire], turn[layer, wire] = s, c, e
            e = e.conj()
            if i % 2:
                gate = torch.stack([c, s, -s * e, c * e], dim=-1).unflatten(-1, (2, 2))
                block = w[:, : row + 1, column : column + 2]
                block.copy_(block @ gate)
            else:
                gate = torch.stack([c, s * e, -s, c * e], dim=-1).unflatten(-1, (2, 2))
                block = w[:, row : row + 2, column:]
                block.copy_(gate @ block)
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
    layers, wires = mesh_places(n, n)
    batch = q.shape[:-2]

    def packed(table: Tensor) -> Tensor:
        return table[layers, wires].T.reshape(*batch, -1).to(q.device)

    return packed(angle), packed(turn.angle()) if q.is_complex() else None, d.T.reshape(*batch, n).to(q.device)


def _nulling(a: Tensor, b: Tensor, right: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Sine, cosine and phase factor of rotations that turn (a, b) into (r, 0); identities where b = 0."""
    size = torch.linalg.vector_norm(torch.stack([a, b]), dim=0)
    none = (b == 0) | (size == 0)
    size = torch.where(none, 1.0, size)
    s, c = torch.where(none, 0.0, b.abs() / size), torch.where(none, 1.0, a.abs() / size)
    one = torch.ones_like(a)
    e = torch.where(none | (a == 0), one, b.sgn() * a.sgn().conj())
    if a.is_complex():
        return s.to(a.dtype), c.to(a.dtype), e.conj() if right else e
    return s * e, c, one


def haar_indices(n: int, layers: int) -> Tensor:
    """What shapes the density of each angle of a Haar matrix: inputs that reach it plus outputs it reaches - n - 1.

    Args:
        n: wires of the mesh.
        layers: its layers; with fewer than n some counts fall below the 1 of a single rotation, and are put there.

    Returns:
        Integers of shape (mesh_size(n, layers),), 1 to n - 1.
    """
    layer, q = mesh_places(n, layers)
    before, after = layer, layers - 1 - layer
    reach = sum((q + 1 + k).clamp(max=n - 1) - (q - k).clamp(min=0) + 1 for k in (before, after))
    assert isinstance(reach, Tensor)
    return (reach - n - 1).clamp(min=1)


def haar_angles(
    index: Tensor, batch: tuple[int, ...], is_complex: bool, generator: torch.Generator | None = None
) -> Tensor:
    """Draws angles with the densities that the Haar measure has in a full mesh (Hurwitz 1897; Russell et al. 2017).

    With index k, complex: cos t sin^(2k - 1) t on (0, pi/2); real: |sin t|^(k - 1) on (-pi, pi).

    Args:
        index: k for each angle, shape (d,), see `haar_indices`.
        batch: batch dimensions.
        is_complex: which density.
        generator: source of randomness; torch's default when None.

    Returns:
        Angles of shape (*batch, d) in float64.
    """
    device = None if generator is None else generator.device
    k = index.to(device=device, dtype=torch.float64)
    u, v = torch.rand(2, *batch, len(k), dtype=torch.float64, device=device, generator=generator)
    if is_complex:
        return (-torch.expm1(torch.log1p(-u) / k)).sqrt().acos()
    # The first two entries of a uniform unit vector of k + 1 have 1 - r^2 = u^(2 / (k - 1)).
    radius = (-torch.expm1(torch.log1p(-u) * 2 / (k - 1))).sqrt().nan_to_num(1.0)
    angle = (radius * (2 * math.pi * v).cos()).acos()
    return torch.where(v < 0.5, angle, -angle)
