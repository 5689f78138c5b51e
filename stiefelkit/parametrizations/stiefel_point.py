"""The frame itself as coordinate."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.contract.param import OrthogonalParam, Position, Traits, load_chart_
from stiefelkit.init import device_of
from stiefelkit.parametrizations.fourier import Fourier
from stiefelkit.tensors import working_dtype

_RESTRICTED = "restricted"


class StiefelPoint(OrthogonalParam):
    r""":math:`W = S`, the coordinate `stiefel`, a point of the Stiefel manifold, along which an optimizer moves it.

    The coordinate is the frame, real or complex: the only one that is not packed and, for complex weights, not real
    (complex64, or complex128 for complex128 weights). A half-precision weight is a float32 frame, rounded. The map does
    nothing to keep the frame orthonormal, which is the optimizer's part.

    Image: every frame. Cost: a copy; a step of the optimizer takes a few products. Not for optimizers that do not move
    along the manifold (torch's own, which are refused at their first step), nor for averages of weights, which are no
    frames; any other parametrization takes those.

    Besides the schemes of `stiefelkit.init`, square complex frames have "restricted": a draw of the
    restricted-capacity map `fourier`, from which the full-capacity nets of Wisdom et al. start.

    Args:
        shape, dtype, device: of the frame, (*, n, p), real or complex; no device, as the map has no chart.
        precision: "exact": the frame, rounded once to the weight's dtype.

    References:
        Edelman, Arias, Smith, The geometry of algorithms with orthogonality constraints, SIAM J. Matrix Anal. Appl. 20,
        1998; Wisdom, Powers, Hershey, Le Roux, Atlas, Full-capacity unitary recurrent neural networks, NeurIPS 2016.

    >>> map = StiefelPoint((2, 1), dtype=torch.float32)
    >>> map(torch.tensor([[0.6], [0.8]]))
    tensor([[0.6000],
            [0.8000]])
    """

    coordinate_names: ClassVar[tuple[str, ...]] = ("stiefel",)
    stacks: ClassVar[bool] = True

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        return [(shape, {}) for shape in ((1, 1), (6, 6), (7, 3), (4, 1), (2, 3, 5, 4), (3, 4, 4))]

    @property
    def traits(self) -> Traits:
        *_, n, p = self.shape
        reached = "connected" if self.is_complex or n > p else "coordinates"
        return Traits(onto=True, invertible=True, exact=True, component=reached, cost_exponent=2.0)

    @property
    def schemes(self) -> tuple[str, ...]:
        restricted = Fourier.supports(self.shape, self.dtype) is None
        return (*super().schemes, _RESTRICTED) if restricted else super().schemes

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        return {"stiefel": self.shape}

    @property
    def manifolds(self) -> dict[str, str]:
        """`stiefel`, by default with the canonical metric; a parameter group may name the Euclidean one."""
        return {"stiefel": "stiefel:canonical"}

    def forward(self, stiefel: Tensor) -> Tensor:
        """Rounds frames of shape (*, n, p) to the weight's dtype; never the coordinate's own memory."""
        # A copy: FSDP2 frees the coordinate's memory after forward, and in-place operations must not reach the frame.
        w = stiefel.to(self.dtype, copy=True)
        # The view's gradient is no lazy conjugate, which foreach does not take, as that of a W.mH would be.
        return torch.view_as_complex(torch.view_as_real(w)) if w.is_complex() else w

    def invert(self, w: Tensor) -> Position:
        return (w,), {}

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        if scheme != _RESTRICTED:
            return super().initial(scheme, generator)
        map = Fourier(self.shape, dtype=working_dtype(self.dtype), device=device_of(generator))
        coordinates, chart = map.initial(map.schemes[0], generator)
        load_chart_(map, chart)
        return (map(*coordinates),), {}
