"""Quick forms: what has no time is left out by name, and nothing else; predictions and the time left. No test waits."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from stiefelkit.cli import main
from stiefelkit.measuring.drift import run
from stiefelkit.measuring.drift.plan import DriftPlan
from stiefelkit.measuring.drift.run import DriftCurve, band, fitted, measure, outcomes
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.races import clock, frames, growth, scan, schedule
from stiefelkit.measuring.races.plan import GrowthPlan, NormPlan, OptimizerRace, ParametrizationRace, ScanRace
from stiefelkit.measuring.races.scan_cases import ScanCase
from stiefelkit.measuring.races.schedule import NO_TIME, Course, Deadline, Speed, planned
from stiefelkit.measuring.report import findings
from stiefelkit.measuring.report.page import page
from stiefelkit.measuring.report.plan import SECTIONS, ReportPlan
from stiefelkit.testing import seeds

SMALL = {"repeats": 1, "seconds": 1e-3}
CASE = ScanCase("A", T=5, n=4, B=2)
TINY = {
    "drift": {"steps": 4, "sizes": ((4, 4),)},
    "time": {"sizes": ((4, 4),), "precisions": ("exact",), **SMALL},
    "growth": {"sizes": (4, 8), "against": ("n",), **SMALL},
    "norms": {"sizes": ((4, 4),), "factors": (1.0, 100.0)},
    "scan": {"cases": (CASE,), **SMALL},
}
RACES = {
    "parametrizations": (frames, ParametrizationRace(sizes=((4, 4),), quick=True, **SMALL)),
    "optimizers": (frames, OptimizerRace(sizes=((4, 4),), quick=True, **SMALL)),
    "norms": (frames, NormPlan(sizes=((4, 4),), quick=True)),
    "growth": (growth, GrowthPlan(sizes=(4, 8), against=("n",), quick=True, **SMALL)),
    "scan": (scan, ScanRace(cases=(CASE,), quick=True, **SMALL)),
}
OVER = Deadline(0.0)


class Hands:
    """A clock that goes on when it is set."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.mark.parametrize("race", RACES)
def test_a_deadline_of_zero_leaves_out_everything_by_name(race):
    room, plan = RACES[race]
    for each in room.races(plan, deadline=OVER):
        assert each.rows == []
        assert set(each.left_out.values()) == {NO_TIME}
        if race in ("parametrizations", "optimizers", "norms"):
            assert set(each.left_out) == set(plan.contenders())
        else:
            assert any(name.startswith("all") for name in each.left_out)


@pytest.mark.parametrize("race", RACES)
def test_a_quick_form_that_has_time_is_whole(race):
    room, plan = RACES[race]
    endless = dataclasses.replace(plan, quick=False)
    quick, usual = (list(room.races(each, deadline=Deadline(1e9))) for each in (plan, endless))
    assert [{row.contender for row in each.rows} for each in quick] == [
        {row.contender for row in each.rows} for each in usual
    ]
    assert [each.left_out for each in quick] == [each.left_out for each in usual]
    assert all(NO_TIME not in each.left_out.values() for each in quick)


def test_methods_that_have_no_time_are_left_out_of_the_drift_by_name(tmp_path):
    plan = DriftPlan(methods=("cayley", "pogo"), sizes=((6, 2), (4, 4)), steps=3, quick=True)
    outcome = measure(plan, tmp_path, deadline=OVER)
    assert outcome.curves == []
    assert [(each.method, each.n, each.reason) for each in outcome.skipped] == [
        (method, n, NO_TIME) for n in (6, 4) for method in plan.methods
    ]


def test_a_method_is_left_out_once_the_time_is_over_and_the_one_before_stays():
    hands = Hands()
    deadline = Deadline(10.0, hands)

    def watch(what, done, rounds):
        hands.time += 4.0

    found = list(outcomes(DriftPlan(methods=("cayley", "pogo"), sizes=((4, 4),), steps=2), watch, deadline))
    assert isinstance(found[0], DriftCurve)
    assert (found[1].method, found[1].reason) == ("pogo", NO_TIME)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(("left", "steps"), [(1e9, 1000), (125.1, 100), (62.6, 50), (30.0, 20), (0.0, 1)])
