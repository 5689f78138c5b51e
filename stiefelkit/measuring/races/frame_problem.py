"""What every contender of a race gets: a size, a dtype, and coordinates of one kind."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.metrics import working_dtype

__all__ = ["FrameProblem"]


@dataclass
class FrameProblem:
    """One size of a race.

    The draws, the same for ours and for peers, come from one seed; two contenders get different tensors of
    one distribution.

    Args:
        n: rows of the frame.
        p: columns, p <= n.
        batch: number of frames; 1 means a plain matrix.
        dtype: of the frame.
        device: where it lives.
        options: of the parametrizations that have them; peers that do the same work read them here.
        seed: fixes the draws.
        scale: what the coordinates that are drawn are multiplied by.
    """

    n: int
    p: int
    batch: int = 1
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    @property
    def lead(self) -> tuple[int, ...]:
        """The batch dimensions."""
        return () if self.batch == 1 else (self.batch,)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the frame."""
        return (*self.lead, self.n, self.p)

    def __str__(self) -> str:
        size = f"{self.n} x {self.p}"
        return size if self.batch == 1 else f"{self.batch} of {size}"

    def normal(self, *shape: int, size: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Draws normal entries with E |x|^2 = (scale size)^2, on the device; complex ones if the dtype is."""
        dtype = dtype or self.dtype
        x = torch.randn(*shape, dtype=working_dtype(dtype), generator=self.generator)
        return (x * (size * self.scale)).to(self.device, dtype)

    def angles(self, *shape: int) -> Tensor:
        """Draws angles uniform on (-pi, pi), times the scale, float64."""
        unit = torch.rand(*shape, dtype=torch.float64, generator=self.generator)
        return ((2 * unit - 1) * (math.pi * self.scale)).to(self.device)

    def tangent(self) -> Tensor:
        """Draws X, n x p and lower trapezoidal, with E |a|^2 = scale^2 / n in A = X - X^H, ||A||_2 ~ 2 scale."""
        x = self.normal(*self.shape, size=self.n**-0.5).tril()
        diagonal = x.diagonal(dim1=-2, dim2=-1)
        diagonal.copy_(0.5j * diagonal.imag if x.is_complex() else torch.zeros_like(diagonal))
        return x

    def frame(self) -> Tensor:
        """Draws a Haar frame and rounds it once."""
        return self.exact_frame().to(self.dtype)

    def exact_frame(self) -> Tensor:
        """Draws a Haar frame in float64 or complex128."""
        return init.haar(self.shape, working_dtype(self.dtype), self.generator).to(self.device)

    def gradient(self) -> Tensor:
        """Draws dL/dW, with normal entries of E |g|^2 = 1/n."""
        return self.normal(*self.shape, size=self.n**-0.5 / self.scale)
