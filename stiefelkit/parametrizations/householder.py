"""Products of Householder reflectors, real and complex."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.contract.param import OrthogonalParam, Position, Traits, rows_of
from stiefelkit.errors import ImageError
from stiefelkit.functional import (
    diagonal,
    householder,
    householder_inverse,
    householder_linear,
    pack_trapezoid,
    trapezoid_size,
    unpack_trapezoid,
)
from stiefelkit.init import gaussian, symmetric
from stiefelkit.metrics import rounding_limit
from stiefelkit.numbers import integer, optional
from stiefelkit.parametrizations._charts import check_signs, component, diagonal_coordinates
from stiefelkit.tensors import coordinate_dtype, dtype_of_parts


class Householder(OrthogonalParam):
    r"""First p columns of a product of reflectors, :math:`H_1 H_2 ... H_k D`.

    A reflector is :math:`H_j = I - 2 u_j u_j^H / |u_j|^2`, with :math:`u_j` zero above row j. Real frames: D is a fixed
    diagonal of signs, the chart `signs`. Complex frames: :math:`D = diag(e^{i θ})` is trained too, the coordinate
    `phase`. `stiefelkit.functional.unpack_trapezoid` has the order of the coordinate `reflectors`; the scale of a
    reflector does not count, and a zero one is the identity.

    Image: every frame if :math:`k = p`, the default, by the choice of D; a subset for fewer reflectors, which then
    refuse about one real frame of the image in four, rounded to float32, when it is assigned. With D fixed, a square
    real W has :math:`det W = (-1)^k det D` as long as no reflector is zero. Not for weights that must cross from one
    component of :math:`O(n)` to the other.

    Cost: :math:`O(npk)`, in panels of compact WY; for :math:`n = p = k` some 5 to 8 products of n x n matrices with the
    backward. `linear` does not form W where that pays: :math:`O(nk)` a vector.

    Args:
        shape, dtype, device: of the frame, (*, n, p), real or complex, and where the signs live.
        precision: "exact": the frame in float64, rounded once, the gradient in the frame's dtype. "fast": float32 and
            complex64 frames are computed in their dtype, within 32 (1 + min(k, 128)) limits, which equal reflectors
            come near to; random ones stay within about 30. It saves a quarter of the time.
        reflections: how many reflectors, 1 to p; p when None.

    References:
        Mhammedi, Hellicar, Rahman, Bailey, Efficient orthogonal parametrisation of recurrent neural networks using
        Householder reflections, ICML 2017; its last reflection of a single entry is a sign of D here.
        Yuan, Liu, Xu, Bridging the gap between low-rank and orthogonal adaptation via Householder reflection
        adaptation, NeurIPS 2024: "paired".
        Joffrain, Low, Quintana-Orti, van de Geijn, Van Zee, Accumulating Householder transformations, revisited, 2006.

    >>> map = Householder((3, 3), dtype=torch.float32, reflections=1)
    >>> map(torch.tensor([2.0, 0.0, 0.0]))
    tensor([[-1.,  0.,  0.],
            [ 0.,  1.,  0.],
            [ 0.,  0.,  1.]])
    """

    coordinate_names: ClassVar[tuple[str, ...]] = ("reflectors", "phase")
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
        reflections: int | None = None,
    ):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        p = self.shape[-1]
        reflections = optional(integer(1, p, "p")).require("Householder", "reflections", reflections)
        self.reflections: int = p if reflections is None else reflections
        if not self.is_complex:
            self.register_buffer("signs", torch.ones(*self.shape[:-2], p, dtype=torch.int8, device=device))

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        shapes = [(1, 1), (2, 2), (7, 7), (16, 16), (9, 4), (5, 1), (2, 3, 6, 6), (3, 8, 2), (67, 66)]
        truncated = [((6, 6), 1), ((8, 8), 3), ((9, 5), 2), ((2, 7, 4), 3), ((72, 12), 2)]
        fast = [((7, 7), {}), ((9, 5), {"reflections": 2}), ((2, 3, 6, 6), {})]
        return [
            *((shape, {}) for shape in shapes),
            *((shape, {"reflections": k}) for shape, k in truncated),
            *((shape, options | {"precision": "fast"}) for shape, options in fast),
        ]

    @property
    def traits(self) -> Traits:
        full = self.reflections == self.shape[-1]
        return Traits(
            onto=full,
            invertible=full or not self.is_complex,
            exact=self.precision == "exact",
            component=component(self.shape, self.is_complex),
        )

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        *batch, n, p = self.shape
        size = trapezoid_size(n, self.reflections, self.is_complex)
        return {"reflectors": (*batch, size)} | ({"phase": (*batch, p)} if self.is_complex else {})

    @property
    def schemes(self) -> tuple[str, ...]:
        return (*super().schemes, "mhammedi", *(["paired"] if self.reflections % 2 == 0 else []))

    def options(self) -> dict[str, Any]:
        return {"reflections": self.reflections}

    def forward(self, reflectors: Tensor, phase: Tensor | None = None) -> Tensor:
        n, p = self.shape[-2:]
        dtype = self.dtype if self.is_complex else coordinate_dtype(self.dtype)
        return householder(reflectors, n, self.reflections, p, dtype=dtype, **self._diagonal(phase)).to(self.dtype)

    def linear(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        (*batch, n, p), k = self.shape, self.reflections
        rows = rows_of(x)
        double = self.dtype in (torch.float64, torch.complex128)
        # Measured, forward and backward. Float64 has nothing finer to hide the rounding of several panels in.
        cheaper = n > 64 and rows * (10 * k - 3 * p) <= 6 * k * p and not (double and k > 128)
        if batch or not cheaper or not rows or x.dtype != self.dtype:
            return super().linear(x, *coordinates)
        reflectors, *phase = coordinates
        x = x if self.is_complex else x.to(coordinate_dtype(self.dtype))
        return householder_linear(x, reflectors, n, k, **self._diagonal(*phase)).to(self.dtype)

    @property
    def structure(self) -> str | None:
        """A diagonal and a matrix of rank k."""
        return "low_rank" if len(self.shape) == 2 and self.shape[0] == self.shape[1] else None

    def factors(self, reflectors: Tensor, phase: Tensor | None = None) -> Tensor:
        """Returns D, A and B of :math:`W = D + A B^H = (I - U T^{-1} U^H) D`.

        Here :math:`|u_j|^2 = 2` and :math:`T = I + striu(U^H U)`.
        """
        d = diagonal(phase=phase) if self.is_complex else diagonal(signs=self.signs)
        u = unpack_trapezoid(reflectors.double(), self.shape[-1], self.reflections, self.is_complex)
        largest = u.detach().abs().amax(-2)
        u = u / torch.where(largest == 0, torch.inf, largest)
        square = (u.real.square() + u.imag.square() if self.is_complex else u.square()).sum(-2)
        u = u * (2 / torch.where(square == 0, 1.0, square)).sqrt()
        a = -torch.linalg.solve_triangular(u.mH @ u, u, upper=True, left=False, unitriangular=True)
        b = d.conj().unsqueeze(-1) * u
        return torch.cat([d.unsqueeze(0), a.mT, b.mT]).to(self.dtype)

    def prefers_factors(self, rows: int) -> bool:
        """Returns whether n (n - 2 k) is above the measured point where reflectors and a product cost the same."""
        n = self.shape[-1]
        return n * (n - 2 * self.reflections) >= 14_000 + (24_000 if self.is_complex else 36_000) / max(rows, 1)

    def error_bound(self, *coordinates: Tensor) -> float:
        bound = super().error_bound(*coordinates)
        if self.precision == "exact" or self.dtype in (torch.float64, torch.complex128):
            return bound
        return bound + 32 * (1 + min(self.reflections, 128)) * rounding_limit(self.shape[-1], torch.float32)

    def _diagonal(self, phase: Tensor | None = None) -> dict[str, Any]:
        signs = None if self.is_complex else self.signs
        return {"signs": signs, "phase": phase, "precision": self.precision}

    def invert(self, w: Tensor) -> Position:
        """Reduces W to its diagonal D, reflector by reflector; see `stiefelkit.functional.householder_inverse`.

        With fewer reflectors than columns not every D fits: it tries the stable choice, then for real frames the
        chart's and all ones, and takes the first that comes back as near as `right_inverse` promises. Complex frames
        have the stable one alone, which reaches a part of the image; others raise ImageError.
        """
        tried: list[Tensor | None] = [None]
        if not (self.is_complex or self.traits.onto):
            tried += [self.signs.to(w.device), torch.ones_like(w[..., 0, :])]
        for signs in tried:
            v, d, _ = householder_inverse(w, self.reflections, signs)
            if self.traits.onto or self._comes_back(w, v, d):
                phases, chart = diagonal_coordinates(d)
                return (v, *phases), chart
        requirement = f"a frame that {self.reflections} reflections reduce to a diagonal"
        raise ImageError(f"Householder needs {requirement}, got another; any fits reflections={self.shape[-1]}.")

    def _comes_back(self, w: Tensor, v: Tensor, d: Tensor) -> bool:
        (n, p), k = self.shape[-2:], self.reflections
        real = coordinate_dtype(self.dtype)
        signs, phase = (None, d.angle().to(real)) if self.is_complex else (d.sign(), None)
        dtype = dtype_of_parts(real, self.is_complex)
        back = householder(v.to(real), n, k, p, dtype=dtype, signs=signs, phase=phase).to(self.dtype)
        return bool((torch.linalg.matrix_norm(back.to(w.dtype) - w) <= self.return_bound).all())

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws a frame, or the reflectors themselves.

        "haar" with fewer reflectors than columns: reflectors uniform on their spheres. "mhammedi", of oRNN: the same
        for any number of reflectors, of unit length; :math:`D = I`, but a random last sign where the last reflector
        has a single entry; phases uniform on :math:`(-π, π)`. "paired", of Householder reflection adaptation: uniform
        ones, each twice, so that the frame is the identity and gradients reach beyond the first k axes; :math:`D = I`.
        """
        if scheme == "paired":
            return self._paired(generator)
        if scheme != "mhammedi" and (scheme != "haar" or self.traits.onto):
            return super().initial(scheme, generator)
        (*batch, n, p), k = self.shape, self.reflections
        drawn = [gaussian(shape, generator) for shape in self.coordinates.values()]
        signs = torch.ones(*batch, p, dtype=torch.int8, device=drawn[0].device)
        if scheme == "mhammedi":
            u = unpack_trapezoid(drawn[0], n, k, self.is_complex)
            u = u / torch.linalg.vector_norm(u, dim=-2, keepdim=True)
            drawn[0] = pack_trapezoid(u)
            if self.is_complex:
                drawn[1] = symmetric(drawn[1].shape, math.pi, generator)
            elif k == n:
                # The reflector of a single entry is -1; the paper's last factor is the entry itself.
                signs[..., -1] = -u[..., -1, -1].to(torch.int8)
        return tuple(drawn), {} if self.is_complex else {"signs": signs}

    def _paired(self, generator: torch.Generator | None) -> Position:
        """Draws reflectors 1 and 2 alike, 3 and 4, ...; the first of a pair is zero where the second has no entry."""
        (*batch, n, p), k = self.shape, self.reflections
        u = unpack_trapezoid(gaussian(self.coordinates["reflectors"], generator), n, k, self.is_complex)
        u[..., 0::2] = u[..., 1::2]
        reflectors = pack_trapezoid(u)
        if not self.is_complex:
            return (reflectors,), {"signs": torch.ones(*batch, p, dtype=torch.int8, device=u.device)}
        phase = torch.zeros(self.coordinates["phase"], dtype=reflectors.dtype, device=reflectors.device)
        return (reflectors, phase), {}
