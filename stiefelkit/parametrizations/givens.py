"""Meshes of plane rotations, real and complex."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from stiefelkit.errors import ImageError, OptionError, ShapeError
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
from stiefelkit.metrics import permitted_error, rounding_limit
from stiefelkit.param import OrthogonalParam, Traits, coordinate_dtype, rows_of
from stiefelkit.parametrizations._buffers import are_signs

__all__ = ["Givens"]


class Givens(OrthogonalParam):
    r"""First p columns of W = D F_L ... F_2 F_1, each F a layer of rotations of disjoint pairs of rows.

    Convention: a rotation of the rows (q, r), q < r, is [[cos t, -e^{i f} sin t], [sin t, e^{i f} cos t]], the phase on
    its second input, as in the code of EURNN; F_1 acts first on a column, D last. The coordinate `angle` holds the t,
    layer by layer. Complex frames: `phase` holds the f in the same order and then the n angles of D = diag(e^{i w}).
    Real frames: f = 0 and D is a fixed diagonal of signs, the chart `signs`, all ones in EURNN.

    Layouts: "brickwall", EURNN's tunable one: odd layers rotate (0, 1), (2, 3), ..., even ones (1, 2), (3, 4), ...
    "fft": log2(n) layers, which rotate rows n/2, n/4, ..., 1 apart.

    Image: every frame with a brick wall of n layers, the default, by the choice of D; a subset with fewer layers or
    "fft", where a frame can be assigned if it is square and "fft", or made by one layer of neighbours (the identity,
    "henaff" and "unit_circle" are). With D fixed, a square real W has det W = det D. Not for weights that must cross
    from one component of O(n) to the other. An assigned frame is met within about n eps / 3 (real) or n eps / 2
    (complex), which is what rounding so many angles costs, and more than 8 rounding limits from n = 64 up.

    Cost: O(n^2 L), forward and backward about 20 products of n x n at n = L = 512; O(n^2) for "fft"; memory O(n^2).
    `linear` does not form W where that is cheaper.

    Args:
        shape: shape of the frame, (*, n, p).
        dtype: real or complex dtype of the frame.
        device: where the signs live.
        precision: "exact": polished in float64 ("fft": made in float64). "fast": neither; ||W^H W - I||_F is below
            (L + 16) eps sqrt(p), and a twentieth of that for random angles.
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
    schemes: ClassVar[tuple[str, ...]] = (*OrthogonalParam.schemes, "uniform")
    precisions: ClassVar[tuple[str, ...]] = ("exact", "fast")

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
        if layout not in ("brickwall", "fft"):
            raise OptionError(f'Givens needs layout "brickwall" or "fft", got {layout!r}.')
        self.layout = layout
        if layout == "fft":
            if layers is not None:
                raise OptionError(f'Givens needs layout "brickwall" for layers=, got {layout!r}.')
            reason = self.supports(shape, self.dtype, layout=layout)
            if reason is not None:
                raise ShapeError(f"Givens needs {reason}, got {n}.")
            layers = n.bit_length() - 1
        elif layers is None:
            layers = n
        elif not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
            raise OptionError(f"Givens needs layers to be a positive integer, got {layers!r}.")
        self.layers = layers
        if not self.is_complex:
            self.register_buffer("signs", torch.ones(self.shape[:-1], dtype=torch.int8, device=device))

    @classmethod
    def supports(cls, shape: Sequence[int], dtype: torch.dtype, **options: Any) -> str | None:
        """The Fourier pattern is for powers of two."""
        if options.get("layout") == "fft" and shape[-2] & (shape[-2] - 1):
            return 'a power of two of rows for layout "fft"'
        return None

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """Square, tall, one column, one entry, odd, batched; few layers, many, the Fourier pattern, fast."""
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
    def is_full(self) -> bool:
        """Whether the mesh reaches every frame."""
        n = self.shape[-2]
        return n <= 2 or (self.layout == "brickwall" and self.layers >= n)

    @property
    def traits(self) -> Traits:
        """Onto with a full brick wall; invertible also with one layer, and square with "fft"."""
        n, p = self.shape[-2:]
        component: Literal["chart", "connected"] = "chart" if n == p and not self.is_complex else "connected"
        fourier = self.layout == "fft"
        return Traits(
            onto=self.is_full,
            invertible=self.is_full or self.layers == 1 or (fourier and n == p),
            exact=self.precision == "exact",
            component=component,
            cost_exponent=2.0 if fourier else 3.0,
        )

    @property
    def rotations(self) -> int:
        """Number of rotations."""
        n = self.shape[-2]
        return n // 2 * self.layers if self.layout == "fft" else mesh_size(n, self.layers)

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """`angle`, and for complex frames `phase`."""
        *batch, n, _ = self.shape
        shapes: dict[str, tuple[int, ...]] = {"angle": (*batch, self.rotations)}
        if self.is_complex:
            shapes["phase"] = (*batch, self.rotations + n)
        return shapes

    def options(self) -> dict[str, Any]:
        """The layout and the number of layers."""
        return {"layout": self.layout, "layers": self.layers}

    def check_chart(self, chart: Mapping[str, Tensor]) -> str | None:
        """Signs are 1 or -1."""
        return None if self.is_complex or are_signs(chart["signs"]) else "signs of 1 and -1"

    def error_bound(self, *coordinates: Tensor) -> float:
        """In "fast" mode (L + 16) eps sqrt(p) more, eps that of the coordinates."""
        p = self.shape[-1]
        rounded = permitted_error(p, self.dtype)
        if self.precision == "exact":
            return rounded
        eps = torch.finfo(coordinate_dtype(self.dtype)).eps
        return rounded + (self.layers + 16) * eps * math.sqrt(p)

    def forward(self, angle: Tensor, phase: Tensor | None = None) -> Tensor:
        """Maps coordinates to frames.

        Args:
            angle: angles of the rotations in radians, shape (*, d), d = n(n - 1)/2 for n layers of a brick wall,
                n/2 log2(n) for "fft".
            phase: phases of the rotations, then of D, shape (*, d + n), complex frames only.

        Returns:
            Frames of shape (*, n, p).
        """
        exact = self.precision == "exact"
        # With few layers float64 costs less than a polish.
        few = self.layout == "fft" or 32 * self.layers <= self.shape[-2]
        work = torch.float64 if exact and few else coordinate_dtype(self.dtype)
        own, d = self._split(phase)
        own = None if own is None else own.to(work)
        w = self._frame(angle.to(work), own, d, torch.promote_types(self.dtype, torch.float32))
        return (polish(w) if exact and work == angle.dtype else w).to(self.dtype)

    def linear(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        """Returns x @ W.mT, by rotating x where W would cost more; one matrix, no batch."""
        n, p = self.shape[-2:]
        rows, exact = rows_of(x), self.precision == "exact"
        # Measured: in float64, as an exact result takes, rotating costs twice as much.
        cheaper = max(rows, self.layers) <= n // 2 if exact else rows <= n
        if len(self.shape) > 2 or not cheaper or x.dtype != self.dtype or not rows:
            return super().linear(x, *coordinates)
        angle, phase = coordinates if self.is_complex else (*coordinates, None)
        work = torch.float64 if exact else coordinate_dtype(self.dtype)
        angle, phase = angle.to(work), None if phase is None else phase.to(work)
        own, d = self._split(phase)
        z = F.pad(x.reshape(-1, p).to(_field(work, phase)), (0, n - p))
        if self.layout == "fft":
            z = rotate_butterfly(z, angle, own)
        else:
            z = brickwall(z.T, angle, own, layers=self.layers).T
        return (z * d.to(z.dtype)).reshape(*x.shape[:-1], n).to(self.dtype)

    def invert(self, w: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Nulls W rotation by rotation; see `stiefelkit.functional.brickwall_inverse` and `butterfly_inverse`.

        Raises:
            ImageError: the mesh is not full, and W is neither made by one layer of neighbours nor, square, by "fft".
        """
        n, p = self.shape[-2:]
        if self.is_full:
            return self._packed(*brickwall_inverse(w), start=0)
        tried = [layer_inverse(w)]
        if self.layout == "fft" and n == p:
            tried.append(butterfly_inverse(w))
        for angle, turn, d in tried:
            start = self.rotations - angle.shape[-1] if self.layout == "fft" else 0
            coordinates, chart = self._packed(angle, turn, d, start=start)
            own = None if turn is None else coordinates[1][..., : self.rotations]
            off = torch.linalg.matrix_norm(self._frame(coordinates[0], own, d) - w).max().item()
            if off <= max(8 * rounding_limit(p, self.dtype), 1e-10):
                return coordinates, chart
        remedy = 'layout="brickwall"' if self.layout == "fft" else f"layers={n}"
        raise ImageError(
            f"Givens needs a frame that {self.layers} layers of the {self.layout} mesh make, and that can be read off "
            f"it, got another; with {remedy} any frame fits."
        )

    def initial(
        self, scheme: str, generator: torch.Generator | None = None
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Draws a frame, or the angles themselves.

        "haar": angles and phases with the densities that they have in Haar matrices, which makes W Haar with a full
        mesh; with fewer layers each density is that of its place, and with "fft" each rotation is Haar by itself.
        "uniform": all angles and phases U(-pi, pi), D = I if real, as EURNN does.
        """
        if scheme not in ("haar", "uniform"):
            return self.initial_frame(scheme, generator)
        device = None if generator is None else generator.device
        *batch, n, _ = self.shape

        def uniform(*shape: int) -> Tensor:
            return (2 * torch.rand(*shape, dtype=torch.float64, device=device, generator=generator) - 1) * math.pi

        if scheme == "uniform":
            angle = uniform(*batch, self.rotations)
        else:
            index = torch.ones(self.rotations) if self.layout == "fft" else haar_indices(n, min(n, self.layers))
            angle = haar_angles(index, tuple(batch), self.is_complex, generator)
            angle = F.pad(angle, (0, self.rotations - len(index)))
        if not self.is_complex:
            signs = uniform(*batch, n).sign() if scheme == "haar" else torch.ones(*batch, n)
            return (angle,), {"signs": signs.to(torch.int8)}
        return (angle, uniform(*batch, self.rotations + n)), {}

    def _split(self, phase: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """The phases of the rotations, and D."""
        if phase is None:
            return None, diagonal(signs=self.signs)
        return phase[..., : self.rotations], diagonal(phase=phase[..., self.rotations :])

    def _frame(self, angle: Tensor, phase: Tensor | None, d: Tensor, rounded: torch.dtype | None = None) -> Tensor:
        """W in the precision of the angles; that of the Fourier pattern rounded on the way, if asked for."""
        n, p = self.shape[-2:]
        if self.layout == "fft":
            return butterfly(angle, d, phase, n=n, dtype=rounded)[..., :p]
        x = torch.eye(n, p, dtype=_field(angle.dtype, phase), device=angle.device)
        w = brickwall(x, angle, phase, layers=self.layers)
        return w * d.to(w.dtype).unsqueeze(-1)

    def _packed(
        self, angle: Tensor, turn: Tensor | None, d: Tensor, *, start: int
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Coordinates from those of a part of the mesh that begins at the given rotation, and the chart."""
        ends = (start, self.rotations - start - angle.shape[-1])
        angle = F.pad(angle, ends)
        if turn is None:
            return (angle,), {"signs": torch.where(d < 0, -1, 1).to(torch.int8)}
        return (angle, torch.cat([F.pad(turn, ends), d.angle()], dim=-1)), {}


def _field(dtype: torch.dtype, phase: Tensor | None) -> torch.dtype:
    """The dtype of frames whose parts are of the given one."""
    if phase is None:
        return dtype
    return torch.complex128 if dtype == torch.float64 else torch.complex64
