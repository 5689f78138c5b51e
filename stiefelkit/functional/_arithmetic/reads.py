"""Where values may be read on the host: a device has to be waited for, and a graph of it captured without that."""

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor


class Switch(threading.local):
    """Whether this thread reads no value."""

    forbidden = False


switch = Switch()
"""For lines that are run so often that a call of `may_sync_host` counts."""


def may_sync_host(t: Tensor) -> bool:
    """Returns whether a value of a tensor may be branched on: on a CPU, unless `without_reads` says otherwise."""
    return t.is_cpu and not switch.forbidden


@contextlib.contextmanager
def without_reads() -> Iterator[None]:
    """Context in which this thread takes on a CPU the road of other devices, on which no value is read."""
    before, switch.forbidden = switch.forbidden, True
    try:
        yield
    finally:
        switch.forbidden = before
