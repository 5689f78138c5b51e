"""Maps inside maps: how a composite is told of them, how their coordinates are called in it; maps around or in rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from stiefelkit.contract.param import OrthogonalParam, Parametrization, Position, Traits, check_tensor
from stiefelkit.contract.table import check_options, find_parametrization
from stiefelkit.errors import DtypeError, OptionError, needs
from stiefelkit.tensors import computing_dtype

T = TypeVar("T")


@dataclass(frozen=True)
class Inner:
    """A map inside another, by name or class and options, worked out in float32 or better."""

    parametrization: Parametrization
    options: Mapping[str, Any] | None = None

    @property
    def cls(self) -> type[OrthogonalParam]:
        """Returns the class of the inner map."""
        return find_parametrization(self.parametrization)

    def flaw(self, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
        """Returns what `supports` says of frames of this shape in weights of this dtype; checks the options."""
        options = {} if self.options is None else self.options
        check_options(self.cls, options)
        return self.cls.supports(shape, computing_dtype(dtype), **options)

    def build(self, outer: OrthogonalParam, shape: tuple[int, ...], device: Any) -> OrthogonalParam:
        """Makes the map; raises DtypeError if it does no such frames, and OptionError if its weights are no frames."""
        reason = self.flaw(shape, outer.dtype)
        needs(reason is None, DtypeError, self.cls.__name__, str(reason), f"frames of {shape} and {outer.dtype}")
        options = {"precision": outer.precision if outer.precision in self.cls.precisions else "exact"}
        options |= self.options or {}
        inner = self.cls(shape, dtype=computing_dtype(outer.dtype), device=device, **options)
        if inner.precision == "exact" and not inner.traits.exact:
            raise OptionError(f"{outer.title} needs inner maps whose weights are frames, got {inner.title}.")
        return inner


def prefixed(**parts: Mapping[str, T]) -> dict[str, T]:
    """Returns the entries of all parts, each under its part's name, a dot and its own."""
    return {f"{part}.{key}": value for part, held in parts.items() for key, value in held.items()}


def within(held: Mapping[str, T], part: str) -> dict[str, T]:
    """Returns the entries of one part, under their own names."""
    return {key.removeprefix(f"{part}."): value for key, value in held.items() if key.startswith(f"{part}.")}


class Parts(OrthogonalParam):
    """A map of others, its children, whose coordinates and charts it has under prefixed names, "part.skew"."""

    coordinates = property(lambda self: self._of_parts("coordinates"), doc="Those of all parts.")
    manifolds = property(lambda self: self._of_parts("manifolds"), doc="Those of all parts.")

    def check_chart(self, chart: Mapping[str, Tensor]) -> str | None:
        flaws = (part.check_chart(within(chart, name)) for name, part in self._named())
        return next((flaw for flaw in flaws if flaw is not None), None)

    def _of_parts(self, kind: str) -> dict[str, Any]:
        return prefixed(**{name: getattr(part, kind) for name, part in self._named()})

    def _joined(self, positions: Iterable[Position]) -> Position:
        """Returns the position of all parts, from that of each in order."""
        each, charts = zip(*positions, strict=True)
        named = dict(zip((name for name, _ in self._named()), charts, strict=True))
        return tuple(c for own in each for c in own), prefixed(**named)

    def _named(self) -> Iterator[tuple[str, Any]]:
        return self.named_children()


class Composite(Parts):
    """A map whose parts work in float32 or better, whatever the dtype of the weight is."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Composite":
        super()._apply(fn, recurse)
        for child in self.children():
            child.dtype = computing_dtype(self.dtype)  # type: ignore[assignment]
        return self


made_elsewhere: Any = classmethod(lambda cls: [])
"""The `examples` of a map that is not made by itself: none, and the laws run on the maps inside."""


def of_inner(name: str) -> Any:
    """Returns the property of a map that is the same as the inner map's."""
    return property(lambda self: getattr(self.inner, name), doc="That of the inner map.")


class Wrapper(OrthogonalParam):
    """A map around another one, whose properties it has; a wrapper adds how its weights differ.

    The shape is that of the weight, which need be no frame's.
    """

    title = property(lambda self: self.inner.title)
    traits = of_inner("traits")
    schemes = of_inner("schemes")
    takes_nearest = property(lambda self: self.inner.takes_nearest)
    coordinates = of_inner("coordinates")
    manifolds = of_inner("manifolds")
    chart = of_inner("chart")
    return_bound = property(lambda self: self.inner.return_bound)
    examples = made_elsewhere
    check_chart = of_inner("check_chart")
    initial = of_inner("initial")
    error_bound = of_inner("error_bound")

    def __init__(self, inner: OrthogonalParam, shape: tuple[int, ...]):
        torch.nn.Module.__init__(self)
        self.shape, self.dtype, self.precision = shape, inner.dtype, inner.precision
        self.inner = inner