def test_a_quick_drift_has_as_many_steps_as_fit(left, steps):
    plan = DriftPlan(methods=("cayley", "pogo"), quick=True)
    found = {(64, 64, "cayley"): (0.0, 0.25), (64, 64, "pogo"): (0.0, 0.75)}
    assert fitted(plan, found, Deadline(left, Hands())).steps == steps


def test_what_ran_before_the_time_was_over_keeps_the_time_of_its_warm_up():
    hands = Hands()

    def ticking(run, calls):
        hands.time += calls
        return float(calls)

    runs: dict[str, clock.Run] = {name: lambda: None for name in ("one", "two", "three")}
    timings = clock.race(runs, ticking, repeats=5, seconds=9.0, is_over=lambda: hands.time >= 2)
    assert {name: timing.samples for name, timing in timings.items()} == {"one": (1.0,), "two": (1.0,)}


def test_samples_of_a_quick_race_share_the_time_left():
    assert Deadline().seconds_each(1.0, 20, 0.5) == 1.0
    assert Deadline(80.0, Hands()).seconds_each(1.0, 20, 0.5) == 0.5
    assert Deadline(30.0, Hands()).part(0.5).left == 15.0


def test_quick_forms_begin_with_small_sizes():
    sizes = ((512, 512), (1024, 16), (64, 64))
    for plan in (ParametrizationRace(sizes=sizes, quick=True), DriftPlan(sizes=sizes, quick=True)):
        assert plan.sizes == ((1024, 16), (64, 64), (512, 512)), plan
    assert [case.name for case in ScanRace(quick=True).cases] == ["B", "D", "C", "A"]
    assert ParametrizationRace(sizes=sizes).sizes == sizes


# What is said


@pytest.mark.parametrize("race", RACES)
def test_every_race_of_a_plan_is_predicted_from_the_speed_of_the_machine(race):
    room, plan = RACES[race]
    here = Speed(operator=1e-6, flop=1e-11, busy=1.0)
    parts = planned(plan, here)
    assert len(parts) == len(list(room.races(plan, deadline=OVER)))
    assert sum(parts) > 0
    assert planned(plan, here._replace(busy=3.0)) == pytest.approx([3 * part for part in parts])
    slower = Speed(operator=1e-3, flop=1e-8, busy=1.0)
    assert sum(planned(plan, slower)) > sum(parts)


def test_the_time_left_follows_the_pace_so_far():
    hands = Hands()
    course = Course([10.0, 30.0], hands)
    assert course.left() == 40.0
    hands.time = 20.0  # twice as slow as predicted
    course.finished()
    assert course.left() == 60.0
    assert course.left(0.5) == pytest.approx(15.0 * 20 / 25)
    course.finished()
    assert course.left() == 0.0


@pytest.fixture
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


COMMANDS = {
    "drift": "drift --steps 3 --sizes 4 --methods cayley,pogo",
    "bench": "bench parametrizations --sizes 4 --parametrizations cayley --repeats 1 --seconds 1e-3 --json rows.json",
}


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_it_left_out_and_the_command_that_measures_it(command, monkeypatch, capsys):
    monkeypatch.setattr(schedule, "QUICK", 0.0)
    assert main([*COMMANDS[command].split(), "--quick"]) == 0
    said = capsys.readouterr().out
    assert "Quick form: it ends in under a minute" in said
    assert NO_TIME in said
    assert "cayley" in said
    (line,) = [line for line in said.splitlines() if line.startswith("To measure what was left out: stiefelkit ")]
    assert "--quick" not in line
    capsys.readouterr()
    assert main(line.partition(": stiefelkit ")[2].split()) == 0
    said = capsys.readouterr().out
    assert NO_TIME not in said
    assert "on this machine" in said


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_quick_command_that_has_time_leaves_nothing_out(command, monkeypatch, capsys):
    monkeypatch.setattr(schedule, "QUICK", 1e9)
    assert main([*COMMANDS[command].split(), "--quick"]) == 0
    said = capsys.readouterr().out
    assert "left out" not in said
    assert "cayley" in said


