"""The regression gate: measures bits lost and ratios to peers, and compares them with `baseline.json`.

    python -m benchmarks.gate                      # everything of quick mode
    python -m benchmarks.gate --subset smoke       # what CI looks at, a minute
    python -m benchmarks.gate --tracks drift       # those whose name matches a regular expression
    python -m benchmarks.gate --update             # writes what was measured into the baseline

It ends with 1 and one line for each regression if a frame loses more than half a bit more than in the baseline, if a
ratio is more than 20 % worse, if a device would launch more operators, or if something of the baseline cannot be
measured any more.
"""

import argparse
import itertools
import json
import os
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.suite import MODES, VARIABLE, Suite, mode
from stiefelkit.files import write_atomically
from stiefelkit.machine import cpu

BASELINE = Path(__file__).with_name("baseline.json")
ALLOWED_BITS = 0.5
ALLOWED_RATIO = 1.2
ALLOWED_ELSEWHERE = 2.0
"""On another processor or version of torch than the baseline's, whose ratios are others without any regression."""
TRIES = 4
"""Measurements of a ratio before it counts as worse: noise makes it worse at times, and never better for long."""
UPDATES = 3
"""Measurements of a ratio for the baseline, which takes the median."""


@dataclass(frozen=True)
class Track:
    """One cell of a suite."""

    suite: type[Suite]
    cell: tuple[str, ...]

    @property
    def name(self) -> str:
        """As in the baseline, "drift.Frames(cayley, float32, cpu, 1000 steps)"."""
        return f"{self.suite.__module__.partition('.')[2]}.{self.suite.__name__}({', '.join(self.cell)})"

    @property
    def is_due(self) -> bool:
        """Whether mode and machine allow to measure it."""
        return self.suite().reason_against(*self.cell) is None

    def measured(self) -> float:
        """The figure.

        Raises:
            NotImplementedError: there is none.
        """
        suite = self.suite()
        suite.setup(*self.cell)
        return suite.figure

    def allowed(self, before: float, ratio: float = ALLOWED_RATIO) -> float:
        """The largest figure that is no regression."""
        return {"bits": before + ALLOWED_BITS, "launches": before}.get(self.suite.unit, before * ratio)

    def looks_better(self, before: float, now: float) -> bool:
        """Whether the baseline is out of date."""
        unit = self.suite.unit
        return {"bits": now < before - ALLOWED_BITS, "launches": now < before}.get(unit, now * ALLOWED_RATIO < before)


def tracks() -> Iterator[Track]:
    """All cells whose figures do not depend on the machine, measured here or not."""
    from benchmarks import drift, launches, peers

    counts = (launches.Parametrizations, launches.Optimizers)
    for suite in (drift.Frames, drift.Models, peers.Parametrizations, peers.Optimizers, peers.Scan, *counts):
        for cell in itertools.product(*suite.axes):
            yield Track(suite, cell)


def regression(track: Track, before: float, ratio: float = ALLOWED_RATIO) -> str | None:
    """What is worse than in the baseline, by a factor of `ratio` for ratios, in words; None if nothing is."""
    allowed, best = track.allowed(before, ratio), float("inf")
    for _ in range(TRIES if track.suite.unit == "ratio" else 1):
        try:
            best = min(best, track.measured())
        except NotImplementedError as error:
            return f"{track.name} is not measured any more: {error}"
        except Exception as error:
            return f"{track.name} fails: {type(error).__name__}: {error}"
        if best <= allowed:
            note = ", better: --update keeps it" if track.looks_better(before, best) else ""
            print(f"ok    {track.name}: {best:.3g} {track.suite.unit}, baseline {before:.3g}{note}", flush=True)
            return None
    return f"{track.name}: {best:.3g} {track.suite.unit}, baseline {before:.3g}, allowed {allowed:.3g}"


def compare(found: Sequence[Track], baseline: Mapping[str, float | None], ratio: float = ALLOWED_RATIO) -> list[str]:
    """Measures tracks and returns the regressions."""
    lines = []
    for track in found:
        if track.name not in baseline:
            print(f"new   {track.name}: not in the baseline; --update adds it", flush=True)
            continue
        before = baseline[track.name]
        line = None if before is None else regression(track, before, ratio)
        if line is not None:
            print(f"WORSE {line}", flush=True)
            lines.append(line)
    return lines


def updated(found: Sequence[Track], baseline: Mapping[str, float | None]) -> dict[str, float | None]:
    """Measures tracks and returns the new baseline, without those that are no tracks any more.

    Cells that are refused, such as a complex map in a real dtype, get null.
    """
    known = {track.name for track in tracks()}
    new = {name: figure for name, figure in baseline.items() if name in known}
    for track in found:
        try:
            figure = statistics.median(track.measured() for _ in range(UPDATES if track.suite.unit == "ratio" else 1))
        except NotImplementedError:
            new[track.name] = None
            continue
        new[track.name] = figure if track.suite.unit == "launches" else float(f"{figure:.3g}")
        print(f"{track.name}: {figure:.3g} {track.suite.unit}", flush=True)
    return dict(sorted(new.items()))


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description="Compares with the baseline.")
    parser.add_argument("--subset", choices=MODES, default=mode(), help="how much is measured")
    parser.add_argument("--tracks", default="", metavar="REGEX", help="only tracks whose name matches")
    parser.add_argument("--baseline", type=Path, default=BASELINE, metavar="FILE", help="another baseline")
    parser.add_argument("--update", action="store_true", help="write what is measured into the baseline")
    asked = parser.parse_args(words)
    try:
        asked.tracks = re.compile(asked.tracks)
    except re.error as error:
        parser.error(f"{asked.tracks!r} is no regular expression: {error}")
    os.environ[VARIABLE] = asked.subset
    here = {"torch": torch.__version__.partition("+")[0], "processor": cpu()}
    if not (asked.update or asked.baseline.exists()):
        parser.error(f"{asked.baseline} is no baseline; make it with --update")
    record = json.loads(asked.baseline.read_text()) if asked.baseline.exists() else {"measured_with": {}, "tracks": {}}
    found = [track for track in tracks() if asked.tracks.search(track.name) and track.is_due]
    if not found:
        parser.error(f"no track of the subset {asked.subset} matches {asked.tracks.pattern!r}")
    if asked.update:
        content = {"measured_with": here, "tracks": updated(found, record["tracks"])}
        write_atomically(asked.baseline, (json.dumps(content, indent=2) + "\n").encode())
        return 0
    is_elsewhere = here != record["measured_with"]
    if is_elsewhere:
        before = record["measured_with"]
        print(f"The baseline is of another machine: {before}, this one is {here}. Ratios may be twice theirs.")
    lines = compare(found, record["tracks"], ALLOWED_ELSEWHERE if is_elsewhere else ALLOWED_RATIO)
    known = {track.name for track in tracks()}
    gone = [name for name in record["tracks"] if name not in known and asked.tracks.search(name)]
    lines += [f"{name} is in the baseline, and is no track any more; --update drops it" for name in gone]
    print(f"{len(found)} tracks, {len(lines)} regressions{':' if lines else ''}")
    print("\n".join(lines), end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
