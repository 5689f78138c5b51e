"""Everything that was measured on a machine as one record: what it is, section by section, as a file and as a page."""

import dataclasses
import datetime
import importlib.metadata
import importlib.util
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stiefelkit._version import __version__
from stiefelkit.errors import RunError, printable
from stiefelkit.files import importing, parse_json, write_json
from stiefelkit.machine import cpu
from stiefelkit.measuring import drift, frames, scan
from stiefelkit.measuring.contest import NO_TIME, ProgressCallback, Race, Row, Schedule, by_reason, quiet
from stiefelkit.measuring.plans import ReportPlan
from stiefelkit.measuring.tables import of_race

if TYPE_CHECKING:
    from jinja2 import Environment

KIND = "stiefelkit measurements, 2"  # the kind that a file says it is of
RACES: dict[str, Callable[[Any, ProgressCallback, Schedule], Iterator[Race]]] = {
    "drift": drift.races,
    "time": frames.races,
    "scan": scan.races,
}


@dataclass
class Part:
    """A section: its races, what was left out and why, the seconds it took and had, and what ended it, if anything."""

    name: str
    seconds: float = 0.0
    limit: float | None = None
    races: list[Race] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    error: str = ""

    @property
    def broken(self) -> list[str]:
        """The laws that do not hold, and what ended it."""
        broken = [(race, row) for race in self.races for row in race.rows if row.figures.get("holds") is False]
        laws = [f"{self.name}: {race.subject}, {row.name}" for race, row in broken]
        return laws + [f"{self.name}: {self.error}"] * bool(self.error)

    @property
    def late(self) -> list[str]:
        """The names that a quick report left out for lack of time."""
        return list({name: None for race in self.races for name, why in race.left_out.items() if why == NO_TIME})


@dataclass
class Record:
    """All that was measured on a machine, whose facts have words, by a command, on a date in ISO 8601."""

    machine: dict[str, str]
    command: str
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"))
    parts: list[Part] = field(default_factory=list)
    finished: bool = False
    kind: str = KIND

    @property
    def broken(self) -> list[str]:
        """The laws that do not hold, and the parts that failed."""
        return [line for part in self.parts for line in part.broken]

    def write(self, path: Path) -> None:
        """Replaces a file as a whole."""
        write_json(path, dataclasses.asdict(self))

    def page(self) -> str:
        """Returns the page: every table and chart of every part, and what was left out."""
        sections = []
        for part in self.parts:
            races = [race for race in part.races if race.rows]
            tables = [of_race(race) for race in races]
            left_out = {name: why for race in part.races for name, why in race.left_out.items()} | part.left_out
            sections.append(
                (part, tables, [drift.chart(race) for race in races if race.operation == "drift"], by_reason(left_out))
            )
        style = files("stiefelkit.measuring").joinpath("page.css").read_text(encoding="utf-8")
        return environment().get_template("page.html").render(record=self, sections=sections, style=style)


def read_record(path: Path) -> Record:
    """Reads what `Record.write` has written; raises RunError if there is no such file, or it is another."""
    with importing("A page of figures", path, RunError, "a whole file of measurements that can be read"):
        content = parse_json(path.read_bytes())
        record = Record(**content)
        if record.kind != KIND or not {"CPU", "device", "stiefelkit"} <= record.machine.keys():
            raise ValueError("it is of another kind")
        record.parts = [Part(**part) for part in content["parts"]]
        for part in record.parts:
            part.races = [race_of(race) for race in part.races]
        return record


def race_of(content: Any) -> Race:
    """Returns the race of what a file has of one."""
    return Race(**{**content, "rows": [Row(**row) for row in content["rows"]]})


def gather(
    plan: ReportPlan, command: str, watch: ProgressCallback = quiet, schedule: Schedule | None = None
) -> Iterator[Record]:
    """Measures section by section, and yields the same record each time, when one is over."""
    schedule = schedule or Schedule.of(plan)
    record = Record(machine(plan.device, plan.threads, plan.dtype), command)
    for number, (section, share) in enumerate(schedule.shared(plan.sections), 1):
        start, place = time.monotonic(), f"{section} ({number}/{len(plan.sections)})"
        part = Part(section)
        record.parts.append(part)

        def placed(what: str, done: int, rounds: int, place: str = place) -> None:
            watch(f"{place}: {what}", done, rounds)

        part.races += RACES[section](plan.plan(section), placed, share)
        part.seconds = time.monotonic() - start
        record.finished = number == len(plan.sections)
        yield record


@cache
def environment() -> "Environment":
    """Returns what the template of pages is read by."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("stiefelkit", "measuring"),
        autoescape=True,
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return made


def machine(device: str, threads: int, dtype: str) -> dict[str, str]:
    """Returns words to facts about the machine that times depend on, and what runs on it: no names, no paths."""
    blas = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    facts = {
        "CPU": cpu(),
        "cores": f"{os.cpu_count() or 1}",
        "threads": str(threads),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "BLAS": "MKL" if torch.backends.mkl.is_available() else blas[1] if blas else "",
    }
    if torch.device(device).type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "GPU": properties.name,
            "multiprocessors": str(properties.multi_processor_count),
            "compute capability": f"{properties.major}.{properties.minor}",
            "GPU memory": f"{properties.total_memory / 2**30:.0f} GiB",
            "L2 cache": f"{properties.L2_cache_size / 2**20:.0f} MiB",
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version() or ""),
            "float32 products": "TF32 allowed" if torch.backends.cuda.matmul.allow_tf32 else "float32",
        }
    facts |= {
        "device": device,
        "dtype": dtype,
        "torch": torch.__version__,
        "triton": (importlib.util.find_spec("triton") and importlib.metadata.version("triton")) or "",
        "stiefelkit": __version__,
        "Python": platform.python_version(),
        "system": f"{platform.system()} on {platform.machine()}",
    }
    return {name: fact for name, fact in facts.items() if fact}
