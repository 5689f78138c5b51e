"""Cases of the laws (parametrizations at a shape, with options and a dtype), and the requirements that laws share."""

import io
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit._torch import write_count
from stiefelkit.contract.param import OrthogonalParam, Position, coordinate_dtypes, load_chart_, rounded
from stiefelkit.contract.table import registered
from stiefelkit.errors import ImageError, OptionError
from stiefelkit.metrics import orthogonality_error, permitted_error, rounding_limit, working_dtype
from stiefelkit.testing import seeds
from stiefelkit.testing.suite import Failure, LawBroken, require, require_within
from stiefelkit.weights import attach
from stiefelkit.weights.coordinate_list import CoordinateList

Drawn = tuple[OrthogonalParam, tuple[Tensor, ...]]  # a map with its chart, and coordinates
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One parametrization with options, and the shape and dtype of its frames."""

    cls: type[OrthogonalParam]
    shape: tuple[int, ...]
    dtype: torch.dtype
    options: tuple[tuple[str, Any], ...] = ()
    device: str = "cpu"

    def build(self, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> OrthogonalParam:
        """Makes the map, of another shape or dtype if asked."""
        return self.cls(shape or self.shape, dtype=dtype or self.dtype, device=self.place, **dict(self.options))

    @property
    def place(self) -> str | None:
        """The device; None for the CPU, which leaves it to `torch.device` as a context."""
        return None if self.device == "cpu" else self.device

    @property
    def is_wide(self) -> bool:
        """True if frames are in float64 or complex128, with nothing finer to compute in."""
        return self.dtype == working_dtype(self.dtype)

    def normal(self, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        """Draws a Gaussian matrix of the case's shape, the same numbers on every device."""
        return seeds.normal(self.shape, seed, dtype or self.dtype, self.device)

    def drawn(self, seed: int = 0) -> Drawn:
        """Makes the map with coordinates and chart of its default scheme."""
        param = self.build()
        coordinates, chart = draw(param, param.schemes[0], seed)
        load_chart_(param, chart)
        return self._placed(param, rounded(param, coordinates))

    def random(self, scale: float, seed: int = 0) -> Drawn:
        """Makes the map with Gaussian coordinates of a size, Haar frames for bound ones, on its default chart."""
        param, _ = self.drawn(seed)
        return self._placed(param, random_coordinates(param, scale, seeds.generator(seed + 1)))

    def undrawn(self) -> Drawn:
        """Makes the map with Gaussian coordinates, on the chart that it is built with where none can be drawn."""
        try:
            return self.random(1.0)
        except ImageError:
            param = self.build()
        return self._placed(param, random_coordinates(param, 1.0, seeds.generator(1)))

    def equal(self, fill: float) -> Drawn:
        """Makes the map with all coordinates equal, but for those that must stay on a manifold, as drawn."""
        param, coordinates = self.drawn()
        named = zip(param.coordinates, coordinates, strict=True)
        filled = (c if name in param.manifolds else torch.full_like(c, fill) for name, c in named)
        return self._placed(param, filled)

    def _placed(self, param: OrthogonalParam, drawn: Iterable[Tensor]) -> Drawn:
        return param, tuple(c.to(self.device) for c in drawn)

    def __str__(self) -> str:
        options = "".join(f"-{key}={value}" for key, value in self.options)
        return f"{self.cls.__name__}-{'x'.join(map(str, self.shape))}-{str(self.dtype).removeprefix('torch.')}{options}"


def draw(param: OrthogonalParam, scheme: str, seed: int) -> Position:
    """Returns what `initial` draws; raises LawBroken unless that is a pair, with coordinates of the shapes declared."""
    try:
        drawn: object = param.initial(scheme, seeds.generator(seed))
    except OptionError as error:
        raise LawBroken(Failure("", "", str(error))) from error
    kinds = [type(part).__name__ for part in drawn] if isinstance(drawn, tuple) else type(drawn).__name__
    what = f"initial({scheme!r}) returns {kinds}, and not a tuple of coordinates and a dict, the chart"
    require(kinds == ["tuple", "dict"], what)
    assert isinstance(drawn, tuple)
    shapes, declared = [tuple(c.shape) for c in drawn[0]], list(param.coordinates.values())
    require(shapes == declared, f"initial({scheme!r}) draws coordinates of shapes {shapes}, declared are {declared}")
    return drawn


