"""Runs the parts one after the other, each in a process of its own with a time limit, and keeps what they say."""

import datetime
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.scale import SCALES
from stiefelkit.measuring.report.record import Figure, PartOutcome, Record, machine

__all__ = ["GRACE", "measure", "said"]

ROOT = Path(__file__).resolve().parents[2]
GRACE = 15.0
"""Seconds that a part has beyond its limit for the cell at work, before its process is ended."""
Say = Callable[[str], None]


def measure(names: list[str], scale: str, device: str, path: Path, command: str, say: Say) -> Record:
    """Measures parts in their order, and rewrites the file of figures after every cell."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    record = Record(machine(device, 1, "float32"), now, command)
    for name in names:
        limit = PARTS[name].seconds * SCALES[scale].time
        outcome = PartOutcome(name, 0.0, limit)
        record.parts.append(outcome)
        start = time.monotonic()
        words = [sys.executable, "-m", "benchmarks.gpu.worker", name, scale, device, str(limit)]
        for cell in said(words, limit, path.with_name(f"{name}.log")):
            if "error" in cell:
                outcome.error = cell["error"]
            elif "machine" in cell:
                record.machine |= cell["machine"]
            elif "left_out" in cell:
                reasons = record.left_out.setdefault(name, {})
                reasons[cell["left_out"]["what"]] = cell["left_out"]["reason"]
            else:
                record.add(Figure(**cell["figure"]), cell["clocks"])
            outcome.seconds = time.monotonic() - start
            record.write(path)
        rows = sum(row["part"] == name for row in record.rows)
        say(f"{name}: {rows} rows, {outcome.seconds:.0f} of {limit:.0f} s{': ' * bool(outcome.error)}{outcome.error}")
    record.finished = True
    record.write(path)
    return record


def said(command: list[str], seconds: float, log: Path) -> Iterator[dict[str, Any]]:
    """What a process says, a line of JSON each, and at the end {"error": ...} if it did not end well or in time."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    lines: queue.Queue[str | None] = queue.Queue()
    end = time.monotonic() + seconds + GRACE
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths},
            start_new_session=True,
        )
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            while (line := lines.get(timeout=max(end - time.monotonic(), 0.0))) is not None:
                yield json.loads(line)
            if process.wait():
                yield {"error": f"its process ended with {process.returncode}: {_last(log)}"}
        except queue.Empty:
            yield {"error": f"it took more than {seconds + GRACE:.0f} seconds and was ended."}
        finally:
            if process.poll() is None:
                # Its own processes too, as those that measure memory.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _last(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "nothing was said."
