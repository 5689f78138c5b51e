"""The machine of a run: threads, the processor by its name, memory."""

import contextlib
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch


def peak_memory(device: str) -> dict[str, int]:
    """Returns the most bytes that the process has held so far, and those of its tensors on a GPU, where known.

    >>> peak_memory("cpu").get("peak_bytes", 1) > 0
    True
    """
    peaks = {}
    with contextlib.suppress(ImportError):  # outside POSIX
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        peaks["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if torch.device(device).type == "cuda":
        peaks["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peaks


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Context in which torch uses this many threads on the CPU; the former number comes back after it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def processor(device: str) -> str:
    """Returns the name of what a run on `device` computes on: of the GPU, or of the CPU with its instructions."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"{cpu()} ({torch.backends.cpu.get_cpu_capability()})"


def cpu() -> str:
    """Returns the name of the CPU."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1].strip()
    return platform.processor() or platform.machine()
