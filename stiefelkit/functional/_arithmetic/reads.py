"""Permits or forbids reads of values on the host: one waits for the device, and ends the capture of its graph."""

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor


class Switch(threading.local):
    """Forbids reads on the host, thread by thread."""

    forbidden = False


switch = Switch()
"""For lines that run so often that a call of `may_sync_host` counts."""


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
