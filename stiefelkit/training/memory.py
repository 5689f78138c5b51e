"""How much memory a run has needed."""

import sys

import torch

__all__ = ["peak_memory"]


def peak_memory(device: str) -> dict[str, int]:
    """Returns the most bytes that the process has held so far, and those of its tensors on a GPU, where known.

    >>> peak_memory("cpu").get("peak_bytes", 1) > 0
    True
    """
    peaks = {}
    try:
        import resource
    except ImportError:  # not outside POSIX
        pass
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peaks["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if torch.device(device).type == "cuda":
        peaks["peak_device_bytes"] = torch.cuda.max_memory_allocated(device)
    return peaks
