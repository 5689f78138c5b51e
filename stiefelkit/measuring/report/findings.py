"""What a report has measured."""

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from stiefelkit.measuring.drift.measure import Skipped, outcomes
from stiefelkit.measuring.drift.run import DriftCurve
from stiefelkit.measuring.races import frames, growth, scan
from stiefelkit.measuring.races.field import Race, Watch, quiet
from stiefelkit.measuring.report.machine import machine
from stiefelkit.measuring.report.plan import ReportPlan

__all__ = ["Findings", "gather"]

RACES: dict[str, Callable[[Any, Watch], Iterator[Race]]] = {
    "time": frames.races,
    "growth": growth.races,
    "norms": frames.races,
    "scan": scan.races,
}


@dataclass
class Findings:
    """The figures of a report.

    Attributes:
        plan: what was asked for.
        machine: words to facts.
        date: of the measurement, ISO 8601.
        drift: the curves.
        time, growth, norms, scan: the races, in the order of measurement.
        left_out: section to name to the reason why it was not measured.
        seconds: section to how long it took.
        finished: whether all sections are there.
    """

    plan: ReportPlan
    machine: dict[str, str]
    date: str
    drift: list[DriftCurve] = field(default_factory=list)
    time: list[Race] = field(default_factory=list)
    growth: list[Race] = field(default_factory=list)
    norms: list[Race] = field(default_factory=list)
    scan: list[Race] = field(default_factory=list)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    finished: bool = False

    def json(self) -> dict[str, Any]:
        """Returns the same as numbers and words."""
        plan = {name: value for name, value in vars(self.plan).items() if name != "scale"}
        return {
            "finished": self.finished,
            "date": self.date,
            "machine": self.machine,
            "plan": plan | {"commands": {name: self.plan.commands(name) for name in self.plan.sections}},
            "drift": [dataclasses.asdict(curve) | {"worst": curve.worst} for curve in self.drift],
            **{section: [row.figures for race in getattr(self, section) for row in race.rows] for section in RACES},
            "left_out": self.left_out,
            "seconds": self.seconds,
        }


def gather(plan: ReportPlan, watch: Watch = quiet) -> Iterator[Findings]:
    """Measures section by section, and yields what is there, the same object each time, when one is over."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    findings = Findings(plan, machine(plan.device, plan.threads, plan.dtype), now)
    elsewhere = plan.elsewhere()
    for number, section in enumerate(plan.sections, 1):
        start, place = monotonic(), f"{section} ({number}/{len(plan.sections)})"

        def watch_section(what: str, done: int, rounds: int, place: str = place) -> None:
            watch(f"{place}: {what}", done, rounds)

        left_out = (_drift if section == "drift" else _races)(findings, section, watch_section)
        findings.left_out[section] = {
            name: reason for name, reason in left_out.items() if name.split(" (")[0].split(",")[0] not in elsewhere
        }
        findings.seconds[section] = monotonic() - start
        findings.finished = number == len(plan.sections)
        yield findings


def _drift(findings: Findings, section: str, watch: Watch) -> dict[str, str]:
    left_out = {}
    for plan in findings.plan.plans(section):
        steps = plan.steps
        for outcome in outcomes(plan, lambda method, n, p, step, s=steps: watch(f"{method}, {n} x {p}", step, s)):
            if isinstance(outcome, Skipped):
                left_out[outcome.method] = outcome.reason
            else:
                findings.drift.append(outcome)
    return left_out


def _races(findings: Findings, section: str, watch: Watch) -> dict[str, str]:
    left_out = {}
    for plan in findings.plan.plans(section):
        if section == "time":
            for package, names in plan.missing_peers().items():
                left_out |= dict.fromkeys(names, f"{package} is not installed.")
        for race in RACES[section](plan, watch):
            getattr(findings, section).append(race)
            place = f", {str(race.subject).partition(':')[0]}" if section in ("time", "scan") else ""
            left_out |= {f"{name}{place}": reason for name, reason in race.left_out.items()}
    return left_out
