"""Where values may be read on the host: a device has to be waited for, and a graph of it captured without that."""

import contextlib
import threading
from collections.abc import Iterator

from torch import Tensor

__all__ = ["reads_are_free", "without_reads"]


class _Switch(threading.local):
    forbidden = False


_switch = _Switch()


def reads_are_free(t: Tensor) -> bool:
    """Whether a value of a tensor may be branched on: on a CPU, unless `without_reads` says otherwise."""
    return t.is_cpu and not _switch.forbidden


@contextlib.contextmanager
def without_reads() -> Iterator[None]:
    """Context in which this thread takes on a CPU the road of other devices, on which no value is read."""
    before, _switch.forbidden = _switch.forbidden, True
    try:
        yield
    finally:
        _switch.forbidden = before
