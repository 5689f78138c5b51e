"""The product of the manifolds of some parameters, whose tangent vectors are flat.

A tangent vector is one flat real vector, in coordinates in which the metrics are the dot product: of a frame it holds
W Om / s + V instead of U = W Om + V, with s = sqrt(2 / alpha), of a free parameter U itself. The Cayley transform
carries such vectors along isometrically, whatever s is, so that textbook algorithms need to know no manifold.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional import METRICS, tangent_part
from stiefelkit.functional._stiefel.retractions import cayley_curve
from stiefelkit.metrics import defect


@dataclass(frozen=True)
class LineSpot:
    """A point of a straight line along U, as `CayleyPoint` is one of a curve; tangent vectors stay what they are."""

    frame: Tensor
    u: Tensor

    def slope(self, g: Tensor) -> Tensor:
        """<G, U>."""
        return (g.conj() * self.u).real

    def transport(self, z: Tensor) -> Tensor:
        """Z itself."""
        return z


class Free:
    """A parameter that moves freely."""

    def stretched(self, w: Tensor, u: Tensor) -> Tensor:
        """U itself."""
        return u

    def gradient(self, w: Tensor, g: Tensor) -> Tensor:
        """G itself."""
        return g

    def tangent(self, w: Tensor, u: Tensor) -> Tensor:
        """Returns a flat vector without what rounding has put beside the tangent space: U itself."""
        return u

    def bend(self, w: Tensor, g: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the flat Hessian along U, from U and the Euclidean one H: H itself."""
        return lambda u, h: h

    def curve(self, w: Tensor, u: Tensor) -> Callable[[float], Any]:
        """Returns the straight line along U, by its points."""
        return lambda t: LineSpot(torch.add(w, u, alpha=t), u)

    def settled(self, w: Tensor) -> Tensor:
        """W itself."""
        return w


