"""Figures of one device as a file: what the machine is, and rows that say what they are, and how far they scatter."""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stiefelkit._version import __version__
from stiefelkit.errors import RunError
from stiefelkit.measuring.races.clock import indexed_device
from stiefelkit.training.files import parse_json, write_json
from stiefelkit.training.memory import cpu

KIND = "stiefelkit figures of a device, 1"
"""The kind that a file says it is of."""
SUBJECT = "A page of figures"
"""The first words of error messages."""


@dataclass(frozen=True)
class Figure:
    """One row.

    Args:
        unit: s, limits, eps, bytes, or "law" for one that holds or not.
        median: of the samples; None where a law broke, or a value was not finite.
        spread: between the quartiles.
        beside: further numbers of the row, by the headings of their columns.
        holds: whether a law holds; None for what is no law.
        words: what was found, where a law broke.
    """

    part: str
    table: str
    contender: str
    unit: str
    median: float | None
    spread: float = 0.0
    samples: int = 1
    beside: dict[str, float | None] = field(default_factory=dict)
    holds: bool | None = None
    words: str = ""


@dataclass
class PartOutcome:
    """The outcome of a part: the seconds it took, those that it had, and what ended it before its time, if anything."""

    part: str
    seconds: float
    limit: float
    error: str = ""


@dataclass
class Record:
    """All that was measured on a device.

    Attributes:
        machine: words to facts about it and what runs on it.
        date: ISO 8601.
        rows: a `Figure` as a dict, with "machine", the facts that rows of several files are told apart by, and
            "clocks", what the device said of itself when the row was measured.
        left_out: part to what was left out, and the reason.
    """

    machine: dict[str, str]
    date: str
    command: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    parts: list[PartOutcome] = field(default_factory=list)
    finished: bool = False
    kind: str = KIND

    def add(self, figure: Figure, clocks: dict[str, float]) -> None:
        """Appends a row."""
        named = ("GPU", "CPU", "driver", "CUDA", "torch", "triton", "stiefelkit")
        facts = {name: self.machine[name] for name in named if name in self.machine}
        self.rows.append(dataclasses.asdict(figure) | {"machine": facts, "clocks": clocks})

    @property
    def broken(self) -> list[str]:
        """The laws that do not hold, and the parts that failed."""
        laws = [f"{row['part']}: {row['table']}, {row['contender']}" for row in self.rows if row["holds"] is False]
        return laws + [f"{part.part}: {part.error}" for part in self.parts if part.error]

    def write(self, path: Path) -> None:
        """Replaces a file as a whole."""
        write_json(path, dataclasses.asdict(self))


def read_record(path: Path) -> Record:
    """Reads what `Record.write` has written; raises RunError if there is no such file, or it is another."""
    needs = f"{SUBJECT} needs a file that benchmarks.gpu wrote, got {path}"
    try:
        content: Any = parse_json(path.read_bytes())
    except OSError as error:
        raise RunError(f"{SUBJECT} needs a file that can be read, got {path}: {error.strerror}.") from error
    except ValueError as error:
        raise RunError(f"{needs}: {error}.") from error
    if not isinstance(content, dict) or content.get("kind") != KIND:
        raise RunError(f"{needs}, which says nothing of that kind.")
    try:
        figures = {entry.name for entry in dataclasses.fields(Figure)}
        for row in content["rows"]:
            Figure(**{name: row[name] for name in figures})
        record = Record(**content)
        record.parts = [PartOutcome(**part) for part in content["parts"]]
        return record
    except (KeyError, TypeError) as error:
        raise RunError(
            f"{SUBJECT} needs a whole file of benchmarks.gpu, got {path}, which lacks something: {error}."
        ) from error


def machine(device: str, threads: int, dtype: str) -> dict[str, str]:
    """Returns words to facts about the machine that times depend on, and what runs on it: no names, no paths."""
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = {
        "CPU": cpu(),
        "cores": f"{cores} to use",
        "threads": str(threads),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "BLAS": "MKL" if torch.backends.mkl.is_available() else blas[1] if blas else "",
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
    triton = importlib.util.find_spec("triton") and importlib.metadata.version("triton")
    return {
        "driver": next(iter(_asked(device, "driver_version")), ""),
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
        uuid = getattr(properties, "uuid", None)
        command.append(f"--id=GPU-{uuid}" if uuid else f"--id={indexed_device(device).index}")
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        return [answer.strip() for answer in done.stdout.splitlines()[0].split(",")]
    return []
