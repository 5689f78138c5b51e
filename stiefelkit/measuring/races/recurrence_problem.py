"""What every contender of a race of recurrences gets: a length, sizes, an input, and weights of one kind."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.contract.param import load_chart_
from stiefelkit.contract.protocols import structure_of
from stiefelkit.contract.table import find_parametrization
from stiefelkit.measuring.races.scan_cases import ScanCase
from stiefelkit.scan import Factored, find_activation

__all__ = ["Sequences"]


@dataclass
class Sequences:
    """One case with its tensors, the same for all contenders of equal width.

    Drawn: x normal; W a Haar frame, or what the case's map draws, then also in factors, `factored`; U Glorot-uniform;
    modReLU's bias U(-0.01, 0) for real states, as trained nets have it, and U(-0.01, 0.01), which is slower, for
    complex ones; other biases U(-0.01, 0.01); gradients normal with E |g|^2 = 1/n. h_0 is zero. x and h_0 want no
    gradient.

    Args:
        case: the sizes.
        activation: of the recurrence.
        dtype: float32 or float64; complex states are of the complex dtype that goes with it.
        device: where all lives.
        seed: fixes the draws.
    """

    case: ScanCase
    activation: str = "modrelu"
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    seed: int = 0

    def __post_init__(self) -> None:
        case = self.case
        n, parts = case.n, 1 + case.is_complex
        self.state_dtype = self.dtype.to_complex() if case.is_complex else self.dtype
        self._source = torch.Generator().manual_seed(self.seed)
        self._gradients: dict[tuple[int, torch.dtype], Tensor] = {}

        def uniform(*shape: int, low: float, high: float) -> Tensor:
            return torch.rand(*shape, dtype=torch.float64, generator=self._source) * (high - low) + low

        def of_states(drawn: Tensor) -> Tensor:
            return self._placed(torch.complex(*drawn.chunk(2)) if case.is_complex else drawn, self.state_dtype)

        self.factored: Factored | None = None
        if case.map:
            self.w = self._drawn_in_factors()
        else:
            frame = init.haar((n, n), torch.complex128 if case.is_complex else torch.float64, self._source)
            self.w = self._placed(frame, self.state_dtype)
        bound = (6 / (parts * n + case.m)) ** 0.5
        self.u = of_states(uniform(parts * n, case.m, low=-bound, high=bound))
        if find_activation(self.activation, case.is_complex).bias_inside:
            self.bias = self._placed(uniform(n, low=-0.01, high=0.01 if case.is_complex else 0.0), self.dtype)
        else:
            self.bias = of_states(uniform(parts * n, low=-0.01, high=0.01))
        self.x = self._normal(case.T, case.B, case.m, dtype=self.dtype)
        self.h0 = torch.zeros(case.B, n, dtype=self.state_dtype, device=self.device)

    def gradient(self, width: int, dtype: torch.dtype) -> Tensor:
        """Returns dL/dh at every step for states of some width, (T, B, width); the same tensor each time."""
        key = (width, dtype)
        if key not in self._gradients:
            self._gradients[key] = self._normal(self.case.T, self.case.B, width, dtype=dtype) * width**-0.5
        return self._gradients[key]

    def _drawn_in_factors(self) -> Tensor:
        """Draws W by the case's map, and keeps its factors."""
        case = self.case
        param = find_parametrization(case.map)((case.n, case.n), dtype=self.state_dtype, **case.map_options)
        coordinates, chart = param.initial(param.schemes[0], self._source)
        load_chart_(param, chart)
        coordinates = [c.to(self.dtype) for c in coordinates]
        structure = structure_of(param)
        assert structure is not None
        self.factored = Factored(structure, self._placed(param.factors(*coordinates), self.state_dtype))  # type: ignore[operator]
        return self._placed(param(*coordinates), self.state_dtype)

    def _normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return self._placed(torch.randn(*shape, dtype=dtype, generator=self._source), dtype)

    def _placed(self, drawn: Tensor, dtype: torch.dtype) -> Tensor:
        return drawn.to(self.device, dtype)
