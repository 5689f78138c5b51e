"""A map that hands on what another gives, changed on the way out and back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stiefelkit.param import OrthogonalParam, Position

__all__ = ["Wrapper"]


def _of_inner(name: str) -> Any:
    return property(lambda self: getattr(self.inner, name), doc="That of the inner map.")


class Wrapper(OrthogonalParam):
    """Says of a map what the map inside says of itself, under its name; a wrapper adds how its weights differ.

    Args:
        inner: the map inside.
        shape: of the weight, which need be no frame's.
    """

    title = _of_inner("title")
    traits = _of_inner("traits")
    schemes = _of_inner("schemes")
    takes_nearest = _of_inner("takes_nearest")
    coordinates = _of_inner("coordinates")
    manifolds = _of_inner("manifolds")
    chart = _of_inner("chart")
    return_bound = _of_inner("return_bound")

    def __init__(self, inner: OrthogonalParam, shape: tuple[int, ...]):
        torch.nn.Module.__init__(self)
        self.shape, self.dtype, self.precision = shape, inner.dtype, inner.precision
        self.inner = inner

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """None: the laws run on the inner maps."""
        return []

    def check_chart(self, chart: Mapping[str, Tensor]) -> str | None:
        return self.inner.check_chart(chart)

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        return self.inner.initial(scheme, generator)

    def error_bound(self, *coordinates: Tensor) -> float:
        return self.inner.error_bound(*coordinates)