class Frames(Free):
    """Frames (*, n, p) in a metric, moved by the Cayley transform."""

    def __init__(self, metric: str):
        self.metric, self.scale = metric, math.sqrt(2 / METRICS[metric])

    def stretched(self, w: Tensor, u: Tensor) -> Tensor:
        """W Om s + V of W Om + V: the direction of flat coordinates."""
        return u if self.scale == 1 else torch.add(u, w @ (w.mH @ u), alpha=self.scale - 1)

    def gradient(self, w: Tensor, g: Tensor) -> Tensor:
        """Returns the flat gradient of a Euclidean one: W (S - S^H) s / 2 + G - W S, S = W^H G."""
        s = w.mH @ g
        return g - w @ torch.add((1 - self.scale / 2) * s, s.mH, alpha=self.scale / 2)

    def tangent(self, w: Tensor, u: Tensor) -> Tensor:
        """U - W sym(W^H U)."""
        return tangent_part(w, u)

    def bend(self, w: Tensor, g: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the flat Hessian along U from the Euclidean one, H: `riemannian_hessian` with G put in before."""
        s, a = w.mH @ g, 1 - METRICS[self.metric] / 2
        normal = (s + s.mH) / 2
        beside = g - w @ s

        def along(u: Tensor, h: Tensor) -> Tensor:
            if a == 0:
                e = h - u @ normal
                c = w.mH @ e
                return e - w @ ((c + c.mH) / 2)
            y = w.mH @ u
            inside = w.mH @ h
            e = h - u @ normal - beside @ (a * y)
            c = inside + a * (u.mH @ beside) - (s @ y + y @ s) / 2
            # E is W (inside - Y normal) within the columns of W, and shall be W (C - C^H) s / 2 there.
            return e + w @ ((0.5 * self.scale) * (c - c.mH) - inside + y @ normal)

        return along

    def curve(self, w: Tensor, u: Tensor) -> Callable[[float], Any]:
        """Returns the curve along U, by its points."""
        return cayley_curve(w, u).at

    def settled(self, w: Tensor) -> Tensor:
        """W after a Newton step towards the nearest frame."""
        return w - w @ defect(w).mul_(0.5)


class Space:
    """The product of the manifolds of parameters of one precision on one device.

    Args:
        likes: the parameters, in float64 or complex128, for their shapes and fields.
        manifolds: of each, None if it moves freely.
    """

    def __init__(self, likes: Sequence[Tensor], manifolds: Sequence[str | None]):
        self._factors = [Free() if name is None else Frames(name.partition(":")[2]) for name in manifolds]
        self._shapes = [like.shape for like in likes]
        self._complex = [like.is_complex() for like in likes]
        self._sizes = [like.numel() * (1 + like.is_complex()) for like in likes]
        self.size = sum(self._sizes)
        self.is_bounded = None not in manifolds
        within = [like.numel() // like.shape[-2] for like, name in zip(likes, manifolds, strict=True) if name]
        self._columns = math.sqrt(sum(within))
        self.reach = self._columns or 1.0
        """How far apart points are: the square root of how many columns the frames have."""

    def gradient(self, ws: Sequence[Tensor], gs: Sequence[Tensor]) -> Tensor:
        """Returns the flat gradient of Euclidean ones."""
        return self._flat([f.gradient(w, g) for f, w, g in zip(self._factors, ws, gs, strict=True)])

    def tangent(self, ws: Sequence[Tensor], u: Tensor) -> Tensor:
        """Returns a flat vector without what rounding has put beside the tangent spaces."""
        return self._flat([f.tangent(w, x) for f, w, x in zip(self._factors, ws, self._parts(u), strict=True)])

    def directions(self, ws: Sequence[Tensor], u: Tensor) -> list[Tensor]:
        """Returns where a flat vector points, for each parameter."""
        return [f.stretched(w, x) for f, w, x in zip(self._factors, ws, self._parts(u), strict=True)]

    def bends(self, ws: Sequence[Tensor], gs: Sequence[Tensor]) -> list[Callable[[Tensor, Tensor], Tensor]]:
        """Returns what `hessian` needs to know of a point and its Euclidean gradients."""
        return [f.bend(w, g) for f, w, g in zip(self._factors, ws, gs, strict=True)]

    def hessian(
        self, bends: Sequence[Callable[[Tensor, Tensor], Tensor]], hs: Sequence[Tensor], us: Sequence[Tensor]
    ) -> Tensor:
        """Returns the flat Hessian along directions, from the Euclidean one."""
        return self._flat([bend(u, h) for bend, u, h in zip(bends, us, hs, strict=True)])

    def length(self, ws: Sequence[Tensor]) -> float:
        """Returns the Frobenius norm of a point."""
        loose = (torch.linalg.vector_norm(w).item() for f, w in zip(self._factors, ws, strict=True) if type(f) is Free)
        return math.hypot(self._columns, *loose)

    def path(self, ws: Sequence[Tensor], u: Tensor) -> "Path":
        """Returns the curves along a flat vector."""
        return Path(self, [f.curve(w, x) for f, w, x in zip(self._factors, ws, self.directions(ws, u), strict=True)])

    def settled(self, ws: Sequence[Tensor]) -> list[Tensor]:
        """Points without what rounding has put beside the manifolds."""
        return [f.settled(w) for f, w in zip(self._factors, ws, strict=True)]

    def _flat(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns one flat vector of a part for each parameter; of stacks of them one stack."""
        rows = [
            (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x).reshape(
                *x.shape[: x.dim() - len(shape)], -1
            )
            for x, shape in zip(parts, self._shapes, strict=True)
        ]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def _parts(self, u: Tensor) -> list[Tensor]:
        """Of a flat vector, or a stack of them, the part of each parameter."""
        parts, lead = [], u.shape[:-1]
        for x, shape, is_complex in zip(u.split(self._sizes, dim=-1), self._shapes, self._complex, strict=True):
            if is_complex:  # which no view shows if a real part of odd size stands before it
                whole = x if len(self._sizes) == 1 else x.clone(memory_format=torch.contiguous_format)
                parts.append(torch.view_as_complex(whole.reshape(*lead, *shape, 2)))
            else:
                parts.append(x.reshape((*lead, *shape)))
        return parts


@dataclass(frozen=True)
class Path:
    """Curves of all parameters at once."""

    space: Space
    curves: list[Callable[[float], Any]]

    def at(self, t: float) -> "Place":
        """Their points at t."""
        return Place(self.space, [curve(t) for curve in self.curves])


@dataclass(frozen=True)
class Place:
    """The points of all curves at one t."""

    space: Space
    spots: list[Any]

    @property
    def points(self) -> list[Tensor]:
        """Of each parameter."""
        return [spot.frame for spot in self.spots]

    def slope(self, gs: Sequence[Tensor]) -> float:
        """Returns the derivative, in t, of a function with these Euclidean gradients."""
        return sum(spot.slope(g).sum().item() for spot, g in zip(self.spots, gs, strict=True))

    def transport(self, u: Tensor) -> Tensor:
        """Returns a flat vector, or a stack of them (k, size), brought along."""
        parts = self.space._parts(u)
        return self.space._flat([spot.transport(z) for spot, z in zip(self.spots, parts, strict=True)])
