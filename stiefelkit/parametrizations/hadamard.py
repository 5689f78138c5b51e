"""Hadamard matrices between trained diagonals: phases if complex, rotations of pairs of rows if real."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.contract.param import OrthogonalParam, Position, Traits, rows_of
from stiefelkit.errors import ImageError, ShapeError, needs
from stiefelkit.functional import hadamard_transform, polish
from stiefelkit.functional._hadamard import turned_rows
from stiefelkit.init import hadamard_factors, hadamard_orders, symmetric
from stiefelkit.metrics import rounding_limit
from stiefelkit.parametrizations._charts import check_signs, component
from stiefelkit.tensors import Device


class Hadamard(OrthogonalParam):
    r""":math:`W = D_2 H D_1` with the matrix H of `stiefelkit.init.hadamard(n, random=False)`.

    Complex: :math:`D = diag(e^{i θ})`, the coordinate `phase` holds the two θ, one row each, that of :math:`D_1` first;
    every entry of W has modulus :math:`1 / √{n}`. Real: fixed signs, the chart `signs`, and trained rotations:
    :math:`W = S_2 R_2 H R_1 S_1`, where R rotates the rows i and i + n // 2 by `angle`. A pair of equal signs is a
    rotation by 0 or π, so fixed signs determine det W alone. With angles of 0, the default start, W is a Hadamard
    matrix with random signs.

    Image: a subset of :math:`U(n)` of dimension :math:`2n - 1`, of :math:`O(n)` of dimension n at most. A frame in it
    can be assigned, except a real one of order 12, 20, 28, ..., which has no factor 2: those are drawn. Cost:
    :math:`O(n^2 log n)` for W, :math:`O(n log n)` a vector for `linear`, which never forms W. Not for weights that must
    reach every frame.

    Args:
        shape, dtype, device: of the frame, (*, n, n), n an order of `stiefelkit.init.hadamard`, and where the signs
            live.
        precision: "exact": everything in float64 or complex128, one rounding at the end.

    References:
        Yang, Moczulski, Denil, de Freitas, Smola, Song, Wang, Deep fried convnets, ICCV 2015, which trains the
        diagonals beside Hadamard matrices, of any entries.

    >>> Hadamard((2, 2), dtype=torch.float32)(torch.zeros(2, 1))
    tensor([[ 0.7071,  0.7071],
            [ 0.7071, -0.7071]])
    """

    coordinate_names: ClassVar[tuple[str, ...]] = ("phase", "angle")
    stacks: ClassVar[bool] = True
    check_chart = check_signs
    schemes = property(lambda self: ("hadamard", "uniform"))

    signs: Tensor

    def __init__(
        self, shape: Sequence[int], *, dtype: torch.dtype | None = None, device: Device = None, precision: str = "exact"
    ):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        reason = self.supports(self.shape, self.dtype)
        needs(reason is None, ShapeError, "Hadamard", str(reason), f"shape {self.shape}")
        *batch, n, _ = self.shape
        if not self.is_complex:
            self.register_buffer("signs", torch.ones(*batch, 2, n, dtype=torch.int8, device=device))

    @classmethod
    def supports(cls, shape: Sequence[int], dtype: torch.dtype, **options: object) -> str | None:
        if shape[-1] != shape[-2]:
            return "a square weight"
        below, above = hadamard_orders(shape[-1])
        return None if below == above else f"an order like 2^k or 12, 20, 28, ... ({below} and {above} are near)"

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        return [(shape, {}) for shape in ((1, 1), (2, 2), (16, 16), (12, 12), (24, 24), (2, 3, 4, 4))]

    @property
    def traits(self) -> Traits:
        return Traits(
            onto=self.shape[-1] == 1,
            invertible=self.is_complex or len(hadamard_factors(self.shape[-1])[0]) <= 2,
            exact=True,
            component=component(self.shape, self.is_complex),
            cost_exponent=2.0,
        )

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        *batch, n, _ = self.shape
        return {"phase": (*batch, 2, n)} if self.is_complex else {"angle": (*batch, 2, n // 2)}

    def error_bound(self, *coordinates: Tensor) -> float:
        """Returns that of an exact frame, and what entries of one size, as those of H, add by rounding alike."""
        n = self.shape[-1]
        entry = torch.tensor(n**-0.5, dtype=self.dtype.to_real(), device="cpu").item()
        return super().error_bound() + abs(n * entry**2 - 1) * math.sqrt(n)

    def forward(self, turn: Tensor) -> Tensor:
        w = self._apply_rows(None, turn).mT
        return polish(w) if self.dtype in (torch.float64, torch.complex128) else w

    def linear(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        if len(self.shape) > 2 or x.dtype != self.dtype or x.dim() < 2 or not rows_of(x):
            return super().linear(x, *coordinates)
        return self._apply_rows(x, *coordinates)

    def invert(self, w: Tensor) -> Position:
        """Reads the diagonals off the first column and row, or pairs of them; raises ImageError if that is not W."""
        n = self.shape[-1]
        if self.traits.invertible:
            eye = torch.eye(n, dtype=w.dtype, device=w.device)
            h = hadamard_transform(eye, adjoint=True)
            (turn,), chart = _phases(w, h) if self.is_complex else _rotations(w, h)
            chart = {name: torch.where(signs < 0, -1, 1).to(torch.int8) for name, signs in chart.items()}
            back = self._apply_rows(eye, turn, chart.get("signs")).mT
            if torch.linalg.matrix_norm(back - w).max().item() <= max(8 * rounding_limit(n, self.dtype), 1e-10):
                return (turn,), chart
        raise ImageError(
            f"Hadamard needs a frame D2 H D1 that can be read off, got another of order {n}; cayley takes any."
        )

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws the diagonals.

        "hadamard": random signs, angles of 0, phases of 0 or π: a Hadamard matrix. "uniform": random signs, and angles
        or phases :math:`U(-π, π)`.
        """
        ((name, shape),) = self.coordinates.items()
        turn = symmetric(shape, math.pi, generator)
        if name == "phase":
            return (turn if scheme == "uniform" else (turn > 0).double() * math.pi,), {}
        signs = symmetric(self.signs.shape, 1.0, generator).sign().to(torch.int8)
        return (turn if scheme == "uniform" else turn * 0,), {"signs": signs}

    def _apply_rows(self, x: Tensor | None, turn: Tensor, signs: Tensor | None = None) -> Tensor:
        """Maps each row x, those of the identity if None, to (W x)^T; in the dtype of x, or the map's."""
        signs = None if self.is_complex else self.signs if signs is None else signs
        return turned_rows(x, turn, signs, self.shape[-1], self.dtype if x is None else x.dtype)


