"""The product of the manifolds of some parameters, whose tangent vectors are flat.

A tangent vector is one flat real vector, in coordinates in which the metrics are the dot product: of a frame it holds
W Om / s + V instead of U = W Om + V, with s = sqrt(2 / alpha), of a free parameter U itself. The Cayley transform
transports such vectors isometrically, whatever s is, so that textbook algorithms need to know no manifold.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from stiefelkit.functional import METRICS, tangent_part
from stiefelkit.functional._stiefel.retractions import CayleyPoint, cayley_curve
from stiefelkit.functional._stiefel.tangents import hessian_at
from stiefelkit.metrics import defect


@dataclass(frozen=True)
class PointOnLine:
    """A point of a straight line along U, where tangent vectors stay what they are."""

    frame: Tensor
    u: Tensor

    def slope(self, g: Tensor) -> Tensor:
        """Returns the derivative of a function with a Euclidean gradient along the line."""
        return (g.conj() * self.u).real

    def transport(self, z: Tensor) -> Tensor:
        """Returns tangent vectors of the start, brought along."""
        return z


def _on_line(w: Tensor, u: Tensor, t: float) -> PointOnLine:
    return PointOnLine(torch.add(w, u, alpha=t), u)


class Frames:
    """Frames (*, n, p) in a metric, moved by the Cayley transform."""

    def __init__(self, metric: str):
        self.metric, self.scale = metric, math.sqrt(2 / METRICS[metric])

    def stretched(self, w: Tensor, u: Tensor) -> Tensor:
        """Returns W Om s + V of W Om + V."""
        return u if self.scale == 1 else torch.add(u, w @ (w.mH @ u), alpha=self.scale - 1)

    def gradient(self, w: Tensor, g: Tensor) -> Tensor:
        """Returns W (S - S^H) s / 2 + G - W S, S = W^H G."""
        s = w.mH @ g
        return g - w @ torch.add((1 - self.scale / 2) * s, s.mH, alpha=self.scale / 2)

    def hessian(self, w: Tensor, g: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        """Returns the flat Hessian along a direction U, of U and the Euclidean Hessian along it."""
        return hessian_at(w, g, METRICS[self.metric], 0.5 * self.scale)


class Space:
    """The product of the manifolds, None where free, of parameters of one precision on one device."""

    def __init__(self, likes: Sequence[Tensor], manifolds: Sequence[str | None]):
        self._factors = [None if name is None else Frames(name.partition(":")[2]) for name in manifolds]
        """Of each parameter; None of a free one, whose vectors, gradients and Hessians are the Euclidean ones."""
        self._shapes = [like.shape for like in likes]
        self._complex = [like.is_complex() for like in likes]
        self._sizes = [like.numel() * (1 + like.is_complex()) for like in likes]
        self.size = sum(self._sizes)
        self.is_bounded = None not in manifolds
        within = [like.numel() // like.shape[-2] for like, name in zip(likes, manifolds, strict=True) if name]
        self._columns = math.sqrt(sum(within))
        self.diameter = self._columns or 1.0
        """How far apart points are: the square root of how many columns the frames have."""

    def gradient(self, ws: Sequence[Tensor], gs: Sequence[Tensor]) -> Tensor:
        """Returns the flat gradient of Euclidean ones."""
        return self._flat([f.gradient(w, g) if f else g for f, w, g in zip(self._factors, ws, gs, strict=True)])

    def tangent(self, ws: Sequence[Tensor], u: Tensor) -> Tensor:
        """Returns a flat vector without what rounding has put beside the tangent spaces."""
        parts = zip(self._factors, ws, self._parts(u), strict=True)
        return self._flat([tangent_part(w, x) if f else x for f, w, x in parts])

    def directions(self, ws: Sequence[Tensor], u: Tensor) -> list[Tensor]:
        """Returns where a flat vector points, for each parameter."""
        return [f.stretched(w, x) if f else x for f, w, x in zip(self._factors, ws, self._parts(u), strict=True)]

    def hessian(self, ws: Sequence[Tensor], gs: Sequence[Tensor]) -> Callable[[Sequence[Tensor], list[Tensor]], Tensor]:
        """Returns the flat Hessian at a point with Euclidean gradients, from directions and the Euclidean Hessian."""
        factors = [f and f.hessian(w, g) for f, w, g in zip(self._factors, ws, gs, strict=True)]
        return lambda us, hs: self._flat([of(u, h) if of else h for of, u, h in zip(factors, us, hs, strict=True)])

    def length(self, ws: Sequence[Tensor]) -> float:
        """Returns the Frobenius norm of a point."""
        free = (torch.linalg.vector_norm(w).item() for f, w in zip(self._factors, ws, strict=True) if f is None)
        return math.hypot(self._columns, *free)

    def path(self, ws: Sequence[Tensor], u: Tensor) -> Callable[[float], "CurvePoint"]:
        """Returns the curves along a flat vector, by their points."""
        curves = [
            cayley_curve(w, x).at if f else partial(_on_line, w, x)
            for f, w, x in zip(self._factors, ws, self.directions(ws, u), strict=True)
        ]
        return lambda t: CurvePoint(self, [curve(t) for curve in curves])

    def on_manifold(self, ws: Sequence[Tensor]) -> list[Tensor]:
        """Returns points after a Newton step towards the nearest frames."""
        return [w - w @ defect(w).mul_(0.5) if f else w for f, w in zip(self._factors, ws, strict=True)]

    def _flat(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns one flat vector of a part for each parameter; of stacks of them one stack."""
        real = [torch.view_as_real(x.resolve_conj()) if x.is_complex() else x for x in parts]
        leads = [x.shape[: x.dim() - len(shape)] for x, shape in zip(parts, self._shapes, strict=True)]
        rows = [x.reshape(*lead, -1) for x, lead in zip(real, leads, strict=True)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def _parts(self, u: Tensor) -> list[Tensor]:
        """Returns the part of each parameter of a flat vector, or of a stack of them."""
        parts, lead = [], u.shape[:-1]
        for x, shape, is_complex in zip(u.split(self._sizes, dim=-1), self._shapes, self._complex, strict=True):
            if is_complex:  # which no view shows if a real part of odd size stands before it
                whole = x if len(self._sizes) == 1 else x.clone(memory_format=torch.contiguous_format)
                parts.append(torch.view_as_complex(whole.reshape(*lead, *shape, 2)))
            else:
                parts.append(x.reshape((*lead, *shape)))
        return parts


@dataclass(frozen=True)
class CurvePoint:
    """The points of the curves of all parameters at one t."""

    space: Space
    parts: list[PointOnLine | CayleyPoint]

    @property
    def points(self) -> list[Tensor]:
        """Returns the points."""
        return [part.frame for part in self.parts]

    def slope(self, gs: Sequence[Tensor]) -> float:
        """Returns the derivative, in t, of a function with these Euclidean gradients."""
        return sum(part.slope(g).sum().item() for part, g in zip(self.parts, gs, strict=True))

    def transport(self, u: Tensor) -> Tensor:
        """Returns a flat vector, or a stack of them (k, size), brought along."""
        parts = self.space._parts(u)
        return self.space._flat([part.transport(z) for part, z in zip(self.parts, parts, strict=True)])
