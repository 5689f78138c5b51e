"""The matrix exponential, real and complex."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.contract.param import OrthogonalParam, Position, Traits
from stiefelkit.errors import ImageError
from stiefelkit.functional import matrix_exp, nearest_frame, pack_skew, skew_logarithm, skew_size, tall_logarithm
from stiefelkit.init import device_of, gaussian
from stiefelkit.metrics import frame_tolerance, orthogonality_error, rounding_limit
from stiefelkit.parametrizations._charts import check_matrix, component, from_buffer, identity_buffer, to_buffer
from stiefelkit.tensors import Device, coarser, coordinate_dtype, working_dtype


class MatrixExp(OrthogonalParam):
    r"""Matrix exponential :math:`W = exp(A)` of a skew A.

    Tall frames are :math:`W = exp(A) [I; 0] R` with :math:`A = [[A_{11}, -A_{21}^H], [A_{21}, 0]]` and a fixed
    orthogonal or unitary R (p x p), the chart `rotation`, chosen when a frame is assigned; for n > 2p :math:`exp(A)`
    itself is never formed, and frames are exact for coordinates up to about 1e5, of float64 1e8.

    `stiefelkit.functional.unpack_skew` has the order of the coordinate `skew`. For square complex frames it holds the
    coefficients of Hyland and Ratsch's basis of the Lie algebra, row by row: E_ij - E_ji for i > j, i E_ii, and
    i (E_ij + E_ji) for i < j.

    Image: :math:`SO(n)` or :math:`U(n)`, all tall frames. Cost: with :math:`s = log_2(‖A‖_2 / 2)` squarings,
    :math:`4 + s` products and :math:`7 + 2s` more backward, n x n or 2p x 2p. Not for square real weights with
    determinant -1.

    Args:
        shape, dtype, device: of the frame, (*, n, p), real or complex, and where the rotation lives.
        precision: "exact", or "fast": float32 frames with :math:`n ≤ 2p` may be up to 100 rounding limits off, and take
            0.7 to 0.85 of the time.

    References:
        Hyland, Ratsch, Learning unitary operators with help from u(n), AAAI 2017.
        Lezcano-Casado, Martinez-Rubio, Cheap orthogonal constraints in neural networks, ICML 2019.
        Bader, Blanes, Casas, Computing the matrix exponential with an optimized Taylor polynomial approximation, 2019.

    >>> map = MatrixExp((2, 2), dtype=torch.float32)
    >>> (map(torch.tensor([torch.pi / 2])) * 100).round().abs()
    tensor([[  0., 100.],
            [100.,   0.]])
    """

    precisions: ClassVar[tuple[str, ...]] = ("exact", "fast")
    coordinate_names: ClassVar[tuple[str, ...]] = ("skew",)
    frame_buffers: ClassVar[tuple[str, ...]] = ("rotation",)
    stacks: ClassVar[bool] = True
    check_chart = check_matrix

    rotation: Tensor

    def __init__(
        self, shape: Sequence[int], *, dtype: torch.dtype | None = None, device: Device = None, precision: str = "exact"
    ):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        *batch, n, p = self.shape
        if n > p:
            self.register_buffer("rotation", identity_buffer(tuple(batch), p, self.dtype, device))

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        shapes = [(1, 1), (2, 2), (7, 7), (16, 16), (9, 4), (7, 5), (5, 1), (2, 3, 6, 6), (3, 8, 2)]
        fast = [((16, 16), {"precision": "fast"}), ((2, 7, 5), {"precision": "fast"})]
        return [*((shape, {}) for shape in shapes), *fast]

    @property
    def traits(self) -> Traits:
        square = component(self.shape, self.is_complex) == "chart"
        reached = "rotations" if square else "connected"
        return Traits(onto=not square, invertible=True, exact=not self._is_fast, component=reached)

    @property
    def _is_fast(self) -> bool:
        n, p = self.shape[-2:]
        return self.precision == "fast" and n <= 2 * p and coordinate_dtype(self.dtype) == torch.float32

    def error_bound(self, *coordinates: Tensor) -> float:
        fast = 100 * rounding_limit(self.shape[-1], torch.float32) if self._is_fast else 0.0
        return max(super().error_bound(), fast)

    @property
    def schemes(self) -> tuple[str, ...]:
        return (*super().schemes, "gaussian")

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        *batch, n, p = self.shape
        return {"skew": (*batch, skew_size(n, p, self.is_complex))}

    def forward(self, skew: Tensor) -> Tensor:
        n, p = self.shape[-2:]
        rotation = None if n == p else from_buffer(self.rotation, self.is_complex)
        return matrix_exp(skew, n, p, self.is_complex, precision=self.precision, rotation=rotation).to(self.dtype)

    def invert(self, w: Tensor) -> Position:
        n, p = self.shape[-2:]
        if n > p:
            a21, rotation = tall_logarithm(w)
            return (pack_skew(torch.zeros_like(rotation), a21),), {"rotation": to_buffer(rotation)}
        a, exists = skew_logarithm(w)
        if not exists.all():
            raise ImageError(
                'MatrixExp needs determinant 1 for square real frames, got -1; "cayley" takes both, and so does '
                '"rebased" with inner="matrix_exp".'
            )
        return (pack_skew(a),), {}

    def nearest(self, weight: Tensor) -> Tensor:
        """Returns the nearest frame; where that is a reflection, out of reach, the nearest rotation."""
        q = nearest_frame(weight.to(working_dtype(self.dtype)))
        if self.traits.onto:
            return q
        tolerance = frame_tolerance(self.shape[-1], coarser(weight.dtype, torch.float32))
        turned = (torch.linalg.det(q) < 0) & (orthogonality_error(weight) > tolerance)
        if turned.any():
            u, _, vh = torch.linalg.svd(weight.to(q.dtype))
            u[..., -1] *= torch.linalg.det(u @ vh).sign()[..., None]
            q = torch.where(turned[..., None, None], u @ vh, q)
        return q

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws a frame; square real ones from the rotations (for "haar" by their own uniform measure).

        "gaussian" draws coordinates from N(0, 1), as Hyland and Ratsch do.
        """
        if scheme == "gaussian":
            (shape,), (*batch, n, p) = self.coordinates.values(), self.shape
            eye = identity_buffer(tuple(batch), p, self.dtype, device_of(generator))
            return (gaussian(shape, generator),), {"rotation": eye} if n > p else {}
        w = init.draw(scheme, self.shape, working_dtype(self.dtype), generator)
        if not self.traits.onto:
            w[..., -1] *= torch.linalg.det(w).sign()[..., None]
        return self.invert(w)
