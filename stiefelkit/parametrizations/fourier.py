"""The restricted-capacity unitary map: phases, reflections, a permutation and Fourier transforms."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.contract.param import OrthogonalParam, Position, Traits, rows_of
from stiefelkit.errors import DtypeError, needs
from stiefelkit.functional import diagonal, polish
from stiefelkit.functional._packing import complex_of
from stiefelkit.init import device_of, symmetric
from stiefelkit.tensors import Device


class Fourier(OrthogonalParam):
    r""":math:`W = D_3 R_2 F^{-1} D_2 P R_1 F D_1`, unitary, with 7n real coordinates.

    :math:`D = diag(e^{i θ})`, F the unitary Fourier transform, :math:`R = I - 2 v v^H / |v|^2` a complex reflector, P a
    fixed permutation, :math:`P x = x[permutation]`, the chart `permutation`. The coordinate `phase` holds the three θ,
    one row each, `reflectors` the two v as [Re | Im], of any scale; a zero one is the identity.

    Image: a subset of U(n) of dimension at most 7n, without a right inverse: weights are drawn, not assigned. Cost:
    :math:`O(n^2 log n)` for W, :math:`O(n log n)` a vector for `linear`, which never forms W. Not for weights that must
    reach every unitary matrix.

    Args:
        shape, dtype, device: of the frame, (*, n, n), complex, and where the permutation lives.
        precision: "exact": everything in complex128, one rounding at the end.

    References:
        Arjovsky, Shah, Bengio, Unitary evolution recurrent neural networks, ICML 2016, equation 6; reflections as they
        act on columns in the code of Wisdom et al. 2016, where v may be its conjugate.

    >>> map = Fourier((4, 4), dtype=torch.complex64)
    >>> map(torch.zeros(3, 4), torch.zeros(2, 8)).real.round().abs()
    tensor([[1., 0., 0., 0.],
            [0., 1., 0., 0.],
            [0., 0., 1., 0.],
            [0., 0., 0., 1.]])
    """

    coordinate_names: ClassVar[tuple[str, ...]] = ("phase", "reflectors")
    stacks: ClassVar[bool] = True
    schemes = property(lambda self: ("arjovsky",))
    traits = property(lambda self: Traits(False, False, True, "connected", cost_exponent=2.0))

    permutation: Tensor

    def __init__(
        self, shape: Sequence[int], *, dtype: torch.dtype | None = None, device: Device = None, precision: str = "exact"
    ):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        reason = self.supports(self.shape, self.dtype)
        needs(reason is None, DtypeError, "Fourier", str(reason), f"shape {self.shape} and {self.dtype}")
        *batch, n, _ = self.shape
        self.register_buffer("permutation", torch.arange(n, device=device).expand(*batch, n).clone())

    @classmethod
    def supports(cls, shape: Sequence[int], dtype: torch.dtype, **options: object) -> str | None:
        if not dtype.is_complex:
            return "a complex weight"
        return None if shape[-1] == shape[-2] else "a square weight"

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        return [(shape, {}) for shape in ((1, 1), (2, 2), (7, 7), (16, 16), (2, 3, 5, 5))]

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        *batch, n, _ = self.shape
        return {"phase": (*batch, 3, n), "reflectors": (*batch, 2, 2 * n)}

    def check_chart(self, chart: Mapping[str, Tensor]) -> str | None:
        ordered = chart["permutation"].long().sort(dim=-1)[0].cpu()
        fits = torch.equal(ordered, torch.arange(self.shape[-1], device="cpu").expand_as(ordered))
        return None if fits else f"a permutation of {self.shape[-1]} entries"

    def forward(self, phase: Tensor, reflectors: Tensor) -> Tensor:
        eye = torch.eye(self.shape[-1], dtype=torch.complex128, device=phase.device)
        w = self._apply_rows(eye, phase, reflectors).mT
        return polish(w) if self.dtype == torch.complex128 else w.to(self.dtype)

    def linear(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        if len(self.shape) > 2 or x.dtype != self.dtype or x.dim() < 2 or not rows_of(x):
            return super().linear(x, *coordinates)
        return self._apply_rows(x.to(torch.complex128), *coordinates).to(self.dtype)

    @property
    def structure(self) -> str | None:
        """Transforms and diagonals, with the reflectors as a matrix of rank two."""
        return "fourier" if len(self.shape) == 2 and self.shape[0] > 1 else None

    def factors(self, phase: Tensor, reflectors: Tensor) -> Tensor:
        """Returns :math:`D_1, D_2, D_3`, P, A and B of :math:`W = D_3 F^{-1} D_2 P F D_1 + A B^H`."""
        # W = D3 (I - v2 v2^H) M2 (I - v1 v1^H) M1 with M1 = F D1, M2 = F^-1 D2 P.
        d1, d2, d3 = diagonal(phase=phase).unbind(-2)
        v1, v2 = (_unit(packed) * 2**0.5 for packed in reflectors.double().unbind(-2))
        order, back = self.permutation, self.permutation.argsort()
        c = torch.fft.ifft(d2 * v1[order], norm="ortho")
        b1 = d1.conj() * torch.fft.ifft(v1, norm="ortho")
        b2 = d1.conj() * torch.fft.ifft((d2.conj() * torch.fft.fft(v2, norm="ortho"))[back], norm="ortho")
        a1 = d3 * (v2 * (v2.conj() * c).sum() - c)
        rows = [d1, d2, d3, order.to(d1.dtype), a1, -d3 * v2, b1, b2]
        return torch.stack(rows).to(self.dtype)

    def prefers_factors(self, rows: int) -> bool:
        """Returns True from n = 384 on: measured are 2.8 times at n = 512, 0.9 to 1.35 times at 256."""
        return self.shape[-1] >= 384

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws as Arjovsky et al. do: phases :math:`U(-π, π)`, reflectors :math:`U(-b, b)`, P uniform.

        The bound is :math:`b = (6 / (2 + 2n))^{1/2}`.
        """
        *batch, n, _ = self.shape
        phase, reflectors = self.coordinates.values()
        bounds = ((phase, math.pi), (reflectors, math.sqrt(6 / (2 + 2 * n))))
        drawn = tuple(symmetric(shape, bound, generator) for shape, bound in bounds)
        order = torch.rand(*batch, n, dtype=torch.float32, device=device_of(generator), generator=generator)
        return drawn, {"permutation": order.argsort(-1)}

    def _apply_rows(self, x: Tensor, phase: Tensor, reflectors: Tensor) -> Tensor:
        """Maps each row x to (W x)^T."""
        d1, d2, d3 = (d.unsqueeze(-2) for d in diagonal(phase=phase).unbind(-2))
        r1, r2 = reflectors.double().unbind(-2)
        x = _reflect(torch.fft.fft(x * d1, norm="ortho"), r1)
        order = self.permutation.unsqueeze(-2)
        x = torch.take_along_dim(x, order.expand(*x.shape[:-1], -1), -1) * d2
        return _reflect(torch.fft.ifft(x, norm="ortho"), r2) * d3


def _unit(packed: Tensor) -> Tensor:
    """Returns the unit vector along Re + i Im of [Re | Im]; zero for zero."""
    v, square = _scaled(packed)
    return v / square.sqrt()


def _reflect(x: Tensor, packed: Tensor) -> Tensor:
    """Returns rows x - 2 v (v^H x) / |v|^2, with v = Re + i Im from [Re | Im], of any scale."""
    v, square = (t.unsqueeze(-2) for t in _scaled(packed))
    inner = (x * v.conj()).sum(-1, keepdim=True)
    return x - v * (2 * inner / square)


def _scaled(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns Re + i Im of [Re | Im] in units of the largest entry, and its squared length, 1 for zero."""
    largest = packed.detach().abs().amax(-1, keepdim=True)
    scaled = packed / torch.where(largest == 0, torch.inf, largest)
    square = scaled.square().sum(-1, keepdim=True)
    return complex_of(*scaled.chunk(2, -1)), torch.where(square == 0, 1.0, square)
