"""Quick forms: what has no time is left out by name, and nothing else. No test waits."""

import pytest

from stiefelkit.cli import main
from stiefelkit.measuring import contest, drift, frames, scan
from stiefelkit.measuring.contest import NO_TIME, DriftCurve, Schedule
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.plans import DriftPlan, OptimizerRace, ParametrizationRace, ScanCase, ScanRace

SMALL = {"repeats": 1, "seconds": 1e-3}
RACES = {
    "parametrizations": (frames, ParametrizationRace(sizes=((4, 4),), quick=True, **SMALL)),
    "optimizers": (frames, OptimizerRace(sizes=((4, 4),), quick=True, **SMALL)),
    "drift": (drift, DriftPlan(methods=("cayley", "pogo"), sizes=((6, 2), (4, 4)), steps=3, quick=True)),
    "scan": (scan, ScanRace(cases=(ScanCase("A", T=5, n=4, B=2),), quick=True, **SMALL)),
}
OVER = Schedule(0.0)


class Hands:
    """A clock that goes on when it is set."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


@pytest.mark.parametrize("race", RACES)
def test_a_deadline_of_zero_leaves_out_everything_by_name(race):
    room, plan = RACES[race]
    for each in room.races(plan, schedule=OVER):
        assert each.rows == []
        assert set(each.left_out.values()) == {NO_TIME}
        ours = {"scan": ["all"], "drift": ["cayley", "pogo"]}
        assert list(each.left_out) == (ours.get(race) or list(plan.implementations()))


def test_a_method_is_left_out_once_the_time_is_over_and_the_one_before_stays():
    hands = Hands()
    schedule = Schedule(10.0, hands)

    def watch(what, done, rounds):
        hands.time += 4.0

    (race,) = drift.races(DriftPlan(methods=("cayley", "pogo"), sizes=((4, 4),), steps=2), watch, schedule)
    assert [row.name for row in race.rows] == ["cayley"]
    assert race.left_out == {"pogo": NO_TIME}


def test_quick_forms_begin_with_small_sizes():
    sizes = ((512, 512), (1024, 16), (64, 64))
    for plan in (ParametrizationRace(sizes=sizes, quick=True), DriftPlan(sizes=sizes, quick=True)):
        assert plan.sizes == ((1024, 16), (64, 64), (512, 512)), plan
    assert [case.name for case in ScanRace(quick=True).cases] == ["B", "D", "C", "A"]
    assert ParametrizationRace(sizes=sizes).sizes == sizes


# What is said


COMMANDS = {
    "drift": "drift --steps 3 --sizes 4 --methods cayley,pogo",
    "bench": "bench parametrizations --sizes 4 --parametrizations cayley --repeats 1 --seconds 1e-3 --json rows.json",
    "report": "report --sections drift --parametrizations cayley",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_what_it_left_out_and_the_command_that_measures_it(command, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(contest, "QUICK", 0.0)
    assert main([*COMMANDS[command].split(), "--quick"]) == 0
    said = capsys.readouterr().out
    assert NO_TIME in said
    assert "cayley" in said
    assert f"To measure all: stiefelkit {COMMANDS[command]}" in said


def test_ours_have_one_name_beside_peers_and_what_is_no_frame_keeps_its_own():
    from matplotlib.figure import Figure

    from stiefelkit.measuring.drift import draw_panel

    def curve(method: str, *ratios: float) -> DriftCurve:
        return DriftCurve(method, 4, 4, 1.0, list(range(len(ratios))), list(ratios))

    peer = next(iter(peer_optimizers))
    lines = [curve(name, 1.0, 9.0) for name in ("margin", "unconstrained", "pogo:fast", peer)]
    lost = curve("givens", 1.0, float("nan"))
    axes = Figure().subplots()
    draw_panel(axes, [curve("cayley", 0.0, 1.5), curve("pogo", 1.0, 1.2), *lines, lost])
    _, labels = axes.get_legend_handles_labels()
    others = {"margin", "unconstrained", "pogo:fast", peer, "givens"}
    assert set(labels) - {"rounding limit"} == {"stiefelkit, 2 methods", *others}
