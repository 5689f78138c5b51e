"""Who takes part in a race of parametrizations, and what they do in it."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.contract.table import option_names
from stiefelkit.errors import DtypeError, OptimizerError
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.optim import parameter_groups
from stiefelkit.weights.attach import available, orthogonal
from stiefelkit.weights.change import coordinates
from stiefelkit.weights.find import coordinate_manifolds
from stiefelkit.weights.grouped import grouped

__all__ = [
    "APART",
    "GROUPED",
    "LEARNING_RATE",
    "OPERATIONS",
    "Contender",
    "Entry",
    "Holder",
    "options_of",
    "our_contenders",
]

APART = ", apart"
"""Behind the name of a contender that maps the frames of a batch one by one."""
GROUPED = ", grouped"
"""Behind the name of a contender that has the frames of a batch as weights or parameters of their own."""

LEARNING_RATE = 1e-4
"""Of the plain SGD in "step": so small that the coordinates stay what was drawn."""


@dataclass(frozen=True)
class Entry:
    """A contender that is ready to run.

    Attributes:
        weight: computes the frame.
        parameters: what is trained.
        optimizer: makes one step after a backward; None where plain SGD may not.
    """

    weight: Callable[[], Tensor]
    parameters: Sequence[Tensor]
    optimizer: torch.optim.Optimizer | None


def _forward(entry: Entry, g: Tensor) -> Callable[[], Any]:
    return torch.no_grad()(entry.weight)


def _forward_backward(entry: Entry, g: Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(entry.weight(), entry.parameters, g)


def _step(entry: Entry, g: Tensor) -> Callable[[], Any]:
    def step() -> None:
        if entry.optimizer is None:
            raise OptimizerError("it needs an optimizer along the manifold.")
        entry.optimizer.zero_grad()
        entry.weight().backward(g)
        entry.optimizer.step()

    return step


OPERATIONS: dict[str, Callable[[Entry, Tensor], Callable[[], Any]]] = {
    "forward": _forward,
    "forward_backward": _forward_backward,
    "step": _step,
}
"""Name to what is timed, given the entry and dL/dW; in this order, since "step" moves the coordinates."""


@dataclass(frozen=True)
class Contender:
    """One implementation in the race.

    Args:
        family: the map it computes, by its name in the registry; contenders of one family are compared.
        enter: gets ready; raises a `StiefelkitError` that says what it needs, if it cannot do the problem.
        operations: what it does.
        package: an extra package that it needs.
    """

    family: str
    enter: Callable[[FrameProblem], Entry]
    operations: tuple[str, ...] = tuple(OPERATIONS)
    package: str | None = None


class Holder(nn.Module):
    """A module with nothing but a weight."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)


def our_contenders(
    names: Iterable[str], precisions: Collection[str], options: dict[str, Any], apart: bool = False
) -> dict[str, Contender]:
    """Returns "name (precision)" to contender, for parametrizations of the registry in each precision that they have.

    Args:
        names: registered names.
        precisions: which precisions; all if empty.
        options: given to those parametrizations that have them, and named with the precision.
        apart: also "name (precision), apart" and "..., grouped": the batch as so many weights of their own, mapped one
            by one, or by `sk.grouped`.
    """
    classes, contenders = available(), {}
    for name in names:
        cls = classes[name]
        taken = {key: value for key, value in options.items() if key in options_of(cls)}
        for precision in cls.precisions:
            if not precisions or precision in precisions:
                words = ", ".join([precision, *(f"{key}={value}" for key, value in taken.items())])
                layer = partial(_layer, name, precision, taken)
                contenders[f"{name} ({words})"] = Contender(name, partial(_enter, layer))
                if apart:
                    contenders[f"{name} ({words}){APART}"] = Contender(name, partial(_enter_apart, layer, nullcontext))
                    contenders[f"{name} ({words}){GROUPED}"] = Contender(name, partial(_enter_apart, layer, grouped))
    return contenders


def options_of(cls: type[OrthogonalParam]) -> list[str]:
    """Names of the options that a parametrization has besides those of the contract."""
    return [name for name in option_names(cls) if name != "precision"]


def _enter(make: Callable[[FrameProblem], nn.Module], problem: FrameProblem) -> Entry:
    layer = make(problem)
    return Entry(lambda: cast(Tensor, layer.weight), list(layer.parameters()), _optimizer(layer))


def _enter_apart(
    make: Callable[[FrameProblem], nn.Module], context: Callable[[nn.Module], Any], problem: FrameProblem
) -> Entry:
    one = dataclasses.replace(problem, batch=1)
    layers = [make(one) for _ in range(problem.batch)]
    net = nn.ModuleList(layers)

    def weights() -> Tensor:
        with context(net):
            return torch.stack([cast(Tensor, layer.weight) for layer in layers])

    return Entry(weights, list(net.parameters()), _optimizer(net))


def _optimizer(module: nn.Module) -> torch.optim.Optimizer | None:
    groups = parameter_groups(module, lr=LEARNING_RATE)
    return None if coordinate_manifolds(module) else torch.optim.SGD(groups, lr=LEARNING_RATE)


def _layer(name: str, precision: str, options: dict[str, Any], problem: FrameProblem) -> nn.Module:
    reason = available()[name].supports(problem.shape, problem.dtype, **options)
    if reason is not None:
        raise DtypeError(f"it needs {reason}.")
    blank = torch.full(problem.shape, float("nan"), dtype=problem.dtype, device=problem.device)
    layer = orthogonal(Holder(blank), "weight", name, precision=precision, **options)
    with torch.no_grad():
        for coordinate, c in coordinates(layer, "weight").items():
            drawn = _drawn(coordinate, c, problem)
            c.copy_(c * problem.scale if drawn is None else drawn)
    return layer


def _drawn(coordinate: str, c: Tensor, problem: FrameProblem) -> Tensor | None:
    """Draws coordinates of the kind that peers get; None, for one of no known kind, leaves the initial value."""
    kind = coordinate.rpartition(".")[2]
    if kind == "skew":
        size = (2 * problem.n if problem.dtype.is_complex else problem.n) ** -0.5
        return problem.normal(*c.shape, size=size, dtype=c.dtype)
    if kind == "reflectors":
        return problem.normal(*c.shape, dtype=c.dtype)
    return problem.angles(*c.shape) if kind in ("angle", "phase") else None
