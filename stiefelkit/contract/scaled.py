"""Frames times a gain, fixed or learned."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit.contract.composite import Wrapper
from stiefelkit.contract.param import Frames, OrthogonalParam, Position, Traits, check_tensor
from stiefelkit.errors import NotAFrameError, OptionError
from stiefelkit.numbers import Check, above
from stiefelkit.tensors import coordinate_dtype, working_dtype

GAIN = "gain"  # the name of the coordinate that a learned gain is
_GAIN = Check(
    '{key} to be a positive number, "learned" or, in sk.orthogonal, "rms"',
    lambda gain: gain == "learned" if isinstance(gain, str) else above(0).holds(gain),
)


class Scaled(Wrapper):
    """A parametrization times a gain: the weight is g inner(...).

    A fixed g > 0 is an option, as `torch.nn.init.calculate_gain` gives it. A "learned" one is the coordinate `gain`, of
    shape (1,) for all matrices of a batch (FSDP2 shards no tensor without dimensions), 1 when drawn, or of shape (k,)
    for each of k blocks. It may take any value; an assigned weight is read with g > 0. Other coordinates, chart and
    traits are those of the inner map, but that a weight is no frame.

    Args:
        inner: the map of the frames.
        gain: g, or "learned".
        blocks: k, the first dimension of the frames, where each of these has a learned gain of its own.
    """

    coordinate_names: ClassVar[tuple[str, ...]] = ("*", GAIN)
    stacks: ClassVar[bool] = True

    def __init__(self, inner: OrthogonalParam, gain: float | str, blocks: int = 1):
        super().__init__(inner, inner.shape)
        gain = _GAIN.require(inner.title, "gain", gain)
        if gain == "learned" and GAIN in inner.coordinates:
            raise OptionError(f"{inner.title} needs a fixed gain, since it has a coordinate {GAIN!r}, got {gain!r}.")
        self.gain: float | None = None if isinstance(gain, str) else float(gain)
        self.blocks = blocks

    @property
    def traits(self) -> Traits:
        return replace(self.inner.traits, exact=False)

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        return self.inner.coordinates | ({GAIN: (self.blocks,)} if self.gain is None else {})

    def options(self) -> dict[str, Any]:
        return {**self.inner.options(), GAIN: "learned" if self.gain is None else self.gain}

    def forward(self, *coordinates: Tensor) -> Tensor:
        unscaled, gain = self._split(coordinates)
        return (self.inner(*unscaled) * self._spread(gain)).to(self.dtype)

    def linear(self, x: Tensor, *coordinates: Tensor) -> Tensor:
        unscaled, gain = self._split(coordinates)
        y = self.inner.linear(x, *unscaled)
        return (y * gain).to(y.dtype)

    def bare(self, *coordinates: Tensor) -> Frames:
        return self.inner.bare(*self._split(coordinates)[0])

    def frames(self, weight: Tensor) -> Frames:
        """Returns the weight divided by its gain; by its own scale, if the gain is learned."""
        gain = self._gain_of(weight)
        if isinstance(gain, Tensor):
            gain = self._spread(gain.masked_fill(gain == 0, 1.0))
        return self.inner.frames((weight.to(working_dtype(weight.dtype)) / gain).to(weight.dtype))

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        unscaled, chart = self.inner.initial(scheme, generator)
        return self._joined(unscaled, 1.0), chart

    def nearest(self, weight: Tensor) -> Tensor:
        """Returns the nearest frame times the gain; a learned gain is the mean of the singular values."""
        q = self.inner.nearest(weight)
        return q * (self.gain or self._gain_along(q, weight))

    def project(self, weight: Tensor) -> Tensor:
        gain = self.gain or self._gain_along(self.inner.nearest(weight), weight)
        return gain * self.inner.project(weight.to(working_dtype(self.dtype)) / gain)

    @torch.no_grad()
    def solve(self, w: Tensor) -> Position:
        check_tensor(self, w)
        gain = self._gain_of(w)
        if isinstance(gain, Tensor) and bool((gain == 0).any()):
            raise NotAFrameError(f'{self.title} with gain="learned" needs a frame times a number, got zero.')
        frame = w.to(working_dtype(w.dtype)) / self._spread(gain)
        if torch.finfo(w.dtype).eps > torch.finfo(self.dtype).eps:
            frame = frame.to(w.dtype)  # in which it is a frame, or is none
        try:
            unscaled, chart = self.inner.solve(frame)
        except NotAFrameError as error:
            times = "a number" if self.gain is None else f"{self.gain:.7g}"
            low, high = [s.item() for s in torch.aminmax(torch.linalg.svdvals(w.to(working_dtype(w.dtype))))]
            raise NotAFrameError(
                f"{self.title} with gain={self.options()[GAIN]!r} needs a frame times {times}, got singular values "
                f"from {low:.7g} to {high:.7g}; sk.functional.nearest_frame gives a frame."
            ) from error
        return self._joined(unscaled, gain), chart

    def error_bound(self, *coordinates: Tensor) -> float:
        """Returns that of the inner map times :math:`g^2`, what rounding a product costs, and :math:`|g^2 - 1| √p`."""
        unscaled, gain = self._split(coordinates) if coordinates else ((), self.gain or 1.0)
        squares, root = torch.as_tensor(gain, device="cpu").detach().double() ** 2, math.sqrt(self.shape[-1])
        rounding = 1.1 * torch.finfo(self.dtype).eps * root
        return (squares * (self.inner.error_bound(*unscaled) + rounding) + (squares - 1).abs() * root).max().item()

    @property
    def return_bound(self) -> float:
        """The inner map's bound, and the rounding of gain and product, times a fixed gain."""
        rounding = torch.finfo(self.dtype).eps * math.sqrt(self.shape[-1])
        return (self.inner.return_bound + rounding) * (self.gain or 1.0)

    def _split(self, coordinates: Sequence[Tensor]) -> tuple[Sequence[Tensor], Any]:
        return (coordinates[:-1], coordinates[-1]) if self.gain is None else (coordinates, self.gain)

    def _joined(self, unscaled: Sequence[Tensor], gain: float | Tensor) -> tuple[Tensor, ...]:
        if self.gain is not None:
            return tuple(unscaled)
        first = torch.as_tensor(gain, dtype=torch.float64, device=unscaled[0].device).reshape(-1)
        return (*unscaled, first.expand(self.blocks).to(coordinate_dtype(self.dtype)))

    def _spread(self, gain: Any) -> Any:
        """Returns a learned gain, or a stack of it, in as many dimensions as what it multiplies."""
        return gain.reshape(*gain.shape, *(1,) * (len(self.shape) - 1)) if isinstance(gain, Tensor) else gain

    def _gain_of(self, weight: Tensor) -> float | Tensor:
        """Returns the gain of a weight that is a frame times one: halfway between its extreme singular values."""
        if self.gain is not None:
            return self.gain
        exact = weight.detach().to(working_dtype(weight.dtype))
        if not torch.isfinite(exact).all():
            return exact.real.new_full((self.blocks,), math.nan)
        s = torch.linalg.svdvals(exact).reshape(self.blocks, -1)
        return (s.amax(-1) + s.amin(-1)) / 2

    def _gain_along(self, q: Tensor, weight: Tensor) -> Tensor:
        """Returns the learned gain that brings frames Q nearest to a weight whose polar factor they are, spread."""
        traces = (q.conj() * weight).real.reshape(self.blocks, -1).sum(-1)
        return self._spread(traces / (q.numel() / self.blocks / self.shape[-2]))

    def extra_repr(self) -> str:
        return f"gain={self.options()[GAIN]!r}, shape={self.shape}"
