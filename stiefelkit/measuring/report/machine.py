"""What a machine is, as far as times depend on it: no names and no paths."""

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess

import torch

from stiefelkit._version import __version__
from stiefelkit.training.memory import cpu

__all__ = ["clocks", "machine"]


def machine(device: str, threads: int, dtype: str) -> dict[str, str]:
    """Returns words to facts about the machine and what runs on it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = {
        "CPU": cpu(),
        "cores": f"{cores} to use",
        "threads": str(threads),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "BLAS": "MKL" if torch.backends.mkl.is_available() else _blas(),
    }
    if torch.device(device).type == "cuda":
        facts["GPU"] = torch.cuda.get_device_name(torch.device(device))
        facts |= _gpu(torch.device(device))
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


def clocks(device: str) -> dict[str, float]:
    """Returns what a GPU says of itself, {} of a CPU: clocks in MHz, temperature, power, and bytes that torch holds."""
    if torch.device(device).type != "cuda":
        return {}
    asked = {
        "SM clock": "clocks.sm",
        "memory clock": "clocks.mem",
        "temperature": "temperature.gpu",
        "power": "power.draw",
    }
    answers = dict(zip(asked, _asked(torch.device(device), *asked.values()), strict=False))
    numbers = {name: float(answer) for name, answer in answers.items() if re.fullmatch(r"[\d.]+", answer)}
    return numbers | {"bytes": float(torch.cuda.max_memory_allocated(torch.device(device)))}


def _gpu(device: torch.device) -> dict[str, str]:
    """Returns facts that times and laws depend on."""
    properties = torch.cuda.get_device_properties(device)
    driver = next(iter(_asked(device, "driver_version")), "")
    triton = importlib.util.find_spec("triton") and importlib.metadata.version("triton")
    return {
        "driver": driver,
        "multiprocessors": str(properties.multi_processor_count),
        "compute capability": f"{properties.major}.{properties.minor}",
        "GPU memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "L2 cache": f"{properties.L2_cache_size / 2**20:.0f} MiB",
        "triton": triton or "",
        "cuDNN": str(torch.backends.cudnn.version() or ""),
    }


def _asked(device: torch.device, *fields: str) -> list[str]:
    """Returns what the driver's own tool says of a GPU; nothing where it is not installed."""
    properties = torch.cuda.get_device_properties(device)
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command.append(f"--id=GPU-{properties.uuid}" if hasattr(properties, "uuid") else f"--id={device.index or 0}")
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return [answer.strip() for answer in done.stdout.splitlines()[0].split(",")]
    return []


def _blas() -> str:
    match = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    return match.group(1) if match else ""
