"""A map that hands on what another gives, changed on the way out and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stiefelkit.param import OrthogonalParam, Traits

__all__ = ["Wrapper"]


class Wrapper(OrthogonalParam):
    """Says of a map what the map inside says of itself, under its name; a member adds how its weights differ.

    Args:
        inner: the map inside.
        shape: of the weight, which need be no frame's.
    """

    def __init__(self, inner: OrthogonalParam, shape: tuple[int, ...]):
        torch.nn.Module.__init__(self)
        self.shape, self.dtype, self.precision = shape, inner.dtype, inner.precision
        self.inner = inner

    @property
    def title(self) -> str:
        """That of the inner map."""
        return self.inner.title

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """None: the laws run on the inner maps."""
        return []

    @property
    def traits(self) -> Traits:
        """Those of the inner map."""
        return self.inner.traits

    @property
    def schemes(self) -> tuple[str, ...]:
        """Those of the inner map."""
        return self.inner.schemes

    @property
    def takes_nearest(self) -> bool:
        """As the inner map."""
        return self.inner.takes_nearest

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """Those of the inner map."""
        return self.inner.coordinates

    @property
    def manifolds(self) -> dict[str, str]:
        """Those of the inner map."""
        return self.inner.manifolds

    @property
    def chart(self) -> dict[str, Tensor]:
        """That of the inner map."""
        return self.inner.chart

    def check_chart(self, chart: Mapping[str, Tensor]) -> str | None:
        """Asks the inner map."""
        return self.inner.check_chart(chart)

    def initial(
        self, scheme: str, generator: torch.Generator | None = None
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Draws as the inner map does."""
        return self.inner.initial(scheme, generator)

    def error_bound(self, *coordinates: Tensor) -> float:
        """That of the inner map."""
        return self.inner.error_bound(*coordinates)

    @property
    def return_bound(self) -> float:
        """That of the inner map."""
        return self.inner.return_bound
