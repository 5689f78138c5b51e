"""The number of CPU threads, for a while."""

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["threads"]


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Context in which torch uses this many threads on the CPU; the former number comes back after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
