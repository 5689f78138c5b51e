"""The contenders of a race of parametrizations, the problem that each gets, and the operations that are timed."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.contract.table import option_names
from stiefelkit.errors import DtypeError, OptimizerError
from stiefelkit.metrics import working_dtype
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
    "FrameProblem",
    "Holder",
    "dtype_of",
    "options_of",
    "our_contenders",
]

APART = ", apart"
"""Behind the name of a contender that maps the frames of a batch one by one."""
GROUPED = ", grouped"
"""Behind the name of a contender that has the frames of a batch as weights or parameters of their own."""

LEARNING_RATE = 1e-4
"""The learning rate of the plain SGD in "step": so small that the coordinates stay what was drawn."""


@dataclass
class FrameProblem:
    """One size of a race.

    The draws, the same for ours and for peers, come from one seed; two contenders get different tensors of
    one distribution.

    Args:
        n: rows of the frame.
        p: columns, :math:`p ≤ n`.
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
        """Draws normal entries with :math:`E |x|^2 = (scale size)^2`, on the device; complex ones if the dtype is."""
        dtype = dtype or self.dtype
        x = torch.randn(*shape, dtype=working_dtype(dtype), generator=self.generator)
        return (x * (size * self.scale)).to(self.device, dtype)

    def angles(self, *shape: int) -> Tensor:
        """Draws angles uniform on (-pi, pi), times the scale, float64."""
        unit = torch.rand(*shape, dtype=torch.float64, generator=self.generator)
        return ((2 * unit - 1) * (math.pi * self.scale)).to(self.device)

    def tangent(self) -> Tensor:
        """Draws a lower trapezoidal X, :math:`E |a|^2 = scale^2 / n` in :math:`A = X - X^H` of norm about 2 scale."""
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
        """Draws dL/dW, with normal entries of :math:`E |g|^2 = 1 / n`."""
        return self.normal(*self.shape, size=self.n**-0.5 / self.scale)


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


def _step(entry: Entry, g: Tensor) -> None:
    if entry.optimizer is None:
        raise OptimizerError("it needs an optimizer along the manifold; stiefelkit bench optimizers races those.")
    entry.optimizer.zero_grad()
    entry.weight().backward(g)
    entry.optimizer.step()


OPERATIONS: dict[str, Callable[[Entry, Tensor], Callable[[], Any]]] = {
    "forward": lambda entry, g: torch.no_grad()(entry.weight),
    "forward_backward": lambda entry, g: lambda: torch.autograd.grad(entry.weight(), entry.parameters, g),
    "step": lambda entry, g: partial(_step, entry, g),
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
    names: Collection[str], precisions: Collection[str], options: dict[str, Any], apart: bool = False
) -> dict[str, Contender]:
    """Returns "name (precision)" to contender, for parametrizations of the registry in each precision that they have.

    All names, and all precisions, if none are given. Options go to those parametrizations that have them, and are named
    with the precision. With `apart` also "name (precision), apart" and "..., grouped": the batch as so many weights of
    their own, mapped one by one, or by `sk.grouped`.
    """
    enters: dict[str, Any] = {"": _enter}
    if apart:
        enters |= {APART: partial(_enter_apart, nullcontext), GROUPED: partial(_enter_apart, grouped)}
    classes, contenders = available(), {}
    for name in names or classes:
        taken = {key: value for key, value in options.items() if key in options_of(classes[name])}
        for precision in (one for one in classes[name].precisions if not precisions or one in precisions):
            words = ", ".join([precision, *(f"{key}={value}" for key, value in taken.items())])
            layer = partial(_layer, name, precision, taken)
            contenders |= {f"{name} ({words}){way}": Contender(name, partial(enters[way], layer)) for way in enters}
    return contenders


def dtype_of(cls: type[OrthogonalParam], dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that a parametrization is measured in: the complex one of that size where it refuses it."""
    return dtype if cls.supports((4, 4), dtype) is None else dtype.to_complex()


def options_of(cls: type[OrthogonalParam]) -> list[str]:
    """Returns the names of the options that a parametrization has besides those of the contract."""
    return [name for name in option_names(cls) if name != "precision"]


def _enter(make: Callable[[FrameProblem], nn.Module], problem: FrameProblem) -> Entry:
    layer = make(problem)
    return _entry(layer, lambda: cast(Tensor, layer.weight))


def _enter_apart(
    context: Callable[[nn.Module], Any], make: Callable[[FrameProblem], nn.Module], problem: FrameProblem
) -> Entry:
    one = dataclasses.replace(problem, batch=1)
    net = nn.ModuleList(make(one) for _ in range(problem.batch))

    def weights() -> Tensor:
        with context(net):
            return torch.stack([cast(Tensor, layer.weight) for layer in net])

    return _entry(net, weights)


def _entry(module: nn.Module, weight: Callable[[], Tensor]) -> Entry:
    groups = parameter_groups(module, lr=LEARNING_RATE)
    optimizer = None if coordinate_manifolds(module) else torch.optim.SGD(groups, lr=LEARNING_RATE)
    return Entry(weight, list(module.parameters()), optimizer)


def _layer(name: str, precision: str, options: dict[str, Any], problem: FrameProblem) -> nn.Module:
    reason = available()[name].supports(problem.shape, problem.dtype, **options)
    if reason is not None:
        raise DtypeError(f"it needs {reason}.")
    blank = torch.full(problem.shape, float("nan"), dtype=problem.dtype, device=problem.device)
    layer = orthogonal(Holder(blank), "weight", name, precision=precision, **options)
    with torch.no_grad():
        for coordinate, c in coordinates(layer, "weight").items():
            c.copy_(_drawn(coordinate, c, problem))
    return layer


def _drawn(coordinate: str, c: Tensor, problem: FrameProblem) -> Tensor:
    """Draws coordinates of the kind that peers get; of another kind it takes the initial value times the scale."""
    kind = coordinate.rpartition(".")[2]
    if kind == "skew":
        size = (2 * problem.n if problem.dtype.is_complex else problem.n) ** -0.5
        return problem.normal(*c.shape, size=size, dtype=c.dtype)
    if kind == "reflectors":
        return problem.normal(*c.shape, dtype=c.dtype)
    return problem.angles(*c.shape) if kind in ("angle", "phase") else c * problem.scale
