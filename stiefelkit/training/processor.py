"""What computes: the processor by its name, and the instructions that torch takes of it."""

import platform
import re
from pathlib import Path

import torch

__all__ = ["cpu", "processor"]


def processor(device: str) -> str:
    """Returns the name of what a run on `device` computes on: of the GPU, or of the CPU with its instructions."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    return f"{cpu()} ({torch.backends.cpu.get_cpu_capability()})"


def cpu() -> str:
    """Returns the name of the CPU."""
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()