def random_coordinates(
    param: OrthogonalParam, scale: float, generator: torch.Generator | None = None
) -> tuple[Tensor, ...]:
    """Draws Gaussian coordinates of a standard deviation for a map, Haar frames for those that must stay frames.

    Args:
        param: the map.
        scale: the standard deviation of coordinates that are free.
        generator: source of randomness; torch's default when None.

    Returns:
        One tensor for each of `param.coordinates`, of its shape and dtype.
    """

    def draw(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name in param.manifolds:
            return init.haar(shape, working_dtype(dtype), generator).to(dtype)
        return torch.randn(shape, generator=generator, dtype=dtype) * scale

    dtypes = coordinate_dtypes(param)
    return tuple(draw(name, shape, dtypes[name]) for name, shape in param.coordinates.items())


_DTYPES = (torch.float32, torch.complex64, torch.float64, torch.complex128)


def cases(cls: type[OrthogonalParam], device: str = "cpu") -> list[Case]:
    """Returns the examples of `cls` on a `device` in every dtype that it does, the first ones in each precision."""
    registered.check(cls)
    every = []
    examples = list(cls.examples())
    for precision in cls.precisions:
        if precision != "exact" and not any(options.get("precision") == precision for _, options in examples):
            examples += [(shape, {**options, "precision": precision}) for shape, options in examples[:3]]
    for shape, options in examples:
        for dtype in _DTYPES:
            if cls.supports(shape, dtype, **options) is None:
                every.append(Case(cls, tuple(shape), dtype, tuple(options.items()), device))
    if not every:
        raise OptionError(f"The laws need examples() to give a shape and a dtype, got none from {cls.__name__}.")
    return every


_SMALL = 64  # entries of a frame up to which derivatives in other modes, which are about modes, not sizes, are checked
_IN_EVERY_DTYPE = ("frames", "gradients", "second_derivatives", "batch", "round_trip", "precision")
"""Laws whose bounds depend on the precision."""
_IN_ONE_DTYPE = ("contract", "linear", "checkpoint", "functional_call")
"""Laws that depend on neither precision nor field; all others run on both fields."""
_SLOW = ("compile", "threads", "reads", "meta")
"""Laws that take long, or depend on the code path and not on the numbers: of each kind of frame, one tells."""


def spread(law: str, every: Sequence[Case]) -> list[Case]:
    """Returns the cases that a law is run on: of those that differ in nothing it depends on, one, dtypes by turns."""
    examples: dict[object, list[Case]] = {}
    for case in every:
        if _concerns(law, case):
            examples.setdefault(_example(case), []).append(case)
    kept: dict[object, Case] = {}
    for turn, of_example in enumerate(examples.values()):
        shift = turn % len(of_example)
        for case in of_example[shift:] + of_example[:shift]:
            kept.setdefault(_kind(law, case), case)
    return list(kept.values())


def _example(case: Case) -> str:
    return f"{case.shape} {case.options}"


def _concerns(law: str, case: Case) -> bool:
    *batch, n, p = case.shape
    if law == "batch":
        return bool(batch)
    if law == "linear":
        return not batch
    if law == "second_derivatives":
        return case.is_wide and n * p <= 40
    if law in ("forward_mode", "batched_gradients"):
        return math.prod(case.shape) <= _SMALL
    return law not in _SLOW or p > 1


def _kind(law: str, case: Case) -> object:
    if law in _SLOW:
        *batch, n, p = case.shape
        return case.dtype.is_complex, len(batch), n == p, "" if law == "compile" else str(case.options)
    if law in _IN_EVERY_DTYPE:
        return str(case)
    return _example(case), law in _IN_ONE_DTYPE or case.dtype.is_complex


class Layer(nn.Module):
    """A module whose forward returns its weight."""

    weight: Tensor

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Tensor:
        """Returns the weight."""
        return self.weight


def layer_of(case: Case, seed: int = 0) -> Layer:
    """Makes a module whose `weight` is the case's frame and whose forward returns it."""
    layer = Layer(torch.full(case.shape, float("nan"), dtype=case.dtype, device=case.place))
    generator = seeds.generator(seed)
    return attach.orthogonal(layer, "weight", case.cls, generator=generator, **dict(case.options))


def coordinate_list_of(layer: nn.Module) -> CoordinateList:
    """Returns what carries the coordinates of such a module."""
    return layer.parametrizations.weight  # type: ignore[union-attr, return-value]


def special_frames(case: Case) -> Iterator[tuple[str, Tensor]]:
    """Yields frames at which maps tend to fail, beside Haar ones."""
    dtype, (n, p) = working_dtype(case.dtype), case.shape[-2:]
    generator = seeds.generator(11)
    eye = torch.eye(n, p, dtype=dtype)
    reflection = torch.eye(n, dtype=dtype) - 2 / n * torch.ones(n, n, dtype=dtype)
    for name, w in {
        "the identity": eye,
        "minus the identity": -eye,
        "a permutation": eye[torch.randperm(n, generator=generator)],
        "a cyclic shift": eye.roll(1, 0),
        "a reflection": reflection[:, :p],
        "a sign change": eye * torch.tensor([(-1.0) ** j for j in range(p)], dtype=dtype),
    }.items():
        yield name, w.expand(case.shape).clone().to(case.device)
    for scheme in ("haar", "unit_circle"):
        yield scheme, init.draw(scheme, case.shape, dtype, generator).to(case.device)
    loose = init.haar(case.shape, dtype, generator) * (1 + rounding_limit(p, case.dtype))
    yield "a frame within tolerance", loose.to(case.device)


# What laws require


def saved_and_loaded(value: T, weights_only: bool = True) -> T:
    """Returns what comes back of a value from a file."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=weights_only)


def apart(a: Tensor, b: Tensor) -> float:
    """Returns ||A - B||_F in double precision, the largest of a batch."""
    return torch.linalg.matrix_norm((a - b).detach().to(working_dtype(a.dtype))).max().item()


def require_same_bits(a: Tensor, b: Tensor, what: str) -> None:
    """Requires two tensors to have the same bits, and says how far they are apart."""
    off = torch.linalg.vector_norm((a - b).detach().to(working_dtype(a.dtype))).item()
    require(torch.equal(a, b), f"{what} {off:.3g}", off, 0.0)


def require_close(a: Tensor, b: Tensor, tolerance: float, what: str, size: float = 0.0) -> None:
    """Requires a tensor to be off another by a share of its norm, plus a size, at most."""
    off, norm = torch.linalg.vector_norm(a.to(b.dtype) - b).item(), torch.linalg.vector_norm(b).item()
    require_within(off, tolerance * (norm + size + torch.finfo(torch.float32).tiny), what)


def require_same_frame(
    case: Case, param: OrthogonalParam, coordinates: Iterable[Tensor], a: Tensor, b: Tensor, what: str
) -> None:
    """Requires two roads to one frame to end within 4 limits, and further if the map is not exact; 100 in float64."""
    limits = 100 if case.dtype == working_dtype(case.dtype) else 4  # float64 has nothing finer
    require_within(apart(a, b), limits * rounding_limit(case.shape[-1], case.dtype) + slack(param, coordinates), what)


def require_frame(w: Tensor, in_double: Callable[[], Tensor]) -> None:
    """Requires the limit, or for structured input, whose rounding errors align, 1.2 x what rounding alone gives."""
    error = orthogonality_error(w).max().item()
    permitted = permitted_error(w.shape[-1], w.dtype)
    if not error <= permitted:
        exact = in_double()
        if orthogonality_error(exact).max().item() <= permitted_error(w.shape[-1], exact.dtype):
            rounded = orthogonality_error(exact.to(w.dtype)).max().item()
            permitted = max(permitted, 1.2 * rounded + torch.finfo(w.dtype).eps)
    require_within(error, permitted, "||W^H W - I||_F =")


def require_frame_of(case: Case, layer: Layer) -> None:
    """Requires the frames law of a module's weight, if its map is exact."""
    coordinate_list = coordinate_list_of(layer)
    if coordinate_list.param.traits.exact:
        values = double(coordinate_list.coordinates.values())
        require_frame(layer.weight, lambda: in_double(case, coordinate_list.param)(*values))


def slack(param: OrthogonalParam, coordinates: Iterable[Tensor]) -> float:
    """Returns what two frames of a map that is not exact may differ by beyond those of an exact one."""
    return 0.0 if param.traits.exact else param.error_bound(*coordinates)


def attributes(module: nn.Module) -> tuple[dict[str, object], list[object]]:
    """Returns what a module and those inside hold, so that writing shows, and what keeps that form valid."""
    alive: list[object] = []

    def seen(value: object) -> object:
        if isinstance(value, Tensor):
            alive.append(value)
            return id(value), write_count(value)
        if isinstance(value, Mapping):
            return [(key, seen(entry)) for key, entry in value.items()]
        if isinstance(value, list | tuple):
            return [seen(entry) for entry in value]
        if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
            return value
        alive.append(value)
        return id(value)

    held = {
        f"{path}{'.' if path else ''}{name}": seen(value)
        for path, inner in module.named_modules()
        for name, value in vars(inner).items()
    }
    return held, alive


def double(coordinates: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Returns the same coordinates in float64 or complex128, detached."""
    return tuple(c.detach().to(working_dtype(c.dtype)) for c in coordinates)


def in_double(case: Case, param: OrthogonalParam) -> OrthogonalParam:
    """Returns the same map, chart included, for a float64 or complex128 frame."""
    twin = case.build(dtype=working_dtype(case.dtype))
    load_chart_(twin, param.chart)
    return twin
