"""Which devices compute float64 slowly, and are spared its products."""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import Tensor

from stiefelkit.errors import OptionError

VARIABLE = "STIEFELKIT_FLOAT64"
"""The environment variable that says "weak" or "strong" of all devices, whatever they are."""
VERDICTS = {"weak": True, "strong": False}
WEAK = frozenset({(8, 6), (8, 7), (8, 9), (11, 0)})
"""Compute capabilities with a 32nd or a 64th of the rate of float32, beside all from 12.0 on."""
SMALLEST = 64
"""Columns from which on products are split; below, what counts is how many operators there are."""


class _Taken:
    """What devices are taken for: what was said, or None for what they are."""

    verdict: bool | None = None


def _said() -> bool | None:
    words = os.environ.get(VARIABLE)
    if words and words not in VERDICTS:
        raise OptionError(f"{VARIABLE} needs to be weak or strong, got {words!r}.")
    return VERDICTS[words] if words else None


_Taken.verdict = _said()


@contextlib.contextmanager
def taken_for(verdict: str) -> Iterator[None]:
    """Context in which all devices are taken for "weak" or "strong" in float64, at matrices of any size.

    Raises:
        OptionError: it is neither.
    """
    if verdict not in VERDICTS:
        raise OptionError(f"taken_for needs weak or strong, got {verdict!r}.")
    before, _Taken.verdict = _Taken.verdict, VERDICTS[verdict]
    try:
        yield
    finally:
        _Taken.verdict = before


def float64_is_weak(device: torch.device) -> bool:
    """Returns whether a device multiplies float64 so slowly that several float32 products cost less, or has none."""
    if _Taken.verdict is not None:
        return _Taken.verdict
    if device.type != "cuda" or torch.version.cuda is None:
        return device.type == "mps"
    properties = torch.cuda.get_device_properties(device)
    return properties.major >= 12 or (properties.major, properties.minor) in WEAK


def splits(m: Tensor) -> bool:
    """Returns whether products of matrices as large as these are to be spared float64."""
    if _Taken.verdict is None and (m.is_cpu or m.shape[-1] < SMALLEST):
        return False
    return float64_is_weak(m.device)
