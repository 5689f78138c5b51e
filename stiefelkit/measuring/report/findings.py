"""The figures of a report, measured section by section."""

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from stiefelkit.measuring.drift.run import DriftCurve, fitted, outcomes, pace
from stiefelkit.measuring.races import frames, growth, scan
from stiefelkit.measuring.races.field import Race, Watch, quiet
from stiefelkit.measuring.races.schedule import NO_TIME, Course, Deadline, deadline_of, planned
from stiefelkit.measuring.report.plan import SHARES, ReportPlan
from stiefelkit.measuring.report.record import machine

RACES: dict[str, Callable[[Any, Watch, Deadline], Iterator[Race]]] = {
    "time": frames.races,
    "growth": growth.races,
    "norms": frames.races,
    "scan": scan.races,
}


@dataclass
class Findings:
    """The figures of a report, its races in the order of measurement.

    Attributes:
        machine: words to facts.
        date: of the measurement, ISO 8601.
        left_out: section to name to the reason why it was not measured.
        seconds: section to how long it took.
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


def course_of(plan: ReportPlan) -> Course:
    """Predicts how long the parts of a report take: each weight's drift and each race, in their order."""
    parts = []
    for section in plan.sections:
        for each in plan.plans(section):
            if section == "drift":
                parts += [start + each.steps * step for start, step in pace(each, Deadline()).values()]
            else:
                parts += planned(each)
    return Course(parts)


def gather(
    plan: ReportPlan, watch: Watch = quiet, deadline: Deadline | None = None, course: Course | None = None
) -> Iterator[Findings]:
    """Measures section by section, and yields what is there, the same object each time, when one is over.

    Each section has a share of the time until the deadline; the course is moved on with each part that is over.
    """
    deadline, course = deadline or deadline_of(plan), course or Course([])
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    findings = Findings(plan, machine(plan.device, plan.threads, plan.dtype), now)
    elsewhere = plan.elsewhere()
    for number, section in enumerate(plan.sections, 1):
        start, place = monotonic(), f"{section} ({number}/{len(plan.sections)})"
        part = deadline.part(SHARES[section] / sum(SHARES[name] for name in plan.sections[number - 1 :]))

        def watch_section(what: str, done: int, rounds: int, place: str = place) -> None:
            watch(f"{place}: {what}", done, rounds)

        findings.left_out[section] = {
            name: reason
            for name, reason in dict(_left_out(findings, section, watch_section, part, course)).items()
            if name.split(" (")[0].split(",")[0] not in elsewhere
        }
        findings.seconds[section] = monotonic() - start
        findings.finished = number == len(plan.sections)
        yield findings


def _left_out(
    findings: Findings, section: str, watch: Watch, deadline: Deadline, course: Course
) -> Iterator[tuple[str, str]]:
    """Measures a section, and yields what is left out of it, and why."""
    plans, counts = findings.plan.plans(section), [len(names) for names in findings.plan.groups().values()]
    if section == "drift" and findings.plan.quick:  # as many steps in one group as in the other
        found = {key: each for plan in plans for key, each in pace(plan, deadline.part(1 / 4)).items()}
        steps = fitted(plans[0], found, deadline).steps
        plans = [dataclasses.replace(plan, steps=steps) for plan in plans]
    for done, plan in enumerate(plans):
        share = counts[done] / sum(counts[done : len(plans)]) if section in ("time", "norms") else 1.0
        part = deadline.part(share)
        if section == "drift":
            for found in outcomes(plan, watch, part):
                course.finished()
                if isinstance(found, DriftCurve):
                    findings.drift.append(found)
                else:
                    yield found.method, found.reason
            continue
        for package, names in plan.missing_peers().items() if section == "time" else ():
            yield from ((name, f"{package} is not installed.") for name in names)
        for race in RACES[section](plan, watch, part):
            course.finished()
            getattr(findings, section).append(race)
            place = f", {str(race.subject).partition(':')[0]}" if section in ("time", "scan") else ""
            left_out = race.left_out
            if not race.rows and NO_TIME in left_out.values() and section != "growth":
                whole = "all" if section == "scan" or plan.dtype == findings.plan.dtype else f"all in {plan.dtype}"
                left_out = {name: reason for name, reason in left_out.items() if reason != NO_TIME} | {whole: NO_TIME}
            yield from ((f"{name}{place}", reason) for name, reason in left_out.items())
