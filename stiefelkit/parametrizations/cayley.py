"""The scaled Cayley transform, real and complex."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy
import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.contract.param import OrthogonalParam, Position, Traits
from stiefelkit.errors import DtypeError, ImageError, OptionError, needs, shown
from stiefelkit.functional import (
    band_size,
    cayley,
    cayley_inverse,
    pack_skew,
    pick_band,
    skew_size,
    spread_band,
    unpack_skew,
)
from stiefelkit.init import device_of, uniform
from stiefelkit.metrics import permitted_return, rounding_limit
from stiefelkit.numbers import above, as_python_number, at_least, integer, optional
from stiefelkit.parametrizations._charts import check_signs, component, diagonal_coordinates
from stiefelkit.tensors import coordinate_dtype

_ARC = at_least(0, most=2 * math.pi)
_STEEPEST = 32.0
"""The largest eigenvalue of A that a draw with fixed signs has; those of the transform stay 2/32 from -1.

Rounding A moves W by up to eps ||A||_F, and tall frames in float64 by about eps ||A||_2^2 / 20 more. Haar frames have
no bound: the spectrum of one of 64 x 64 in two comes too near to -1 for float32 coordinates.
"""
_LIGHT_TAILED = 4
"""With so many rows more than columns Haar frames hardly ever come near: P(||A|| > x) falls as x^-(n - p + 1)."""


class Cayley(OrthogonalParam):
    """Scaled Cayley transform :math:`W = (I + A)^{-1} (I - A) D` of a skew :math:`A`.

    Real frames: D is a fixed diagonal of signs, the chart `signs`; A is skew-symmetric, the coordinate `skew`.
    Complex frames: :math:`D = diag(e^{iθ})` is trained too, the coordinate `phase`; A is skew-Hermitian. Tall frames
    are the first p columns of the n x n transform, at the cost of one p x p inverse.

    Image: every frame, by the choice of D; with D fixed, all but those where :math:`W D^H` has the eigenvalue -1, and
    for square real W only :math:`det W = det D`. An assigned frame gets a D that leaves every entry of A at most 1 in
    modulus, unless signs are given (see `stiefelkit.functional.cayley_inverse`). Cost: one inverse in float64 and two
    p x p products backward. Not for weights that must cross from one component of :math:`O(n)` to the other.

    `stiefelkit.functional.unpack_skew` has the order of the coordinates.

    Args:
        shape, dtype, device: of the frame, (*, n, p), real or complex, and where the signs live.
        precision: "exact", or "fast": square float32 frames from n = 128 on, on a CPU, may be up to 80 rounding limits
            off, and take 0.65 to 0.9 of the time; nothing else would gain.
        negative: real frames only: how many of the last signs are -1, or the signs themselves, (p,). Given, the signs
            stay for good; otherwise assigning and initializing choose them.
        bandwidth: A is zero more than this many places off its diagonal, :math:`1 ≤ bandwidth < n`, which leaves about
            n times as many coordinates, and a subset of all frames. Real frames keep the signs that they have when
            assigned; complex ones cannot be assigned.
        bound: real frames only: :math:`‖W - I‖_F` is at most this, by scaling a longer A to the Frobenius norm
            :math:`bound / 2`. Such a map starts as the identity, and takes no `negative=`.
        arc: "helfrich" draws t from :math:`(0, arc)`, :math:`0 ≤ arc ≤ 2π`; π/2 spreads the spectrum over half of the
            circle, 0 begins at W = D.

    References:
        Helfrich, Willmott, Ye, Orthogonal recurrent neural networks with scaled Cayley transform, ICML 2018.
        Maduranga, Helfrich, Ye, Complex unitary recurrent neural networks using scaled Cayley transform, AAAI 2019.
        O'Dorney, Minimizing the Cayley transform of an orthogonal matrix by multiplying by signature matrices, 2014.

    >>> cayley = Cayley((3, 3), dtype=torch.float32)
    >>> cayley(torch.zeros(3))
    tensor([[1., 0., 0.],
            [0., 1., 0.],
            [0., 0., 1.]])
    """

    precisions: ClassVar[tuple[str, ...]] = ("exact", "fast")
    coordinate_names: ClassVar[tuple[str, ...]] = ("skew", "phase")
    stacks: ClassVar[bool] = True

    signs: Tensor

    def __init__(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        precision: str = "exact",
        negative: int | Sequence[int] | Tensor | None = None,
        bandwidth: int | None = None,
        bound: float | None = None,
        arc: float = math.pi / 2,
    ):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        n, p = self.shape[-2:]
        if bandwidth is not None:
            bandwidth = optional(integer(1, n - 1, "n - 1")).require("Cayley", "bandwidth", bandwidth)
        self.bandwidth: int | None = bandwidth
        self.bound: float | None = None if bound is None else above(0).require("Cayley", "bound", bound)
        self.arc = float(_ARC.require("Cayley", "arc", arc))
        self.negative = None if negative is None else _signs(negative, p)
        if bound is not None and negative is not None:
            raise OptionError("Cayley needs one of bound= and negative=, got both.")
        if negative is not None or bound is not None:
            reason = self.supports(self.shape, self.dtype, negative=negative, bound=bound)
            needs(reason is None, DtypeError, "Cayley", str(reason), self.dtype)
        if not self.dtype.is_complex:
            self.register_buffer("signs", self._first_signs(device))

    @classmethod
    def supports(cls, shape: Sequence[int], dtype: torch.dtype, **options: object) -> str | None:
        if dtype.is_complex and options.get("negative") is not None:
            return "a real dtype for negative= (complex frames train phases instead)"
        if dtype.is_complex and options.get("bound") is not None:
            return "a real dtype for bound="
        return None

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        shapes = [(1, 1), (2, 2), (7, 7), (16, 16), (9, 4), (5, 1), (2, 3, 6, 6), (3, 8, 2)]
        signs = [((6, 6), {"negative": 2}), ((6, 3), {"negative": [1, -1, 1]})]
        bands = [((7, 7), {"bandwidth": 2}), ((2, 6, 3), {"bandwidth": 1})]
        bounds = [((6, 6), {"bound": 0.5}), ((2, 5, 3), {"bound": 2.0})]
        return [*((shape, {}) for shape in shapes), *signs, *bands, *bounds, ((130, 130), {"precision": "fast"})]

    @property
    def traits(self) -> Traits:
        return Traits(
            onto=self.negative is None and self.bandwidth is None and self.bound is None,
            invertible=self.bandwidth is None or not self.is_complex,
            exact=not self._is_fast,
            component=component(self.shape, self.is_complex),
        )

    @property
    def schemes(self) -> tuple[str, ...]:
        if self.bound is not None:
            return ("identity",)
        schemes = (*super().schemes, "helfrich") if self.bandwidth is None else ("helfrich", "identity")
        reflects = self.negative is not None and -1 in self.negative
        return tuple([scheme for scheme in schemes if not (reflects and scheme == "identity")])

    @property
    def takes_nearest(self) -> bool:
        return self.bandwidth is None and self.negative is None

    @property
    def _is_fast(self) -> bool:
        n, p = self.shape[-2:]
        return self.precision == "fast" and n == p >= 128 and coordinate_dtype(self.dtype) == torch.float32

    def options(self) -> dict[str, Any]:
        given = {"bandwidth": self.bandwidth, "bound": self.bound}
        return {key: value for key, value in given.items() if value is not None}

    def error_bound(self, *coordinates: Tensor) -> float:
        fast = 80 * rounding_limit(self.shape[-1], torch.float32) if self._is_fast else 0.0
        return max(super().error_bound(), fast)

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        (*batch, n, p), is_complex = self.shape, self.dtype.is_complex
        of_a = (n, p, is_complex)
        size = skew_size(*of_a) if self.bandwidth is None else band_size(*of_a, self.bandwidth)
        return {"skew": (*batch, size)} | ({"phase": (*batch, p)} if is_complex else {})

    @property
    def return_bound(self) -> float:
        """Wider with fixed signs or a band, for which A may be large."""
        return permitted_return(self.shape, self.dtype, unspared=not self.traits.onto)

    def forward(self, skew: Tensor, phase: Tensor | None = None) -> Tensor:
        (n, p), is_complex = self.shape[-2:], self.dtype.is_complex
        signs = None if is_complex else self.signs
        if self.bound is not None:
            skew = self._within_bound(skew, self.bound)
        if self.bandwidth is not None:
            skew = spread_band(skew, n, p, is_complex, self.bandwidth)
        return cayley(skew, n, p, signs=signs, phase=phase, precision=self.precision).to(self.dtype)

    def invert(self, w: Tensor) -> Position:
        if self.dtype.is_complex and self.bandwidth is not None:
            raise ImageError("Cayley with bandwidth= has no right inverse for complex frames; draw by sk.reset_.")
        tried: list[Tensor | None] = [None]  # the inverse chooses signs, or phases
        if not (self.negative is self.bandwidth is self.bound is None):
            tried = [] if self.bandwidth is None else [self.signs.to(w.device)]
            tried.append(self._first_signs(w.device))
        for signs in tried:
            skew, d = cayley_inverse(w, signs)
            packed, rest = (skew, 0.0) if self.bandwidth is None else self._in_band(skew)
            if rest == 0 or rest <= rounding_limit(self.shape[-1], coordinate_dtype(self.dtype)):
                if signs is not None:
                    self._check_reached(skew, signs, w)
                phases, chart = diagonal_coordinates(d)
                return (packed, *phases), chart
        requirement = "a frame whose A, with the present signs or with those first given, is zero off the band"
        raise ImageError(
            f"Cayley with bandwidth={self.bandwidth} needs {requirement}, got another; without bandwidth= it fits."
        )

    def _within_bound(self, skew: Tensor, bound: float) -> Tensor:
        """Scales A to the Frobenius norm bound / 2, if it is longer; the packed entries stand in A twice."""
        longest = bound / math.sqrt(8)
        square = skew.square().sum(-1, keepdim=True)  # a norm has no second derivative at 0, where such a map starts
        is_long = square > longest**2
        return skew * torch.where(is_long, longest * torch.where(is_long, square, 1.0).rsqrt(), 1.0)

    def _in_band(self, skew: Tensor) -> tuple[Tensor, float]:
        """Returns the coordinates of the band, out of those of a full A, and the largest of the rest."""
        if self.bandwidth is None:
            return skew, 0.0
        n, p = self.shape[-2:]
        band, rest = pick_band(skew, n, p, self.is_complex, self.bandwidth)
        return band, rest.max().item()

    def initial(self, scheme: str, generator: torch.Generator | None = None) -> Position:
        """Draws a frame, or by "helfrich" the skew part itself.

        "haar" with fixed signs moves eigenvalues of W D within 2/32 of -1 that far away, for coordinates of moderate
        size. "helfrich", of scoRNN and scuRNN: tan(t/2) with t uniform on :math:`(0, arc)` for consecutive pairs of
        axes, so that the eigenvalues of the transform are :math:`e^{it}, e^{-it}`; signs as given, phases uniform on
        :math:`(0, 2π)`. The authors' arc is π/2, and 2π for scuRNN on the adding problem.
        """
        if scheme == "helfrich":
            skew, _ = self._in_band(_helfrich(self.shape, self.is_complex, generator, self.arc))
            if self.is_complex:
                return (skew, uniform(self.coordinates["phase"], generator) * (2 * math.pi)), {}
            return (skew,), {"signs": self._first_signs(skew.device)}
        if self.bandwidth is not None and scheme == "identity":
            on = device_of(generator)
            zeros = tuple(torch.zeros(shape, dtype=torch.float64, device=on) for shape in self.coordinates.values())
            return zeros, {} if self.is_complex else {"signs": self._first_signs(on)}
        if self.negative is None or scheme != "haar":
            return super().initial(scheme, generator)
        signs = self._first_signs(device_of(generator))
        return (_haar_with_signs(self.shape, signs, generator),), {"signs": signs}

    def check_chart(self, chart: Mapping[str, Tensor]) -> str | None:
        if self.is_complex:
            return None
        signs = chart["signs"]
        if self.negative is not None and not bool((signs == self._first_signs(signs.device)).all()):
            return f"the signs of its negative=, {sum(s < 0 for s in self.negative)} of them -1"
        return check_signs(self, chart)

    def _first_signs(self, device: torch.device | str | None) -> Tensor:
        signs = (1,) * self.shape[-1] if self.negative is None else self.negative
        return torch.tensor(signs, dtype=torch.int8, device=device).expand(*self.shape[:-2], -1).clone()

    def _check_reached(self, skew: Tensor, signs: Tensor, w: Tensor) -> None:
        n, p = self.shape[-2:]
        skew = skew.to(coordinate_dtype(self.dtype))
        rounded = cayley(skew if self.bound is None else self._within_bound(skew, self.bound), n, p, signs=signs)
        difference = torch.linalg.matrix_norm(rounded - w).max().item()
        if not difference <= self.return_bound:
            got = f"that comes back {difference:.2g} away" if math.isfinite(difference) else "that has"
            if self.bound is not None:
                raise ImageError(f"Cayley needs a frame within bound={self.bound:g} of the identity, got one {got}.")
            requirement = "a frame W with no eigenvalue of W D at or near -1 (and det W = det D if square)"
            raise ImageError(f"Cayley with negative= needs {requirement}, got one {got}; without negative= it fits.")


def _signs(negative: int | Sequence[int] | Tensor, p: int) -> tuple[int, ...]:
    is_array = isinstance(negative, Tensor | numpy.ndarray)
    signs = as_python_number(negative.tolist() if is_array else negative)
    if type(signs) is int:
        count = integer(0, p, "p").require("Cayley", "negative", signs)
        return (1,) * (p - count) + (-1,) * count
    are_signs = isinstance(signs, list | tuple) and len(signs) == p and all(s in (1, -1) for s in signs)
    needs(are_signs, OptionError, "Cayley", f"negative to be a count or p = {p} signs of 1 and -1", shown(negative))
    return tuple(int(s) for s in signs)


def _helfrich(shape: tuple[int, ...], is_complex: bool, generator: torch.Generator | None, arc: float) -> Tensor:
    """Draws tan(t/2) with t uniform on (0, arc) for consecutive pairs of axes."""
    *batch, n, p = shape
    pairs = min(n // 2, (p + 1) // 2)
    t = uniform((*batch, pairs), generator) * arc
    below = t.new_zeros(*batch, n, p)
    first = torch.arange(0, 2 * pairs, 2, device=t.device)
    below[..., first + 1, first] = (t / 2).tan()
    a11, a21 = below[..., :p, :], below[..., p:, :]
    return pack_skew(a11 + 0j, a21 + 0j) if is_complex else pack_skew(a11, a21)


def _haar_with_signs(shape: tuple[int, ...], signs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draws the skew part of a real Haar frame for a given D, with eigenvalues of W D 2/32 away from -1."""
    w = init.draw("haar", shape, torch.float64, generator)
    signs = signs.to(w)
    if shape[-1] == shape[-2]:
        # The transform has det 1, so det W = det D: a reflection takes the Haar measure from one half to the other.
        w[..., 0] *= (torch.linalg.det(w) * signs.prod(-1)).sign()[..., None]
    return _moderate(cayley_inverse(w, signs)[0], signs, *shape[-2:])


def _moderate(skew: Tensor, signs: Tensor, n: int, p: int) -> Tensor:
    """Returns the same A with eigenvalues beyond `_STEEPEST` brought back to it."""
    if n - p >= _LIGHT_TAILED or not torch.isfinite(skew).all():
        return skew
    a11, a21 = unpack_skew(skew, n, p, False)
    beside = torch.cat([-a21.mT, a21.new_zeros(*a21.shape[:-2], n - p, n - p)], -2)
    a = torch.cat([torch.cat([a11, a21], -2), beside], -1)
    # A^T A commutes with A: what is done to its eigenvectors leaves A skew.
    square, vectors = torch.linalg.eigh(a.mT @ a)
    scale = (_STEEPEST / square.clamp(min=_STEEPEST**2).sqrt()).unsqueeze(-2)
    a = a @ (vectors * scale) @ vectors.mT
    square = cayley(pack_skew((a - a.mT) / 2), n, n)
    return cayley_inverse(square[..., :p] * signs.unsqueeze(-2), signs)[0]