def _phases(w: Tensor, h: Tensor) -> Position:
    """Returns the phases of W = D2 H D1, the first of D1 being 0."""
    e = w * h  # n W o H = (D2 1) (D1 1)^T
    return (torch.stack([(e[..., 0, :] * e[..., 0, :1].conj()).angle(), e[..., 0].angle()], -2),), {}


def _rotations(w: Tensor, h: Tensor) -> Position:
    """Returns angles and signs of W = S2 R2 H R1 S1, the first block of R1 S1 being I."""
    m = w.shape[-1] // 2
    if m == 0:
        return (w.new_zeros(*w.shape[:-2], 2, 0),), {"signs": torch.cat([torch.ones_like(w), w], -2)}
    # In 2 x 2 blocks W_ij = Q_i H_ij P_j with Q and P orthogonal, and m H_ij H_ij^T = I.
    w, h = (x.unflatten(-1, (2, m)).unflatten(-3, (2, m)) for x in (w, h))
    column_w, column_h = (x[..., 0].transpose(-3, -2) for x in (w, h))
    row_w, row_h = (x[..., 0, :, :].movedim(-1, -3) for x in (w, h))
    q = m * column_w @ column_h.mT
    p = m * row_h.mT @ q[..., :1, :, :].mT @ row_w
    angles = [torch.atan2(p[..., 1, 0], p[..., 0, 0]), torch.atan2(-q[..., 0, 1], q[..., 0, 0])]
    last = torch.stack([x[..., 0, 0] * x[..., 1, 1] - x[..., 0, 1] * x[..., 1, 0] for x in (p, q)], -2)
    return (torch.stack(angles, -2),), {"signs": torch.cat([torch.ones_like(last), last], -1)}
