"""What a machine is, as far as times depend on it: no names and no paths."""

import os
import platform
import re
from pathlib import Path

import torch

from stiefelkit._version import __version__

__all__ = ["machine"]


def machine(device: str, threads: int, dtype: str) -> dict[str, str]:
    """Words to facts about the machine and what runs on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = {
        "CPU": _cpu(),
        "cores": f"{cores} to use",
        "threads": str(threads),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "BLAS": "MKL" if torch.backends.mkl.is_available() else _blas(),
    }
    if torch.device(device).type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(torch.device(device))
        facts["CUDA"] = str(torch.version.cuda)
        facts["float32 products"] = "TF32 allowed" if torch.backends.cuda.matmul.allow_tf32 else "float32"
    facts |= {
        "device": device,
        "dtype": dtype,
        "torch": torch.__version__,
        "stiefelkit": __version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} on {platform.machine()}",
    }
    return {name: fact for name, fact in facts.items() if fact}


def _cpu() -> str:
    try:
        match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1).strip() if match else platform.processor() or platform.machine()


def _blas() -> str:
    match = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return match.group(1) if match else ""
