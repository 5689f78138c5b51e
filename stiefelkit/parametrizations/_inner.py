"""Maps inside maps: how a composite is told of them, how their coordinates are called in it, and maps around one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from stiefelkit.dtypes import computing_dtype
from stiefelkit.errors import OptionError
from stiefelkit.param import OrthogonalParam, Parametrization, Position
from stiefelkit.parametrizations import check_options, find_parametrization

__all__ = ["Composite", "Inner", "Wrapper", "prefixed", "within"]

T = TypeVar("T")


@dataclass(frozen=True)
class Inner:
    """A map inside another, by name or class and options, worked out in float32 or better."""

    parametrization: Parametrization
    options: Mapping[str, Any] | None = None

    @property
    def cls(self) -> type[OrthogonalParam]:
        return find_parametrization(self.parametrization)

    def flaw(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """What `supports` says of frames of this shape in weights of this dtype; checks the options."""
        check_options(self.cls, self.options or {})
        return self.cls.supports(shape, computing_dtype(dtype), **(self.options or {}))

    def build(self, outer: OrthogonalParam, shape: tuple[int, ...], device: Any, **defaults: Any) -> OrthogonalParam:
        """Makes the map; raises OptionError if its weights are no frames."""
        options = {**defaults, **(self.options or {})}
        inner = self.cls(shape, dtype=computing_dtype(outer.dtype), device=device, **options)
        if inner.precision == "exact" and not inner.traits.exact:
            raise OptionError(f"{outer.title} needs inner maps whose weights are frames, got {inner.title}.")
        return inner


def prefixed(**parts: Mapping[str, T]) -> dict[str, T]:
    """The entries of all parts, each under its part's name, a dot and its own."""
    return {f"{part}.{key}": value for part, held in parts.items() for key, value in held.items()}


def within(held: Mapping[str, T], part: str) -> dict[str, T]:
    """The entries of one part, under their own names."""
    return {key.removeprefix(f"{part}."): value for key, value in held.items() if key.startswith(f"{part}.")}


class Composite(OrthogonalParam):
    """A map of others, its children, which work in float32 or better whatever the dtype of the weight is."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Composite":
        super()._apply(fn, recurse)
        for child in self.children():
            child.dtype = computing_dtype(self.dtype)  # type: ignore[assignment]
        return self


def _of_inner(name: str) -> Any:
    return property(lambda self: getattr(self.inner, name), doc="That of the inner map.")


class Wrapper(OrthogonalParam):
    """Says of a map what the map inside says of itself, under its name; a wrapper adds how its weights differ.

    The shape is that of the weight, which need be no frame's.
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
