"""What a report has measured."""

import dataclasses
import datetime
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from stiefelkit.measuring.drift.measure import Skipped, outcomes
from stiefelkit.measuring.drift.run import DriftCurve
from stiefelkit.measuring.growth import measure as growth
from stiefelkit.measuring.growth.measure import GrowthHeat
from stiefelkit.measuring.races import norms, parametrizations, scan
from stiefelkit.measuring.races.course import FrameHeat, Watch
from stiefelkit.measuring.races.norms import NormHeat
from stiefelkit.measuring.races.scan import ScanHeat
from stiefelkit.measuring.report.machine import machine
from stiefelkit.measuring.report.plan import SECTIONS, ReportPlan

__all__ = ["Findings", "gather"]


@dataclass
class Findings:
    """The figures of a report.

    Attributes:
        plan: what was asked for.
        machine: words to facts.
        date: of the measurement, ISO 8601.
        drift: the curves.
        drift_dtypes: of the curves, one each.
        time, growth, norms, scan: heats of their races, in the order of measurement.
        left_out: section to name to the reason why it was not measured.
        seconds: section to how long it took.
        finished: whether all sections are there.
    """

    plan: ReportPlan
    machine: dict[str, str]
    date: str
    drift: list[DriftCurve] = field(default_factory=list)
    drift_dtypes: list[str] = field(default_factory=list)
    time: list[FrameHeat] = field(default_factory=list)
    growth: list[GrowthHeat] = field(default_factory=list)
    norms: list[NormHeat] = field(default_factory=list)
    scan: list[ScanHeat] = field(default_factory=list)
    left_out: dict[str, dict[str, str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    finished: bool = False

    def json(self) -> dict[str, Any]:
        """The same as numbers and words."""
        curves = [
            dataclasses.asdict(curve) | {"dtype": dtype, "worst": curve.worst}
            for curve, dtype in zip(self.drift, self.drift_dtypes, strict=True)
        ]
        rows = {
            section: [dataclasses.asdict(row) for heat in getattr(self, section) for row in heat.rows]
            for section in SECTIONS
            if section != "drift"
        }
        plan = {name: value for name, value in vars(self.plan).items() if name != "scale"}
        return {
            "finished": self.finished,
            "date": self.date,
            "machine": self.machine,
            "plan": plan | {"commands": {name: self.plan.commands(name) for name in self.plan.sections}},
            "drift": curves,
            **rows,
            "left_out": self.left_out,
            "seconds": self.seconds,
        }


def gather(plan: ReportPlan, watch: Watch = lambda what, done, rounds: None) -> Iterator[Findings]:
    """Measures section by section, and yields what is there, the same object each time, when one is over."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes")
    findings = Findings(plan, machine(plan.device, plan.threads, plan.dtype), now)
    for number, section in enumerate(plan.sections, 1):
        start = monotonic()
        place = f"{section} ({number}/{len(plan.sections)})"

        def watch_section(what: str, done: int, rounds: int, place: str = place) -> None:
            watch(f"{place}: {what}", done, rounds)

        left_out = findings.left_out.setdefault(section, {})
        MEASURED[section](findings, watch_section, left_out)
        elsewhere = plan.elsewhere()
        for name in [name for name in left_out if name.split(" (")[0].split(",")[0] in elsewhere]:
            del left_out[name]
        findings.seconds[section] = monotonic() - start
        findings.finished = number == len(plan.sections)
        yield findings


def _drift(findings: Findings, watch: Watch, left_out: dict[str, str]) -> None:
    for plan in findings.plan.drifts():
        steps = plan.steps
        for outcome in outcomes(plan, lambda method, n, p, step, s=steps: watch(f"{method}, {n} x {p}", step, s)):
            if isinstance(outcome, Skipped):
                left_out[outcome.method] = outcome.reason
            else:
                findings.drift.append(outcome)
                findings.drift_dtypes.append(plan.dtype)


def _time(findings: Findings, watch: Watch, left_out: dict[str, str]) -> None:
    for plan in findings.plan.races():
        for package, names in plan.missing_peers().items():
            left_out |= dict.fromkeys(names, f"{package} is not installed.")
        for heat in parametrizations.heats(plan, watch):
            findings.time.append(heat)
            left_out |= {f"{name}, {heat.problem}": reason for name, reason in heat.left_out.items()}


def _growth(findings: Findings, watch: Watch, left_out: dict[str, str]) -> None:
    for heat in growth.heats(findings.plan.growth(), watch):
        findings.growth.append(heat)
        left_out |= heat.left_out


def _norms(findings: Findings, watch: Watch, left_out: dict[str, str]) -> None:
    for plan in findings.plan.norms():
        for heat in norms.heats(plan, watch):
            findings.norms.append(heat)
            left_out |= heat.left_out


def _scan(findings: Findings, watch: Watch, left_out: dict[str, str]) -> None:
    for heat in scan.heats(findings.plan.scan(), watch):
        findings.scan.append(heat)
        left_out |= {f"{name}, case {heat.case.name}": reason for name, reason in heat.left_out.items()}


MEASURED: dict[str, Callable[[Findings, Watch, dict[str, str]], None]] = {
    "drift": _drift,
    "time": _time,
    "growth": _growth,
    "norms": _norms,
    "scan": _scan,
}
