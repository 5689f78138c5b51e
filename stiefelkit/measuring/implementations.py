"""Implementations of maps, ours and those of other libraries; the problem that each gets, and what is timed."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from stiefelkit import init
from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.contract.table import option_names
from stiefelkit.errors import DtypeError, OptionError, StiefelkitError
from stiefelkit.metrics import working_dtype
from stiefelkit.weights.attach import available, orthogonal
from stiefelkit.weights.change import coordinates

__all__ = ["Entry", "FrameProblem", "Implementation", "dtype_of", "own_implementations", "peers"]

LARGEST_LOOP = 1 << 31
"""Bytes that the layers of `layer_loop` may keep for their backward."""
LEARNING_RATE = 1e-4
"""The learning rate of the plain SGD in "step": so small that the coordinates stay what was drawn."""


@dataclass
class FrameProblem:
    """One size of a race; the draws, the same for ours and for peers, come from one seed."""

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
    """An implementation that is ready to run."""

    weight: Callable[[], Tensor]
    parameters: Sequence[Tensor]
    dtype: torch.dtype | None = None


def _step(entry: Entry, g: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.SGD(entry.parameters, lr=LEARNING_RATE)

    def run() -> None:
        optimizer.zero_grad()
        entry.weight().backward(g)
        optimizer.step()

    return run


OPERATIONS: dict[str, Callable[[Entry, Tensor], Callable[[], Any]]] = {
    "forward": lambda entry, g: torch.no_grad()(entry.weight),
    "forward_backward": lambda entry, g: lambda: torch.autograd.grad(entry.weight(), entry.parameters, g),
    "step": _step,
}
"""Name to what is timed, given the entry and dL/dW; in this order, since "step" moves the coordinates."""


@dataclass(frozen=True)
class Implementation:
    """One implementation in the race; those of one family, which is the map that they compute, are compared."""

    family: str
    enter: Callable[[FrameProblem], Entry]


class Holder(nn.Module):
    """A module with nothing but a weight."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight: Tensor = nn.Parameter(weight)
        self.dtype = weight.dtype


def own_implementations(
    names: Collection[str], precisions: Collection[str], options: Mapping[str, object]
) -> dict[str, Implementation]:
    """Returns "name (precision)" to implementation, for all parametrizations and precisions if none are given."""
    classes, found = available(), {}
    for name in names or classes:
        taken = {key: value for key, value in options.items() if key in option_names(classes[name])}
        for precision in (one for one in classes[name].precisions if not precisions or one in precisions):
            words = ", ".join([precision, *(f"{key}={value}" for key, value in taken.items())])
            found[f"{name} ({words})"] = Implementation(name, partial(_enter, name, precision, taken))
    return found


