"""What `make bench` measures is predicted before it starts, and quick mode keeps to ten minutes."""

import itertools
import re

import pytest

from benchmarks import peers, plan, scan
from benchmarks.plan import SUITES
from benchmarks.suite import BUDGET, MODES, PATIENCE, VARIABLE, of_race


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: f"{suite.__module__}.{suite.__name__}")
def test_a_cell_of_quick_mode_is_predicted_to_keep_to_its_budget(monkeypatch, suite):
    monkeypatch.setenv(VARIABLE, "quick")
    assert all(suite().predicted("quick", *cell) <= BUDGET for cell in plan.due(suite))


def test_quick_mode_is_predicted_to_take_less_than_two_thirds_of_ten_minutes_of_one_core(monkeypatch):
    # two others at work on two cores leave so much of them
    monkeypatch.setenv(VARIABLE, "quick")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert sum(plan.seconds(suite, plan.due(suite)) for suite in SUITES) < 400


@pytest.mark.parametrize("suite", [scan.Scan, peers.Scan])
def test_a_case_beyond_the_budget_belongs_to_full_and_says_so(monkeypatch, suite):
    cell = next(cell for cell in itertools.product(*suite.axes) if cell[0] == "F" and suite().level(*cell) == "quick")
    monkeypatch.setenv(VARIABLE, "quick")
    assert re.search(r"would take about \d{2,} s", suite().reason_against(*cell) or "")
    monkeypatch.setenv(VARIABLE, "full")
    assert suite().reason_against(*cell) is None


@pytest.mark.parametrize("named", MODES)
def test_a_version_that_takes_longer_than_its_seconds_is_predicted_to_be_called_three_times(named):
    assert of_race(named, [35.0]) - of_race(named, []) == pytest.approx(3 * 35.0)
    assert of_race(named, [1e-3]) - of_race(named, []) < 2 * PATIENCE[named]["seconds"]


def test_the_plan_says_the_cells_and_minutes_of_each_table_and_their_sum(monkeypatch, capsys):
    monkeypatch.setenv(VARIABLE, "smoke")
    monkeypatch.setattr(plan, "slowness", lambda: 60.0)
    assert plan.main() == 0
    rows = {row[0]: row[-2:] for row in map(str.split, capsys.readouterr().out.splitlines()) if len(row) >= 3}
    for suite in SUITES:
        cells, minutes = rows[f"{suite.__module__.partition('.')[2]}.{suite.__name__}"]
        assert int(cells) == len(plan.due(suite))
        assert float(minutes) == pytest.approx(plan.seconds(suite, plan.due(suite)), abs=0.06)
    cells, minutes = rows["all,"]
    assert float(minutes) == pytest.approx(sum(plan.seconds(suite, plan.due(suite)) for suite in SUITES), abs=0.06)