class SideBySide(Parts):
    """A weight of parts side by side, runs of blocks of one size, along `axis`, which is counted from the last.

    `blocks` and `dim` are what `sk.orthogonal` was given, and stand in checkpoints. Part j has coordinates and chart of
    its own map under the names "j.skew"; `frames` and `bare` give a tuple.
    """

    coordinate_names = ("*",)
    stacks = True
    title = property(lambda self: self.parts[0].title)
    chart = property(lambda self: self._of_parts("chart"))
    takes_nearest = property(lambda self: all(part.takes_nearest for part in self.parts))
    return_bound = property(lambda self: sum(part.return_bound for part in self.parts))
    examples = made_elsewhere

    def __init__(self, parts: Sequence[OrthogonalParam], blocks: Sequence[int], dim: int, axis: int):
        torch.nn.Module.__init__(self)
        self.dtype, self.precision = parts[0].dtype, parts[0].precision
        self.blocks, self.dim, self.axis = list(blocks), dim, axis
        for j, part in enumerate(parts):
            self.add_module(str(j), part)
        self.sizes = [part.shape[axis] for part in parts]
        shape = [*parts[0].shape]
        shape[axis] = sum(self.sizes)
        self.shape = tuple(shape)

    @property
    def parts(self) -> list[OrthogonalParam]:
        """The maps side by side."""
        return list(self.children())  # type: ignore[arg-type]

    @property
    def traits(self) -> Traits:
        """Traits that all parts have."""
        each = [part.traits for part in self.parts]
        promises = "onto", "invertible", "exact", "twice_differentiable"
        shared = {key: all(vars(t)[key] for t in each) for key in promises}
        return replace(min(each, key=lambda t: t.component == "connected"), **shared)

    @property
    def schemes(self) -> tuple[str, ...]:
        """Schemes that every part knows."""
        each = [part.schemes for part in self.parts]
        return tuple(scheme for scheme in each[0] if all(scheme in schemes for schemes in each))

    def options(self) -> dict[str, Any]:
        return {"parts": [part.options() for part in self.parts], "blocks": self.blocks, "dim": self.dim}

    def forward(self, *coordinates: Tensor) -> Tensor:
        return torch.cat([part(*own) for part, own in self._shares(coordinates)], self.axis)

    def bare(self, *coordinates: Tensor) -> Any:
        return tuple(part.bare(*own) for part, own in self._shares(coordinates))

    def frames(self, weight: Tensor) -> Any:
        return tuple(part.frames(own) for part, own in self._cut(weight))

    def nearest(self, weight: Tensor) -> Tensor:
        return torch.cat([part.nearest(own) for part, own in self._cut(weight)], self.axis)

    def project(self, weight: Tensor) -> Tensor:
        return torch.cat([part.project(own) for part, own in self._cut(weight)], self.axis)

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        return self._joined(part.initial(scheme, generator) for part in self.parts)

    def solve(self, w: Tensor) -> Position:
        check_tensor(self, w)
        return self._joined(part.solve(own) for part, own in self._cut(w))

    def error_bound(self, *coordinates: Tensor) -> float:
        return max(part.error_bound(*own) for part, own in self._shares(coordinates))

    def _cut(self, weight: Tensor) -> Iterator[tuple[OrthogonalParam, Tensor]]:
        return zip(self.parts, weight.split(self.sizes, self.axis), strict=True)

    def _shares(self, coordinates: Sequence[Tensor]) -> Iterator[tuple[OrthogonalParam, Sequence[Tensor]]]:
        start = 0
        for part in self.parts:
            stop = start + len(part.coordinates)
            yield part, coordinates[start:stop]
            start = stop


def cores(param: OrthogonalParam, start: int = 0) -> Iterator[tuple[int, OrthogonalParam]]:
    """Yields the maps under views and gains, each with the place of its first coordinate among those of the weight."""
    while isinstance(param, Wrapper):
        param = param.inner
    if not isinstance(param, SideBySide):
        yield start, param
        return
    for part in param.parts:
        yield from cores(part, start)
        start += len(part.coordinates)
