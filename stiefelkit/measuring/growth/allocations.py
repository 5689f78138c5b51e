"""The most memory that torch holds at once while something runs, counted allocation by allocation."""

import os
from typing import Any

import torch

from stiefelkit.measuring.races.clock import Run

__all__ = ["peak_bytes"]


def peak_bytes(run: Run, device: torch.device) -> int:
    """Bytes by which what torch has allocated grows at most while a function runs once.

    On the CPU torch's profiler names each allocation, so that the figure does not depend on the machine; work space
    that BLAS and LAPACK take for themselves is not in it.

    Args:
        run: what is measured; run it once before, so that what is made at first use is there.
        device: where it works.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler announces itself on standard error
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    results: Any = profile.profiler and profile.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
