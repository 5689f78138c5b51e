"""Where values may be read on the host, which waits for a GPU, and where float64 is too slow to compute in."""

import contextlib
import os
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

from stiefelkit.errors import OptionError, needs

WEAK = frozenset({(8, 6), (8, 7), (8, 9), (11, 0)})
"""Compute capabilities with a 32nd or a 64th of the rate of float32, beside all from 12.0 on."""
SMALLEST = 64  # columns from which on products are split; below, the number of operators counts


class Switch(threading.local):
    """Forbids reads on the host, thread by thread: one waits for the device, and ends the capture of its graph."""

    forbidden = False


switch = Switch()  # for lines that run so often that a call of `may_sync_host` counts


def may_sync_host(t: Tensor) -> bool:
    """Returns whether a value of a tensor may be branched on: on a CPU, outside of `without_reads`."""
    return t.is_cpu and not switch.forbidden


@contextlib.contextmanager
def without_reads() -> Iterator[None]:
    """Context in which this thread computes on a CPU as on other devices, which read no value on the host."""
    before, switch.forbidden = switch.forbidden, True
    try:
        yield
    finally:
        switch.forbidden = before


def is_weak_by_environment() -> bool | None:
    """Returns whether STIEFELKIT_FLOAT64 declares all devices weak; None if it declares nothing."""
    word = os.environ.get("STIEFELKIT_FLOAT64") or None
    needs(word in (None, "weak", "strong"), OptionError, "STIEFELKIT_FLOAT64", "to be weak or strong", repr(word))
    return None if word is None else word == "weak"


declared_weak = is_weak_by_environment()


def float64_is_weak(device: torch.device) -> bool:
    """Returns whether a device multiplies float64 so slowly that several float32 products cost less, or has none."""
    if declared_weak is not None:
        return declared_weak
    if device.type != "cuda" or torch.version.cuda is None:
        return device.type == "mps"
    properties = torch.cuda.get_device_properties(device)
    return properties.major >= 12 or (properties.major, properties.minor) in WEAK


def splits(m: Tensor) -> bool:
    """Returns whether products of matrices as large as these avoid float64."""
    if declared_weak is None and (m.is_cpu or m.shape[-1] < SMALLEST):
        return False
    return float64_is_weak(m.device)