def dtype_of(cls: type[OrthogonalParam], dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that a parametrization is measured in: the complex one of that size where it has to be."""
    if dtype.is_complex or cls.supports((4, 4), dtype) is None or dtype.itemsize == 2:
        return dtype
    return dtype.to_complex()


def near_orthogonal() -> list[str]:
    """Returns the maps whose weights are not frames, and not meant to be, by their traits."""
    names = []
    for name, cls in available().items():
        with suppress(StiefelkitError):
            names += [] if cls((4, 4), dtype=dtype_of(cls, torch.float32)).traits.exact else [name]
    return names


def _enter(name: str, precision: str, options: dict[str, Any], problem: FrameProblem) -> Entry:
    cls = available()[name]
    dtype = dtype_of(cls, problem.dtype)
    problem = problem if dtype == problem.dtype else dataclasses.replace(problem, dtype=dtype)
    reason = cls.supports(problem.shape, dtype, **options)
    if reason is not None:
        raise DtypeError(f"it needs {reason}.")
    blank = torch.full(problem.shape, float("nan"), dtype=dtype, device=problem.device)
    layer = orthogonal(Holder(blank), "weight", name, precision=precision, **options)
    with torch.no_grad():
        for coordinate, c in coordinates(layer, "weight").items():
            c.copy_(_drawn(coordinate, c, problem))
    return Entry(lambda: layer.weight, list(layer.parameters()), layer.dtype)


def _drawn(coordinate: str, c: Tensor, problem: FrameProblem) -> Tensor:
    """Draws coordinates of the kind that peers get; of another kind it takes the initial value times the scale."""
    kind = coordinate.rpartition(".")[2]
    if kind == "skew":
        size = (2 * problem.n if problem.dtype.is_complex else problem.n) ** -0.5
        return problem.normal(*c.shape, size=size, dtype=c.dtype)
    if kind == "reflectors":
        return problem.normal(*c.shape, dtype=c.dtype)
    return problem.angles(*c.shape) if kind in ("angle", "phase") else c * problem.scale


# Those of other libraries


def _function(compute: Callable[..., Tensor], *parameters: Tensor) -> Entry:
    """Enters a bare function of leaf tensors, with torch's autograd behind it."""
    leaves = [parameter.requires_grad_() for parameter in parameters]
    return Entry(lambda: compute(*leaves), leaves)


def _filled(layer: nn.Module, x: Tensor) -> Entry:
    """Enters a module with one parametrized weight, whose tensor is set to X."""
    coordinate_list = cast(Any, layer).parametrizations.weight
    with torch.no_grad():
        coordinate_list.original.copy_(x)
    return Entry(lambda: cast(Tensor, layer.weight), [coordinate_list.original])


def _skew(x: Tensor) -> Tensor:
    """Returns A = L - L^H, L the lower trapezoid of X, filled up with zeros to n x n."""
    square = F.pad(x.tril(), (0, x.shape[-2] - x.shape[-1]))
    return square - square.mH


def _solve(x: Tensor) -> Tensor:
    a = _skew(x)
    eye = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    return torch.linalg.solve(eye + a, eye - a)[..., : x.shape[-1]]


def _matrix_exp(x: Tensor) -> Tensor:
    return torch.matrix_exp(_skew(x))[..., : x.shape[-1]]


def _torch_orthogonal(name: str, based: bool, problem: FrameProblem) -> Entry:
    """Enters torch.nn.utils.parametrizations.orthogonal; `based` is its trivialization, a product with a base."""
    if name == "householder":
        x = _reflectors(problem, problem.p) + torch.eye(problem.n, problem.p, dtype=problem.dtype).to(problem.device)
        count = problem.options.get("reflections", problem.p)
        if count != problem.p:
            raise OptionError(f"torch's Householder map needs as many reflectors as columns, got {count}.")
    else:
        # torch's Cayley map takes A / 2
        x = problem.tangent() * (2 if name == "cayley" else 1)
    layer = parametrizations.orthogonal(Holder(problem.frame()), "weight", name, use_trivialization=based)
    return _filled(layer, x)


def _geotorch(trivialization: str, problem: FrameProblem) -> Entry:
    import geotorch  # pyright: ignore[reportMissingImports]

    if problem.dtype.is_complex:
        raise DtypeError(f"geotorch needs a real dtype, got {problem.dtype}.")
    layer = Holder(problem.frame())
    manifold = (geotorch.SO if problem.n == problem.p else geotorch.Stiefel)(problem.shape, triv=trivialization)
    parametrize.register_parametrization(layer, "weight", manifold.to(layer.weight), unsafe=True)
    # geotorch's Cayley map takes A / 2 as well
    return _filled(layer, problem.tangent() * (2 if trivialization == "cayley" else 1))


def _householder_product(problem: FrameProblem) -> Entry:
    """Enters p columns of a product of reflectors whose leading entry is 1, so that tau is a function of them."""
    p = problem.p

    def compute(x: Tensor) -> Tensor:
        below = x.tril(-1)
        tau = 2 / (1 + below.square().sum(-2))
        return torch.linalg.householder_product(F.pad(below, (0, p - below.shape[-1])), tau)

    return _function(compute, _reflectors(problem, problem.options.get("reflections", p)))


def _reflectors(problem: FrameProblem, count: int) -> Tensor:
    if problem.dtype.is_complex:
        raise DtypeError(f"torch's Householder maps need a real dtype, got {problem.dtype}.")
    return problem.normal(*problem.lead, problem.n, count).tril(-1)


def _layer_loop(problem: FrameProblem) -> Entry:
    """Enters rotations of neighbouring wires, one layer after the other on an n x p matrix, with autograd."""
    if problem.options.get("layout", "brickwall") != "brickwall":
        raise OptionError(f"layer_loop needs the layout brickwall, got {problem.options['layout']!r}.")
    n, layers = problem.n, problem.options.get("layers") or problem.n
    size = layers * math.prod(problem.shape) * problem.dtype.itemsize
    if size > LARGEST_LOOP:
        raise OptionError(
            f"layer_loop keeps a matrix for each layer and needs at most 2 GiB for them, got {size:.2g} B."
        )
    counts = [(n - layer % 2) // 2 for layer in range(layers)]
    angles = [problem.angles(*problem.lead, sum(counts)).to(problem.dtype.to_real())]
    if problem.dtype.is_complex:
        angles += [problem.angles(*problem.lead, size).to(angles[0].dtype) for size in (sum(counts), n)]
    start = torch.eye(n, problem.p, dtype=problem.dtype, device=problem.device).expand(problem.shape)

    def compute(theta: Tensor, phi: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        w = start
        cosines, sines = theta.cos().split(counts, -1), theta.sin().split(counts, -1)
        turns = [None] * layers if phi is None else torch.exp(1j * phi).split(counts, -1)
        for layer, (c, s, turn) in enumerate(zip(cosines, sines, turns, strict=True)):
            first, pairs = layer % 2, c.shape[-1]
            c, s = c.unsqueeze(-1), s.unsqueeze(-1)
            upper, lower = (w[..., first + i : first + i + 2 * pairs - 1 : 2, :] for i in (0, 1))
            if turn is not None:
                upper = upper * turn.unsqueeze(-1)
            turned = torch.stack([c * upper - s * lower, s * upper + c * lower], dim=-2).flatten(-3, -2)
            w = torch.cat([w[..., :first, :], turned, w[..., first + 2 * pairs :, :]], dim=-2)
        return w if last is None else torch.exp(1j * last).unsqueeze(-1) * w

    return _function(compute, *angles)


peers: dict[str, Implementation] = {
    "torch_solve": Implementation("cayley", lambda problem: _function(_solve, problem.tangent())),
    "torch_orthogonal_cayley": Implementation("cayley", partial(_torch_orthogonal, "cayley", False)),
    "torch_orthogonal_cayley_base": Implementation("cayley", partial(_torch_orthogonal, "cayley", True)),
    "geotorch_cayley": Implementation("cayley", partial(_geotorch, "cayley")),
    "torch_householder_product": Implementation("householder", _householder_product),
    "torch_orthogonal_householder": Implementation("householder", partial(_torch_orthogonal, "householder", False)),
    "torch_orthogonal_householder_base": Implementation("householder", partial(_torch_orthogonal, "householder", True)),
    "torch_matrix_exp": Implementation("matrix_exp", lambda problem: _function(_matrix_exp, problem.tangent())),
    "torch_orthogonal_matrix_exp": Implementation("matrix_exp", partial(_torch_orthogonal, "matrix_exp", False)),
    "torch_orthogonal_matrix_exp_base": Implementation("matrix_exp", partial(_torch_orthogonal, "matrix_exp", True)),
    "geotorch_matrix_exp": Implementation("matrix_exp", partial(_geotorch, "expm")),
    "layer_loop": Implementation("givens", _layer_loop),
}
"""Name to implementation; its family says with whom it is compared."""
