"""The scaled Cayley transform, real and complex."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from stiefelkit import init
from stiefelkit.errors import DtypeError, ImageError, OptionError
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
from stiefelkit.metrics import permitted_return, rounding_limit
from stiefelkit.param import OrthogonalParam, Traits, coordinate_dtype
from stiefelkit.parametrizations._buffers import are_signs

__all__ = ["Cayley"]

_STEEPEST = 32.0
"""The largest eigenvalue of A that a draw with fixed signs has; those of the transform stay 2/32 from -1.

Rounding A moves W by up to eps ||A||_F, and working with tall frames in float64 by about eps ||A||_2^2 / 20 more. Haar
frames have no bound: the spectrum of one of 64 x 64 in two comes so near -1 that float32 coordinates do not hold it.
"""
_LIGHT_TAILED = 4
"""With so many rows more than columns Haar frames hardly ever come near: P(||A|| > x) falls as x^-(n - p + 1)."""


class Cayley(OrthogonalParam):
    r"""Scaled Cayley transform W = (I + A)^-1 (I - A) D of a skew A.

    Real frames: D is a fixed diagonal of signs, the chart `signs`; A is skew-symmetric, the coordinate `skew`.
    Complex frames: D = diag(e^{i theta}) is trained too, the coordinate `phase`; A is skew-Hermitian. Tall frames are
    the first p columns of the n x n transform, at the cost of one p x p inverse.

    Image: every frame, by the choice of D; with D fixed, all but those where W D^H has the eigenvalue -1, and for
    square real W only det W = det D. Cost: one inverse in float64 and two p x p products backward. Not for weights
    that must cross from one component of O(n) to the other.

    The coordinates are laid out as `stiefelkit.functional.unpack_skew` tells.

    Args:
        shape: shape of the frame, (*, n, p).
        dtype: real or complex dtype of the frame.
        device: where the signs live.
        precision: "exact", or "fast": square float32 frames from n = 128 on may be up to 80 rounding limits off, and
            take 0.65 to 0.9 of the time; nothing else would gain.
        negative: real frames only: how many of the last signs are -1, or the signs themselves, (p,). Given, the signs
            stay for good; otherwise assigning and initialising choose them.
        bandwidth: A is zero more than this many places off its diagonal, 1 <= bandwidth < n, which leaves about n times
            as many coordinates, and a subset of all frames. Real frames keep the signs that they have when assigned;
            complex ones cannot be assigned.

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
    schemes: ClassVar[tuple[str, ...]] = (*OrthogonalParam.schemes, "helfrich")

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
    ):
        super().__init__(shape, dtype=dtype, device=device, precision=precision)
        if bandwidth is not None:
            if not isinstance(bandwidth, int) or isinstance(bandwidth, bool) or not 1 <= bandwidth < self.shape[-2]:
                raise OptionError(
                    f"Cayley needs bandwidth between 1 and n - 1 = {self.shape[-2] - 1}, got {bandwidth!r}."
                )
            self.schemes = ("helfrich", "identity")  # type: ignore[misc]
        self.bandwidth = bandwidth
        self.negative = None if negative is None else _signs(negative, self.shape[-1])
        if self.negative is not None and -1 in self.negative:
            self.schemes = tuple(scheme for scheme in self.schemes if scheme != "identity")  # type: ignore[misc]
        if self.is_complex:
            reason = self.supports(shape, self.dtype, negative=negative)
            if reason is not None:
                raise DtypeError(f"Cayley needs {reason}, got {self.dtype}.")
            return
        self.register_buffer("signs", self._first_signs().to(device=device))

    @classmethod
    def supports(cls, shape: Sequence[int], dtype: torch.dtype, **options: Any) -> str | None:
        """Signs are for real frames."""
        if dtype.is_complex and options.get("negative") is not None:
            return "a real dtype for negative= (complex frames train phases instead)"
        return None

    @classmethod
    def examples(cls) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """Square, tall, one column, one entry, odd, batched, fixed signs, bands, fast."""
        examples: list[tuple[tuple[int, ...], dict[str, Any]]] = [
            ((6, 6), {"negative": 2}),
            ((6, 3), {"negative": [1, -1, 1]}),
            ((7, 7), {"bandwidth": 2}),
            ((2, 6, 3), {"bandwidth": 1}),
            ((130, 130), {"precision": "fast"}),
        ]
        shapes = [(1, 1), (2, 2), (7, 7), (16, 16), (9, 4), (5, 1), (2, 3, 6, 6), (3, 8, 2)]
        return [*((shape, {}) for shape in shapes), *examples]

    @property
    def traits(self) -> Traits:
        """Onto and invertible unless the signs are fixed."""
        n, p = self.shape[-2:]
        component = "chart" if n == p and not self.is_complex else "connected"
        return Traits(
            onto=self.negative is None and self.bandwidth is None,
            invertible=self.bandwidth is None or not self.is_complex,
            exact=not self._is_fast,
            component=component,
        )

    @property
    def takes_nearest(self) -> bool:
        """Not with signs that are fixed, which imply a draw."""
        return super().takes_nearest and self.negative is None

    @property
    def _is_fast(self) -> bool:
        n, p = self.shape[-2:]
        return self.precision == "fast" and n == p >= 128 and coordinate_dtype(self.dtype) == torch.float32

    def options(self) -> dict[str, Any]:
        """The bandwidth, if there is one; signs are in the chart."""
        return {} if self.bandwidth is None else {"bandwidth": self.bandwidth}

    def error_bound(self, *coordinates: Tensor) -> float:
        """That of an exact frame, or 80 limits."""
        fast = 80 * rounding_limit(self.shape[-1], torch.float32) if self._is_fast else 0.0
        return max(super().error_bound(), fast)

    @property
    def coordinates(self) -> dict[str, tuple[int, ...]]:
        """`skew`, and for complex frames `phase`."""
        *batch, n, p = self.shape
        if self.bandwidth is None:
            size = skew_size(n, p, self.is_complex)
        else:
            size = band_size(n, p, self.is_complex, self.bandwidth)
        shapes: dict[str, tuple[int, ...]] = {"skew": (*batch, size)}
        if self.is_complex:
            shapes["phase"] = (*batch, p)
        return shapes

    @property
    def return_bound(self) -> float:
        """Wider with fixed signs or a band, for which A may be large."""
        return permitted_return(self.shape, self.dtype, unspared=not self.traits.onto)

    def forward(self, skew: Tensor, phase: Tensor | None = None) -> Tensor:
        """Maps coordinates to frames.

        Args:
            skew: packed skew part, shape (*, d), d = n(n - 1)/2 for square real, n^2 for square complex frames.
            phase: angles of D in radians, shape (*, p), complex frames only.

        Returns:
            Frames of shape (*, n, p).
        """
        n, p = self.shape[-2:]
        signs = None if self.is_complex else self.signs
        if self.bandwidth is not None:
            skew = spread_band(skew, n, p, self.is_complex, self.bandwidth)
        return cayley(skew, n, p, signs=signs, phase=phase, precision=self.precision).to(self.dtype)

    def invert(self, w: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Solves for A after choosing D; see `stiefelkit.functional.cayley_inverse`."""
        if self.bandwidth is not None:
            return self._invert_band(w)
        if not self.is_complex:
            prescribed = None if self.negative is None else self._first_signs().to(w.device)
            skew, d = cayley_inverse(w, prescribed)
            if prescribed is not None:
                self._check_reached(skew, prescribed, w)
            return (skew,), {"signs": d.to(torch.int8)}
        skew, d = cayley_inverse(w)
        return (skew, d.angle()), {}

    def _invert_band(self, w: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        if self.is_complex:
            raise ImageError(
                "Cayley with bandwidth= has no right inverse for complex frames; set it through sk.reset_."
            )
        n, p = self.shape[-2:]
        for signs in (self.signs.to(w.device), self._first_signs().to(w.device)):
            skew, _ = cayley_inverse(w, signs)
            band, rest = pick_band(skew, n, p, False, self.bandwidth or 1)
            if rest.max().item() <= rounding_limit(p, coordinate_dtype(self.dtype)):
                self._check_reached(skew, signs, w)
                return (band,), {"signs": signs}
        raise ImageError(
            f"Cayley with bandwidth={self.bandwidth} needs a frame whose A, with the present signs or with those first "
            "given, is zero off the band, got another; without bandwidth= it fits."
        )

    def initial(
        self, scheme: str, generator: torch.Generator | None = None
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Draws a frame, or by "helfrich" the skew part itself.

        "haar" with fixed signs: eigenvalues of W D within 2/32 of -1 are moved that far away, where the coordinates
        hold the frame still.

        "helfrich" is the initialisation of scoRNN and scuRNN: tan(t/2) with t uniform on (0, pi/2) for consecutive
        pairs of axes, so that the eigenvalues of the transform are e^{it}, e^{-it}; signs as given, phases uniform on
        (0, 2 pi).
        """
        if scheme == "helfrich":
            return self._helfrich(generator)
        if self.bandwidth is not None:
            if scheme != "identity":
                raise ImageError(f"Cayley with bandwidth= draws by {' or '.join(self.schemes)}, got {scheme!r}.")
            zeros = tuple(torch.zeros(shape, dtype=torch.float64) for shape in self.coordinates.values())
            return zeros, {} if self.is_complex else {"signs": self._first_signs()}
        if self.negative is None or scheme != "haar":
            return self.initial_frame(scheme, generator)
        return self._haar_with_fixed_signs(generator)

    def _helfrich(self, generator: torch.Generator | None) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        *batch, n, p = self.shape
        device = None if generator is None else generator.device
        pairs = min(n // 2, (p + 1) // 2)
        t = torch.rand(*batch, pairs, dtype=torch.float64, device=device, generator=generator) * (math.pi / 2)
        below = t.new_zeros(*batch, n, p)
        first = torch.arange(0, 2 * pairs, 2, device=device)
        below[..., first + 1, first] = (t / 2).tan()
        a11, a21 = below[..., :p, :], below[..., p:, :]
        packed = pack_skew(a11 + 0j, a21 + 0j) if self.is_complex else pack_skew(a11, a21)
        if self.bandwidth is not None:
            packed, _ = pick_band(packed, n, p, self.is_complex, self.bandwidth)
        if not self.is_complex:
            return (packed,), {"signs": self._first_signs()}
        phase = torch.rand(*batch, p, dtype=torch.float64, device=device, generator=generator) * (2 * math.pi)
        return (packed, phase), {}

    def _haar_with_fixed_signs(self, generator: torch.Generator | None) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        w = init.draw("haar", self.shape, torch.float64, generator)
        signs = self._first_signs().to(w)
        if self.shape[-1] == self.shape[-2]:
            # The transform has det 1, so det W = det D: a reflection takes the Haar measure from one half to the other.
            w[..., 0] *= (torch.linalg.det(w) * signs.prod(-1)).sign()[..., None]
        return (self._moderate(cayley_inverse(w, signs)[0], signs),), {"signs": signs}

    def _moderate(self, skew: Tensor, signs: Tensor) -> Tensor:
        """The same A with eigenvalues beyond `_STEEPEST` brought back to it."""
        n, p = self.shape[-2:]
        if n - p >= _LIGHT_TAILED or not torch.isfinite(skew).all():
            return skew
        a11, a21 = unpack_skew(skew, n, p, False)
        beside = torch.cat([-a21.mT, a21.new_zeros(*a21.shape[:-2], n - p, n - p)], -2)
        a = torch.cat([torch.cat([a11, a21], -2), beside], -1)
        # A^T A commutes with A: what is done to its eigenvectors leaves A skew.
        square, vectors = torch.linalg.eigh(a.mT @ a)
        scale = (_STEEPEST / square.clamp(min=_STEEPEST**2).sqrt()).unsqueeze(-2)
        a = a @ (vectors * scale) @ vectors.mT
        whole = cayley(pack_skew((a - a.mT) / 2), n, n)
        return cayley_inverse(whole[..., :p] * signs.unsqueeze(-2), signs)[0]

    def check_chart(self, chart: Mapping[str, Tensor]) -> str | None:
        """Signs are 1 or -1, and those of `negative` if it was given."""
        if self.is_complex:
            return None
        signs = chart["signs"]
        if self.negative is not None and not bool((signs == self._first_signs().to(signs.device)).all()):
            return f"the signs of its negative=, {sum(s < 0 for s in self.negative)} of them -1"
        return None if are_signs(signs) else "signs of 1 and -1"

    def _first_signs(self) -> Tensor:
        """The prescribed signs, or ones, in the shape of the chart."""
        signs = (1,) * self.shape[-1] if self.negative is None else self.negative
        return torch.tensor(signs, dtype=torch.int8, device="cpu").expand(*self.shape[:-2], -1).clone()

    def _check_reached(self, skew: Tensor, signs: Tensor, w: Tensor) -> None:
        """Raises ImageError if the coordinates, rounded to their dtype, do not give W back."""
        n, p = self.shape[-2:]
        rounded = cayley(skew.to(coordinate_dtype(self.dtype)), n, p, signs=signs)
        difference = torch.linalg.matrix_norm(rounded - w).max().item()
        if not difference <= self.return_bound:
            got = f"that comes back {difference:.2g} away" if math.isfinite(difference) else "that has"
            raise ImageError(
                f"Cayley with negative= needs a frame W for which W D has no eigenvalue at or near -1 (and det W = "
                f"det D if it is square), got one {got}; without negative= it fits."
            )


def _signs(negative: int | Sequence[int] | Tensor, p: int) -> tuple[int, ...]:
    """Turns the option into p signs."""
    if isinstance(negative, int) and not isinstance(negative, bool):
        if not 0 <= negative <= p:
            raise OptionError(f"Cayley needs negative between 0 and p = {p}, got {negative}.")
        return (1,) * (p - negative) + (-1,) * negative
    given = negative.tolist() if isinstance(negative, Tensor) else negative
    if not isinstance(given, Sequence) or len(given) != p or any(s not in (1, -1) for s in given):
        raise OptionError(f"Cayley needs negative to be a count or p = {p} signs of 1 and -1, got {negative!r}.")
    return tuple(int(s) for s in given)
