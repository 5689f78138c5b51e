"""Meshes of plane rotations, real and complex."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from stiefelkit.contract.param import OrthogonalParam, Position, Traits, rows_of
from stiefelkit.errors import ImageError, OptionError, ShapeError, needs
from stiefelkit.functional import (
    brickwall,
    brickwall_inverse,
    butterfly,
    butterfly_inverse,
    diagonal,
    haar_angles,
    haar_indices,
    layer_inverse,
    mesh_size,
    polish,
    rotate_butterfly,
)
from stiefelkit.functional._kernels.columns import takes_mesh
from stiefelkit.functional._packing import complex_of
from stiefelkit.init import device_of, symmetric
from stiefelkit.metrics import permitted_error, rounding_limit
from stiefelkit.numbers import integer, one_of, optional
from stiefelkit.parametrizations._charts import check_signs, component, diagonal_coordinates
from stiefelkit.tensors import coordinate_dtype, dtype_of_parts


class Givens(OrthogonalParam):
    r"""First p columns of :math:`W = D F_L ... F_2 F_1`, each F a layer of rotations of disjoint pairs of rows.

    Convention: a rotation of the rows (q, r), :math:`q < r`, is
    :math:`[[cos t, -e^{i f} sin t], [sin t, e^{i f} cos t]]`, the phase on its second input, as in the code of EURNN;
    :math:`F_1` acts first on a column, D last. The coordinate `angle` holds the t, layer by layer. Complex frames:
    `phase` holds the f in the same order and then the n angles of :math:`D = diag(e^{i w})`. Real frames: :math:`f = 0`
    and D is a fixed diagonal of signs, the chart `signs`, all ones in EURNN.

    Layouts: "brickwall", EURNN's tunable one: odd layers rotate (0, 1), (2, 3), ..., even ones (1, 2), (3, 4), ...
    "fft": :math:`log_2(n)` layers, which rotate rows :math:`n/2, n/4, ..., 1` apart.

    Image: every frame with a brick wall of n layers, the default, by the choice of D; a subset with fewer layers or
    "fft", where a frame can be assigned if it is square and "fft", or made by one layer of neighbours (the identity,
    "henaff" and "unit_circle" are). With D fixed, a square real W has :math:`det W = det D`. Not for weights that must
    cross from one component of :math:`O(n)` to the other. An assigned frame comes back within about :math:`n eps / 3`
    (real) or :math:`n eps / 2` (complex), the cost of rounding so many angles, more than 8 limits from n = 64 up.

    Cost: :math:`O(n^2 L)`, forward and backward about 20 products of n x n at n = L = 512; :math:`O(n^2)` for "fft";
    memory :math:`O(n^2)`. `linear` does not form W where that is cheaper.

    Args:
        shape, dtype, device: of the frame, (*, n, p), real or complex, and where the signs live.
        precision: "exact": polished in float64 ("fft": made in float64). "fast": neither; :math:`‖W^H W - I‖_F` is
            below :math:`(L + 16) eps √p`, and a twentieth of that for random angles.
        layout: "brickwall" or "fft"; the latter needs n to be a power of two.
        layers: number of layers L of a brick wall, n when None.

    References:
        Jing et al., Tunable efficient unitary neural networks (EUNN) and their application to RNNs, ICML 2017.
        Clements et al., Optimal design for universal multiport interferometers, Optica 2016.
        Russell et al., Direct dialling of Haar random unitary matrices, New J. Phys. 2017.

    >>> map = Givens((3, 3), dtype=torch.float32, layers=1)
    >>> map(torch.tensor([torch.pi / 2])).round().abs()
    tensor([[0., 1., 0.],
            [1., 0., 0.],
            [0., 0., 1.]])
    """

    coordinate_names: ClassVar[tuple[str, ...]] = ("angle", "phase")
    precisions: ClassVar[tuple[str, ...]] = ("exact", "fast")
    stacks: ClassVar[bool] = True
    check_chart = check_signs

    signs: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        precision: str = "exact",
        layout: str = "brickwall",
        layers: int | None = None,
    ):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        n = self.shape[-2]
        self.layout: str = one_of("brickwall", "fft").require("Givens", "layout", layout)
        needs(layout != "fft" or layers is None, OptionError, "Givens", 'layout "brickwall" for layers=', layout)
        reason = self.supports(self.shape, self.dtype, layout=layout)
        needs(reason is None, ShapeError, "Givens", str(reason), n)
        layers = optional(integer(1)).require("Givens", "layers", layers)
        self._is_fft = layout == "fft"
        self.layers: int = n.bit_length() - 1 if self._is_fft else n if layers is None else layers
        self.rotations = n // 2 * self.layers if self._is_fft else mesh_size(n, self.layers)
        self._is_full = n <= 2 or (self.layers >= n and not self._is_fft)
        if not self.is_complex:
            self.register_buffer("signs", torch.ones(*self.shape[:-1], dtype=torch.int8, device=device))

    @classmethod
    def supports(cls, shape: Sequence[int], dtype: torch.dtype, **options: object) -> str | None:
        if one_of("fft").holds(options.get("layout")) and shape[-2] & (shape[-2] - 1):
            return 'a power of two of rows for layout "fft"'
        return None

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        shapes = [(1, 1), (2, 2), (7, 7), (16, 16), (9, 4), (5, 1), (2, 3, 6, 6), (2, 8, 2)]
        few = [((6, 6), 1), ((9, 5), 3), ((2, 8, 8), 4), ((4, 4), 7)]
        fourier: dict[str, Any] = {"layout": "fft"}
        fast: dict[str, Any] = {"precision": "fast"}
        return [
            *((shape, {}) for shape in shapes),
            *((shape, {"layers": layers}) for shape, layers in few),
            *((shape, fourier) for shape in ((1, 1), (2, 2), (16, 16), (8, 3), (2, 4, 4))),
            ((16, 16), fast),
            ((2, 12, 5), fast),
            ((8, 8), fast | fourier),
        ]

    @property
    def traits(self) -> Traits:
        n, p = self.shape[-2:]
        return Traits(
            onto=self._is_full,
            invertible=self._is_full or self.layers == 1 or (self._is_fft and n == p),
            exact=self.precision == "exact",
            component=component(self.shape, self.is_complex),
            cost_exponent=2.0 if self._is_fft else 3.0,
        )

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        *batch, n, _ = self.shape
        phase = {"phase": (*batch, self.rotations + n)} if self.is_complex else {}
        return {"angle": (*batch, self.rotations)} | phase

    @property
    def schemes(self) -> tuple[str, ...]:
        return (*super().schemes, "uniform")

    def options(self) -> dict[str, Any]:
        return {"layout": self.layout, "layers": self.layers}

    def error_bound(self, *coordinates: Tensor) -> float:
        p = self.shape[-1]
        rounded = permitted_error(p, self.dtype)
        if self.precision == "exact":
            return rounded
        eps = torch.finfo(coordinate_dtype(self.dtype)).eps
        return rounded + (self.layers + 16) * eps * math.sqrt(p)

    def forward(self, angle: Tensor, phase: Tensor | None = None) -> Tensor:
        exact = self.precision == "exact"
        # With few layers float64 costs less than a polish.
        few = self._is_fft or 32 * self.layers <= self.shape[-2]
        work = torch.float64 if exact and few else coordinate_dtype(self.dtype)
        f, d = self._split(phase, work)
        rounded = torch.promote_types(self.dtype, torch.float32)
        w = self._frame(angle.to(work), f, d, rounded)
        is_rough = work == coordinate_dtype(self.dtype) and not takes_mesh(
            angle, self.shape[-2], self.shape[-1], rounded
        )
        return (polish(w) if exact and is_rough else w).to(self.dtype)

    def linear(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        n, p = self.shape[-2:]
        rows, exact = rows_of(x), self.precision == "exact"
        # Measured: in float64, as an exact result takes, rotating costs twice as much.
        cheaper = max(rows, self.layers) <= n // 2 if exact else rows <= n
        if len(self.shape) > 2 or not cheaper or x.dtype != self.dtype or not rows:
            return super().linear(x, *coordinates)
        angle, phase = coordinates if self.is_complex else (*coordinates, None)
        work = torch.float64 if exact else coordinate_dtype(self.dtype)
        f, d = self._split(phase, work)
        z = F.pad(x.reshape(-1, p).to(dtype_of_parts(work, self.is_complex)), (0, n - p))
        angle = angle.to(work)
        z = rotate_butterfly(z, angle, f) if self._is_fft else brickwall(z.T, angle, f, layers=self.layers).T
        return (z * d.to(z.dtype)).reshape(*x.shape[:-1], n).to(self.dtype)

    @property
    def structure(self) -> str | None:
        """Layers of rotations, of a brick wall."""
        n, p = self.shape[-2:]
        fits = len(self.shape) == 2 and n == p and n >= 3 and self.layout == "brickwall"
        return "brick" if fits else None

    def factors(self, angle: Tensor, phase: Tensor | None = None) -> Tensor:
        """Cosines and sines, phases and D, a row for each layer."""
        n = self.shape[-1]
        sizes = [(n - i % 2) // 2 for i in range(self.layers)]

        def rows(m: Tensor) -> Tensor:
            return torch.stack([F.pad(layer, (0, n - len(layer))) for layer in m.split(sizes)])

        t = rows(angle.double())
        f, d = self._split(phase, torch.float64)
        d = d.unsqueeze(0)
        if f is None:
            return torch.cat([t.cos(), t.sin(), d]).to(self.dtype)
        f = rows(f)
        return torch.cat([complex_of(t.cos(), t.sin()), complex_of(f.cos(), f.sin()), d]).to(self.dtype)

    def prefers_factors(self, rows: int) -> bool:
        """Returns whether :math:`n^2 / (L + 2)` is above the point where layers cost as much as a product."""
        many, few = (10_000, 8_000) if self.is_complex else (18_000, 40_000)
        return self.shape[-1] ** 2 >= (self.layers + 2) * (many + few / max(rows, 1))

    def invert(self, w: Tensor) -> Position:
        """Nulls W rotation by rotation; see `stiefelkit.functional.brickwall_inverse` and `butterfly_inverse`."""
        n, p = self.shape[-2:]
        permitted = max(8 * rounding_limit(p, self.dtype), 1e-10)
        for angle, phase, d in self._readings(w):
            back = w if self._is_full else self._frame(angle, phase, d, None)
            if torch.linalg.matrix_norm(back - w).max().item() <= permitted:
                phases, chart = diagonal_coordinates(d)
                return ((angle,) if phase is None else (angle, torch.cat([phase, *phases], -1))), chart
        remedy = 'layout="brickwall"' if self._is_fft else f"layers={n}"
        requirement = f"a frame that {self.layers} layers of the {self.layout} mesh make, and whose angles can be found"
        raise ImageError(f"Givens needs {requirement}, got another; with {remedy} any frame fits.")

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws a frame, or the angles themselves.

        "haar": angles and phases with the densities of their places in Haar matrices, which makes W Haar with a full
        mesh; with "fft" each rotation is Haar by itself. "uniform": all angles and phases :math:`U(-π, π)`,
        :math:`D = I` if real, as EURNN does.
        """
        if scheme not in ("haar", "uniform"):
            return super().initial(scheme, generator)
        *batch, n, _ = self.shape
        if scheme == "uniform":
            angle = symmetric((*batch, self.rotations), math.pi, generator)
        else:
            each = torch.ones(self.rotations, device="cpu")
            index = each if self._is_fft else haar_indices(n, min(n, self.layers))
            angle = haar_angles(index, tuple(batch), self.is_complex, generator)
            angle = F.pad(angle, (0, self.rotations - len(index)))
        if self.is_complex:
            return (angle, symmetric((*batch, self.rotations + n), math.pi, generator)), {}
        d = torch.ones(*batch, n, device=device_of(generator))
        if scheme == "haar":
            d = symmetric((*batch, n), math.pi, generator).sign()
        return (angle,), {"signs": d.to(torch.int8)}

    def _frame(self, angle: Tensor, phase: Tensor | None, d: Tensor, rounded: torch.dtype | None) -> Tensor:
        """Returns the frame in the angles' precision or, if that is cheaper, rounded."""
        n, p = self.shape[-2:]
        if self._is_fft:
            return butterfly(angle, d, phase, n=n, dtype=rounded)[..., :p]
        dtype = dtype_of_parts(angle.dtype, phase is not None)
        if phase is not None and takes_mesh(angle, n, p, torch.complex128):
            dtype = torch.complex128  # D comes before the rounding
        w = brickwall(torch.eye(n, p, dtype=dtype, device=angle.device), angle, phase, layers=self.layers)
        return w * d.to(w.dtype).unsqueeze(-1)

    def _readings(self, w: Tensor) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Yields possible angles and phases of all rotations, and D, of a frame; certain ones, if the mesh is full."""
        angle, phase, d = brickwall_inverse(w) if self._is_full else layer_inverse(w)
        # One layer of neighbours is the first of a brick wall, the last of "fft"; the others turn by nothing.
        rest = self.rotations - angle.shape[-1]
        ends = (rest, 0) if self._is_fft else (0, rest)
        yield F.pad(angle, ends), None if phase is None else F.pad(phase, ends), d
        if self._is_fft and not self._is_full and w.shape[-1] == w.shape[-2]:
            yield butterfly_inverse(w)

    def _split(self, phase: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor]:
        if phase is None:
            return None, diagonal(signs=self.signs)
        return phase[..., : self.rotations].to(dtype), diagonal(phase=phase[..., self.rotations :])
