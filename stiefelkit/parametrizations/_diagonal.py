"""The diagonal D that maps put beside their frame: signs that the chart fixes if real, phases that train if complex."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = ["component", "diagonal_coordinates", "flaw_of_signs", "unit_signs"]


def component(shape: Sequence[int], is_complex: bool) -> Literal["chart", "connected"]:
    """The component of O(n) that a map with a D reaches, as `Traits` has it: square real frames keep det D's."""
    return "chart" if shape[-1] == shape[-2] and not is_complex else "connected"


def unit_signs(shape: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """The signs of D = I as a buffer."""
    return torch.ones(*shape, dtype=torch.int8, device=device)


def diagonal_coordinates(d: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """What an inverse gives for the entries of D: its phases as a coordinate if complex, its signs as chart if real."""
    return ((d.angle(),), {}) if d.is_complex() else ((), {"signs": torch.where(d < 0, -1, 1).to(torch.int8)})


def flaw_of_signs(chart: Mapping[str, Tensor]) -> str | None:
    """What a chart needs whose signs, if it has any, are not all 1 or -1; no bool is."""
    signs = chart.get("signs")
    fits = signs is None or (signs.dtype != torch.bool and bool(((signs == 1) | (signs == -1)).all()))
    return None if fits else "signs of 1 and -1"