APART = {
    "drift": "drift --steps 3 --sizes 4 --methods cayley,margin,fourier --out mine",
    "bench": "bench parametrizations --sizes 4 --parametrizations cayley,margin,fourier --operations forward "
    "--repeats 1 --seconds 1e-3",
}


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
@pytest.mark.parametrize("command", APART)
def test_maps_that_need_a_complex_weight_have_a_command_and_those_near_orthogonal_a_remark(command, capsys):
    assert main(APART[command].split()) == 0
    said = capsys.readouterr().out
    assert "margin: near-orthogonal by design" in " ".join(said.split())
    (line,) = [line for line in said.splitlines() if line.startswith("To measure fourier: stiefelkit ")]
    assert "--dtype complex64" in line
    assert main(line.partition(": stiefelkit ")[2].split()) == 0
    said = capsys.readouterr().out
    assert "needs a complex" not in said
    assert "fourier" in said


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
def test_a_quick_drift_says_how_many_steps_it_makes_and_how_long_that_takes_before_it_begins(monkeypatch, capsys):
    monkeypatch.setattr(run, "fitted", lambda plan, found, deadline: dataclasses.replace(plan, steps=2))
    begun = []
    monkeypatch.setattr(run, "outcomes", lambda *_: iter([begun.append(capsys.readouterr().out)] and []))
    assert main("drift --steps 3 --sizes 4 --methods cayley --quick --out mine".split()) == 0
    (said,) = begun
    assert "2 steps of 3, as many as fit; for all: stiefelkit drift --steps 3" in said
    assert "About a second on this machine." in said


@pytest.mark.usefixtures("_in_a_folder_of_its_own")
def test_a_report_without_time_has_every_section_and_the_names_of_what_it_lacks(monkeypatch, capsys):
    monkeypatch.setattr(schedule, "QUICK", 0.0)
    monkeypatch.setattr("stiefelkit.measuring.report.plan.QUICK", TINY)
    assert main("report --quick --json figures.json".split()) == 0
    said = capsys.readouterr().out
    left_out = json.loads(Path("figures.json").read_text())["left_out"]
    text = Path("report.html").read_text()
    for section in SECTIONS:
        assert NO_TIME in left_out[section].values()
        assert f"Left out of {section}: " in said
        assert f'id="{section}"' in text
    assert said.count("To measure what was left out: stiefelkit ") == len(SECTIONS)


def test_a_quick_report_that_has_time_is_whole():
    plan = ReportPlan(quick=True, scale=TINY, seed=seeds.seed(), parametrizations=("cayley", "fourier"), peers=False)
    found = list(findings.gather(plan, deadline=Deadline(1e9)))[-1]
    assert found.finished
    assert all(NO_TIME not in left_out.values() for left_out in found.left_out.values())
    assert {curve.method for curve in found.drift} >= {"cayley", "fourier"}
    assert "quick report" in page(found)


# The band


def curve(method: str, *ratios: float) -> DriftCurve:
    return DriftCurve(method, 4, 4, 1.0, list(range(len(ratios))), list(ratios))


def test_ours_are_one_band_beside_peers_and_what_is_no_frame_keeps_its_line(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    peer = next(iter(peer_optimizers.names()))
    ours = [curve("cayley", 0.0, 1.5), curve("pogo", 1.0, 1.2)]
    lines = [curve(name, 1.0, 9.0) for name in ("margin", "unconstrained", "pogo:fast", peer)]
    lines.append(curve("givens", 1.0, math.nan))
    assert band([*ours, *lines]) == ours
    assert band(ours) == []
    axes = Figure().subplots()
    run.draw_panel(axes, [*ours, *lines], run.looks([each.method for each in lines]))
    _, labels = axes.get_legend_handles_labels()
    assert labels.count("stiefelkit, 2 methods") == 1
    assert set(labels) == {"stiefelkit, 2 methods", *(each.method for each in lines)}
    (drawn,) = axes.collections
    heights = {float(y) for path in drawn.get_paths() for y in np.asarray(path.vertices)[:, 1]}
    assert heights == {1.0, 1.2, 1.5}


def test_steps_beside_a_single_point_are_whole():
    from matplotlib.figure import Figure

    from stiefelkit.training.figure import step_scale

    for step in (0, 1, 3):
        axes = Figure().subplots()
        axes.plot([step], [0.5])
        step_scale(axes)
        shown = [tick for tick in axes.get_xticks() if tick <= axes.get_xlim()[1]]
        assert all(float(tick).is_integer() for tick in shown)
        assert 0 in shown
