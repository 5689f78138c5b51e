"""A closure as a function of points, and its derivatives."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stiefelkit.errors import NonFiniteError, OptimizerError, shown
from stiefelkit.metrics import working_dtype
from stiefelkit.numbers import as_python_number
from stiefelkit.optim.deterministic.space import Space

__all__ = ["Objective", "Position"]

NOISE = 8.0
"""Rounding of a loss, at most, over eps and its size: 0.2 of a sum, and more where its terms cancel."""
UNREACHED = 4.0
"""Norm of a gradient that is nothing but rounding, over eps sqrt(p) and the norm of the Euclidean one."""
_PROBES = 2  # points at the distance of rounding where a loss is asked for to measure its rounding
_SAFELY = 2.0  # rounding that is allowed for, over the largest that was measured

_ORDINARY = 2.0**32
"""Largest entry of a gradient from which on, or from whose inverse down, losses and gradients are in units of it."""
_CANCELLED = 1e-3  # share of the Euclidean gradient below which what is left of it is projected once more


@dataclass(frozen=True)
class Position:
    """A point, in float64 or complex128, and what the closure says there.

    Gradients are the Euclidean ones, the flat one and its length. `noise` is what rounding may do to the loss, `floor`
    the length below which a gradient is rounding; `graph` has gradients that can be differentiated, if there are such.
    """

    points: list[Tensor]
    loss: float
    gradients: list[Tensor]
    gradient: Tensor
    norm: float
    noise: float
    floor: float
    graph: list[Tensor] | None
    returned: object


class Objective:
    """A closure that computes a loss of some parameters: with their gradients, as torch's optimizers ask, or without.

    `who` is the optimizer's name, for errors; `space` the product of the parameters' manifolds. With `is_curved`
    gradients can be differentiated, if the closure leaves them to us. Losses and gradients are divided by `unit`, a
    power of 2; None chooses one by the first gradient.
    """

    def __init__(
        self,
        who: str,
        closure: Callable[[], object],
        params: Sequence[Tensor],
        space: Space,
        is_curved: bool = False,
        unit: float | None = None,
    ):
        self.who, self.space, self.evaluations, self.products = who, space, 0, 0
        self._closure, self._params, self._is_curved = closure, params, is_curved
        self.eps, self.unit = torch.finfo(params[0].dtype).eps, unit
        self.scale = unit or 1.0
        """Unit of losses and gradients, chosen by the first gradient."""
        self.lowest = self.reached = math.inf
        """The least losses: of all positions so far, and of those from which iterations began."""
        self.best: Position | None = None
        """The position with the shortest gradient of those whose losses differ from the least by rounding only."""
        self._noise, self.steepest = NOISE, 0.0
        """`steepest` is the length of the longest Euclidean gradient so far."""

    def write(self, points: Sequence[Tensor]) -> None:
        """Sets the parameters."""
        for p, w in zip(self._params, points, strict=True):
            p.detach().copy_(w)

    def at(self, points: list[Tensor]) -> Position:
        """Asks the closure at points."""
        self.write(points)
        return self._asked(points)

    def start(self) -> Position:
        """Asks the closure where the parameters are, after frames were taken to the nearest ones."""
        points = self.space.on_manifold([p.detach().to(working_dtype(p.dtype), copy=True) for p in self._params])
        here = self._asked(points)
        if not math.isfinite(here.loss + here.norm):
            raise NonFiniteError(
                f"{self.who} needs a finite loss and finite gradients, got {here.loss * self.scale:.3g} and a gradient "
                f"of norm {here.norm * self.scale:.3g}; nothing was changed."
            )
        return here

    def on_manifold(self, there: Position) -> Position:
        """Returns a position without what rounding has put beside the manifold."""
        return replace(there, points=self.space.on_manifold(there.points))

    def allows(self, there: Position, noise: float) -> bool:
        """Returns whether a loss is no higher, up to rounding, than where any iteration began."""
        return there.loss <= self.reached + noise

    def measured(self, here: Position) -> tuple[Position, bool]:
        """Measures what rounding does at a position, by asking for points that differ from it by rounding.

        Needed where a closure rounds more than the norm of its gradient tells: it takes differences of large numbers,
        or its gradient vanishes at a minimum while the Hessian does not. Gradients that differ in more than half of
        their digits are those at a kink of the loss, which is no rounding. Returns the position with the floor that was
        measured, and whether losses have more noise than was assumed; it is assumed of the positions that follow.
        """
        draws = torch.Generator().manual_seed(0)
        floor = noise = 0.0
        for _ in range(_PROBES):
            signs = [torch.randint(2, w.shape, generator=draws, device="cpu").to(w.device) * 2 - 1 for w in here.points]
            near = [w * (1 + self.eps * sign) for w, sign in zip(here.points, signs, strict=True)]
            there = self.at(self.space.on_manifold(near))
            floor = max(floor, torch.dist(there.gradient, here.gradient).item())
            noise = max(noise, abs(there.loss - here.loss))
        if floor < math.inf:
            here = replace(here, floor=max(here.floor, min(_SAFELY * floor, math.sqrt(self.eps) * self.steepest)))
        before = self._noise
        if here.noise < noise < math.inf:
            self._noise *= _SAFELY * noise / here.noise
        return here, self._noise > before

    def hessian(self, here: Position) -> Callable[[Tensor], Tensor]:
        """Returns the flat Hessian at a position, by the graph of the gradients or else by differences of them."""
        space = self.space
        hessian = space.hessian(here.points, here.gradients)

        def product(u: Tensor) -> Tensor:
            self.products += 1
            us = space.directions(here.points, u)
            if here.graph is not None:
                hs = [h / self.scale for h in self._differentiated(here.graph, us)]
            else:
                step = math.sqrt(self.eps) * space.diameter / max(torch.linalg.vector_norm(u).item(), 1e-300)
                there = self.at(space.path(here.points, step * u)(1.0).points)
                hs = [(b - a) / step for a, b in zip(here.gradients, there.gradients, strict=True)]
            return hessian(us, hs)

        return product

    def _differentiated(self, graph: list[Tensor], us: Sequence[Tensor]) -> list[Tensor]:
        pairs = [(g, u.to(g.dtype)) for g, u in zip(graph, us, strict=True) if g.requires_grad]
        if not pairs:
            return [torch.zeros_like(u) for u in us]
        grads, along = zip(*pairs, strict=True)
        hs = self._derivatives(grads, along, retain_graph=True)
        return [h.to(u.dtype) for h, u in zip(hs, us, strict=True)]

    def _derivatives(
        self, values: Tensor | Sequence[Tensor], along: Sequence[Tensor] | None = None, **options: bool
    ) -> list[Tensor]:
        """Returns the gradients by all parameters, zeros by those that are frozen."""
        trained = [p for p in self._params if p.requires_grad]
        found = iter(torch.autograd.grad(values, trained, along, materialize_grads=True, **options))
        return [next(found) if p.requires_grad else torch.zeros_like(p) for p in self._params]

    def _asked(self, points: list[Tensor]) -> Position:
        self.evaluations += 1
        for p in self._params:
            p.grad = None
        with torch.enable_grad():
            returned = self._closure()
            graph, is_curved = self._graph(returned)
        dense = [g.to_dense() if g.is_sparse else g for g in graph]
        gradients = [g.detach().to(w.dtype) for g, w in zip(dense, points, strict=True)]
        if self.unit is None:
            self.unit = self.scale = _unit_of(gradients)
        if self.scale != 1:
            gradients = [g / self.scale for g in gradients]
        size = math.hypot(*[torch.linalg.vector_norm(g).item() for g in gradients])
        flat = self.space.gradient(points, gradients)
        norm = torch.linalg.vector_norm(flat).item()
        if norm < _CANCELLED * size:
            flat = self.space.tangent(points, flat)
            norm = torch.linalg.vector_norm(flat).item()
        loss = self._value(returned) / self.scale
        position = Position(
            points=points,
            loss=loss,
            gradients=gradients,
            gradient=flat,
            norm=norm,
            noise=self._noise * self.eps * max(abs(loss), size * self.space.length(points)),
            floor=UNREACHED * self.eps * self.space.diameter * size,
            graph=graph if is_curved else None,
            returned=returned,
        )
        if math.isfinite(loss + norm):
            self.lowest, self.steepest = min(self.lowest, loss), max(self.steepest, size)
            best, noise = self.best, position.noise
            is_low = loss <= self.lowest + noise
            if best is None or loss < best.loss - noise or (is_low and norm < best.norm):
                self.best = replace(position, graph=None, returned=None)
        return position

    def _value(self, returned: object) -> float:
        """Returns a loss as a number; raises OptimizerError for what is no real number."""
        value = as_python_number(returned.detach() if isinstance(returned, Tensor) else returned)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not isinstance(value, int | float):
            got = f"a tensor of shape {tuple(returned.shape)}" if isinstance(returned, Tensor) else shown(returned)
            requirement = "one real number, as loss.real of a complex one"
            raise OptimizerError(f"{self.who} needs a closure that returns the loss, {requirement}, got {got}.")
        return float(value)

    def _graph(self, returned: object) -> tuple[list[Tensor], bool]:
        """Returns the gradients that the closure left, or the loss's, and whether they can be differentiated."""
        left = [p.grad for p in self._params]
        if any(g is not None for g in left):
            gradients = [torch.zeros_like(p) if g is None else g for g, p in zip(left, self._params, strict=True)]
            return gradients, self._is_curved and any(g.requires_grad for g in gradients)
        if not (isinstance(returned, Tensor) and returned.requires_grad):
            raise OptimizerError(
                f"{self.who} needs a closure that returns the loss, a tensor of its parameters, got "
                f"{type(returned).__name__} and no gradients; return it, and call backward() or leave that to the step."
            )
        self._value(returned)
        return self._derivatives(returned, create_graph=self._is_curved), self._is_curved


def _unit_of(gradients: Sequence[Tensor]) -> float:
    """Returns a power of 2 of the size of gradients whose squares may leave the range of a dtype, 1 for all others."""
    parts = [torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in gradients]
    largest = max([torch.linalg.vector_norm(x, math.inf).item() for x in parts if x.numel()], default=0.0)
    if largest == 0 or 1 / _ORDINARY < largest < _ORDINARY or not math.isfinite(largest):
        return 1.0
    return 2.0 ** max(math.frexp(largest)[1], -1000)
