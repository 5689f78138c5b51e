"""Maps inside maps: how a composite is told of them, and the names that their coordinates have in it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from stiefelkit.dtypes import computing_dtype
from stiefelkit.errors import OptionError
from stiefelkit.param import OrthogonalParam, Parametrization
from stiefelkit.parametrizations import check_options, find_parametrization

__all__ = ["Inner", "prefixed", "within"]

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
