"""Laws, drift and times on a GPU by one command.

    python -m benchmarks.gpu                            # under nine minutes on one data-centre GPU
    python -m benchmarks.gpu --parts laws,drift         # some of the parts
    python -m benchmarks.gpu --dry-run --device cpu     # all of them in small steps, minutes on two cores
    python -m benchmarks.gpu --smoke --device cpu       # in seconds

needs torch and this checkout, and no network; peers that are not installed are left out, and said to be. Each part has
a process of its own with a time limit. OUT/gpu.json is rewritten after every table, OUT/gpu.html at the end;
`stiefelkit report --from OUT/gpu.json` draws the page again. Ends with 1 if a law is broken or a part fails.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.scale import SCALES
from stiefelkit.files import write_atomically
from stiefelkit.measuring.contest import Race
from stiefelkit.measuring.report import Part, Record, machine, race_of

ROOT = Path(__file__).resolve().parents[2]
GRACE = 15.0
"""Seconds that a part has beyond its limit for the table at work, before its process is ended."""


def main(words: list[str] | None = None) -> int:
    """Reads the command line, measures, and writes."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, or cpu with --dry-run or --smoke")
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas; all by default")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="folder of the figures and of the page")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--dry-run", action="store_const", const="dry", dest="scale", help="tiny sizes, few steps")
    form.add_argument("--smoke", action="store_const", const="smoke", dest="scale", help="a glance at every part")
    asked = parser.parse_args(words)
    scale, names = asked.scale or "full", asked.parts.split(",")
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        parser.error(f"No part is named {unknown[0]!r}; there are {', '.join(PARTS)}.")
    is_cuda = torch.device(asked.device).type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        parser.error("There is no CUDA device; --dry-run --device cpu goes the same way without one.")
    if not is_cuda and scale == "full":
        parser.error(f"Times of a GPU need a CUDA device, got {asked.device}; add --dry-run.")
    asked.out.mkdir(parents=True, exist_ok=True)
    form_words = {"full": "", "dry": " --dry-run", "smoke": " --smoke"}[scale]
    command = f"python -m benchmarks.gpu{form_words} --device {asked.device}"
    record = measure(names, scale, asked.device, asked.out / "gpu.json", command, lambda line: print(line, flush=True))
    for part in record.parts:
        for what, reason in part.left_out.items():
            print(f"left out of {part.name}: {what}: {reason}")
    try:
        write_atomically(asked.out / "gpu.html", record.page().encode())
        print(f"Page: {asked.out / 'gpu.html'}")
    except ModuleNotFoundError as error:
        print(f"No page: {error.name} is not installed; stiefelkit report --from draws it elsewhere.")
    print(f"Data: {asked.out / 'gpu.json'}")
    for line in record.broken:
        print(f"BROKEN {line}")
    return 1 if record.broken else 0


def measure(names: list[str], scale: str, device: str, path: Path, command: str, say: Callable[[str], None]) -> Record:
    """Measures parts in their order, and rewrites the file of figures after every table."""
    record, lock = Record(machine(device, 1, "float32"), command), threading.Lock()

    def gather(part: Part, limit: float, number: int, count: int) -> None:
        """Runs a share of a part in its process, and adds what it says; rows of one table belong together."""
        start = time.monotonic()
        share = [str(time.time() + limit), str(number), str(count)]
        words = [sys.executable, "-m", "benchmarks.gpu.worker", part.name, scale, device, *share]
        for said_of in said(words, limit, path.with_name(f"{part.name}{number or ''}.log")):
            with lock:
                if "race" in said_of:
                    add(part, race_of(said_of["race"]))
                part.error = said_of.get("error", part.error)
                part.left_out |= said_of.get("left_out", {})
                part.seconds = time.monotonic() - start
                record.write(path)

    for name in names:
        limit, count = PARTS[name].seconds * SCALES[scale].time, PARTS[name].processes if "cuda" in device else 1
        part = Part(name, limit=limit)
        record.parts.append(part)
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(partial(gather, part, limit), range(count), itertools.repeat(count)))
        rows = sum(len(race.rows) for race in part.races)
        say(f"{name}: {rows} rows, {part.seconds:.0f} of {limit:.0f} s{': ' * bool(part.error)}{part.error}")
    record.finished = True
    record.write(path)
    return record


def add(part: Part, race: Race) -> None:
    """Adds a race to a part, or its rows to those of the same table."""
    same = [each for each in part.races if (each.subject, each.operation) == (race.subject, race.operation)]
    if not same:
        part.races.append(race)
    for each in same:
        each.rows.extend(race.rows)
        each.left_out.update(race.left_out)


def said(command: list[str], seconds: float, log: Path) -> Iterator[dict[str, Any]]:
    """What a process says, a line of JSON each, and at the end {"error": ...} if it did not end well or in time."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    own = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    options: Any = {"stdout": subprocess.PIPE, "text": True, "cwd": ROOT, "env": own, "start_new_session": True}
    with log.open("w") as errors, subprocess.Popen(command, stderr=errors, **options) as process:
        late = threading.Timer(seconds + GRACE, os.killpg, (process.pid, signal.SIGKILL))
        late.start()
        try:
            yield from (json.loads(line) for line in process.stdout or () if line.endswith("\n"))
            process.wait()
        finally:
            in_time = late.is_alive()
            late.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if not in_time:
        yield {"error": f"it took more than {seconds + GRACE:.0f} seconds and was ended."}
    elif process.returncode:
        last = (log.read_text(errors="replace").strip() or "nothing was said.").splitlines()[-1]
        yield {"error": f"its process ended with {process.returncode}: {last}"}


if __name__ == "__main__":
    raise SystemExit(main())
