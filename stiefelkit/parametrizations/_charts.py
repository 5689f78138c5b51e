"""Charts: the diagonal D beside a frame, signs that stay if real, phases that train if complex; and fixed matrices."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from stiefelkit.contract.param import Component, OrthogonalParam
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.tensors import coordinate_dtype, working_dtype


def component(shape: Sequence[int], is_complex: bool) -> Component:
    """Returns the component of O(n) that a map with a D reaches: square real frames keep det D's."""
    return "chart" if shape[-1] == shape[-2] and not is_complex else "connected"


def component_of_product(*factors: Component) -> Component:
    """Returns that of a product of maps whose first factor has the product's shape."""
    if factors[0] == "connected":
        return "connected"
    if "coordinates" in factors:
        return "coordinates"
    return "chart" if "chart" in factors else "rotations"


def diagonal_coordinates(d: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Returns D as an inverse does: phases as a coordinate if complex, signs as chart if real."""
    return ((d.angle(),), {}) if d.is_complex() else ((), {"signs": torch.where(d < 0, -1, 1).to(torch.int8)})


def check_signs(self: OrthogonalParam, chart: Mapping[str, Tensor]) -> str | None:
    """Refuses signs other than 1 and -1, and bools; a `check_chart`."""
    signs = chart.get("signs")
    fits = signs is None or (signs.dtype != torch.bool and bool(((signs == 1) | (signs == -1)).all()))
    return None if fits else "signs of 1 and -1"


def to_buffer(matrix: Tensor) -> Tensor:
    """Returns a real tensor, [Re, Im] last if complex: `.to(torch.bfloat16)` would drop imaginary parts."""
    return (torch.view_as_real(matrix) if matrix.is_complex() else matrix).clone()


def from_buffer(stored: Tensor, is_complex: bool) -> Tensor:
    """Returns the matrix in float64 or complex128."""
    return torch.view_as_complex(stored.double().contiguous()) if is_complex else stored.double()


def identity_buffer(batch: tuple[int, ...], n: int, dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Returns the identity for frames of a dtype, as a buffer of shape (*, n, n) or (*, n, n, 2)."""
    eye = torch.eye(n, dtype=working_dtype(dtype), device="cpu").expand(*batch, n, n)
    return to_buffer(eye).to(device=device, dtype=coordinate_dtype(dtype))


def check_matrix(self: OrthogonalParam, chart: Mapping[str, Tensor]) -> str | None:
    """Refuses a frame buffer that is not orthogonal or unitary to 100 float32 limits; a `check_chart`."""
    (name,) = self.frame_buffers
    if name not in chart:
        return None
    w = from_buffer(chart[name], self.is_complex)
    fits = orthogonality_error(w).max().item() <= 100 * rounding_limit(w.shape[-1], torch.float32)
    return None if fits else f"an orthogonal {name}"
