"""What the laws require with, and how they word what they found."""

import io
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from stiefelkit._torch import write_count
from stiefelkit.contract.param import OrthogonalParam, load_chart_
from stiefelkit.metrics import orthogonality_error, permitted_error, rounding_limit, working_dtype
from stiefelkit.testing.cases import Case, Layer, coordinate_list_of
from stiefelkit.testing.suite import require_within

T = TypeVar("T")


def saved_and_loaded(value: T, weights_only: bool = True) -> T:
    """Returns what comes back of a value from a file."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=weights_only)


def apart(a: Tensor, b: Tensor) -> float:
    """Returns ||A - B||_F in double precision, the largest of a batch."""
    return torch.linalg.matrix_norm((a - b).detach().to(working_dtype(a.dtype))).max().item()


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
