"""The race of the scan: who takes part, what is compared with what, how memory is measured. No test asserts a time."""

import json
from pathlib import Path

import pytest
import torch

from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.measuring import scan as scan_race
from stiefelkit.measuring.plans import CASES, ScanCase, ScanRace, read_case
from stiefelkit.measuring.scan import (
    LOOP,
    LOSSES,
    Sequences,
    drawn,
    fast_backends,
    memory_of,
    ours,
    picked_backend,
    races,
    recurrence_peers,
)
from stiefelkit.testing import seeds

REAL = ScanCase("real", T=6, n=4, B=3, m=2, matched=5)
COMPLEX = ScanCase("complex", T=5, n=4, B=3, is_complex=True)
KEYS = [
    *("operation", "case", "contender", "T", "n", "B", "m", "is_complex", "activation", "dtype", "device"),
    *("seconds", "spread", "samples", "limit_units", "time_over_ours", "memory_sequence", "memory_last_state"),
]
QUICK = ["--repeats", "2", "--seconds", "1e-3"]
TWO = "T=4,n=3,B=2"


def plan(**changes) -> ScanRace:
    return ScanRace(**{"seed": seeds.seed(), "cases": (REAL,), "repeats": 2, "seconds": 1e-3, "peers": True, **changes})


def float64(case: ScanCase, activation: str = "modrelu") -> Sequences:
    return Sequences(case, activation, torch.float64)


# The cases


@pytest.mark.slow
def test_factors_race_beside_their_matrix():
    case = ScanCase("own", T=9, n=4, B=3, is_complex=True, map="givens", map_options={"layers": 2})
    (race,) = races(plan(cases=(case,), peers=False))
    names = {f"scan ({name}){last}" for name in ("inplace", "factors") for last in ("", ", last state")}
    assert {row.name for row in race.rows} == names
    drawn = float64(case)
    entries = ours(fast_backends(drawn))
    results = [entries[name](drawn).sequence() for name in ("inplace", "factors")]
    torch.testing.assert_close(*results)


def test_cases_left_out_are_those_that_the_activation_can_do():
    assert [case.name for case in ScanRace().cases] == ["A", "B", "C", "D"]
    assert [case.name for case in ScanRace(activation="tanh").cases] == ["A", "B", "C"]
    with pytest.raises(errors.DtypeError, match="Complex states"):
        ScanRace(activation="tanh", cases=(CASES["D"],))


@pytest.mark.slow
@pytest.mark.parametrize("case", [REAL, COMPLEX])
def test_every_peer_races_or_is_left_out_with_its_reason(case):
    (race,) = races(plan(cases=(case,)))
    raced = {row.name for row in race.rows}
    assert raced | set(race.left_out) == {"scan (inplace)", "scan (inplace), last state", *recurrence_peers}
    assert set(race.left_out) == (set() if case is REAL else {"torch_lstm_matched"})


# What is compared with what


@pytest.mark.slow
def test_a_row_is_its_time_over_the_limit_and_over_that_of_the_scan_that_auto_picks(monkeypatch):
    for case in (REAL, COMPLEX):
        (race,) = races(plan(cases=(case,), backends=("reference", "inplace")))
        seconds = {row.name: row["seconds"] for row in race.rows}
        picked = f"scan ({picked_backend(drawn(plan(), case))})"
        for row in race.rows:
            assert row["limit_units"] == row["seconds"] / race.unit
            assert row["time_over_ours"] == row["seconds"] / seconds[picked]
        order = [(row.is_peer, row["seconds"]) for row in race.rows]
        assert order == sorted(order)
    monkeypatch.setattr(scan_race, "picked_backend", lambda drawn: "another")
    (race,) = races(plan(backends=("reference", "inplace")))
    seconds = {row.name: row["seconds"] for row in race.rows}
    fastest = min(seconds["scan (reference)"], seconds["scan (inplace)"])
    assert all(row["time_over_ours"] == row["seconds"] / fastest for row in race.rows)


# Memory


@pytest.mark.slow
def test_our_scan_needs_at_most_half_the_memory_of_the_loop():
    sequences = Sequences(ScanCase("custom", T=256, n=64, B=64))
    unit = 256 * 64 * 64 * 4
    for loss in LOSSES:
        ours_grows = memory_of(sequences, ours(["inplace"])["inplace"], loss)
        loop_grows = memory_of(sequences, recurrence_peers[LOOP], loss)
        assert loop_grows > 4 * unit
        assert ours_grows <= loop_grows / 2


# The command


def bench(words: str, *more: str) -> int:
    return main(["bench", "scan", *words.split(), *more])


def test_the_command_prints_tables_and_writes_rows(capsys, monkeypatch):
    monkeypatch.setattr(scan_race, "memory_of", lambda *arguments: 2_000_000)
    assert bench(f"--case {TWO},complex --peers --memory --json rows.json", *QUICK) == 0
    shown = capsys.readouterr().out
    rows = json.loads(Path("rows.json").read_text())
    assert all(list(row) == KEYS for row in rows)
    assert all(row["contender"] in shown for row in rows)
    assert "custom: complex, T = 4, n = 3, B = 2, m = 1" in shown
    assert "MB last" in shown
    assert "2.00" in shown
    assert {row["case"] for row in rows} == {"custom"}
    assert "torch_lstm_matched: the papers match no LSTM with case custom" in shown
    assert max(len(line) for line in shown.splitlines() if "Left out" not in line) <= 80
    scan = next(row for row in rows if row["contender"] == "scan (inplace)")
    assert scan["time_over_ours"] == 1
    assert scan["memory_sequence"] == scan["memory_last_state"] == 2_000_000


def test_cases_race_in_the_order_named_and_one_of_ones_own_after_them(monkeypatch):
    plans = []
    monkeypatch.setattr(scan_race, "races", lambda plan, watch: plans.append(plan) or iter(()))
    for words in ("--cases D,A --case T=1,n=1,B=1", "--case T=1,n=1,B=1", "", "--activation relu"):
        bench(words)
    assert read_case("T=784, n=170,B=128,m=3,complex") == ScanCase("custom", 784, 170, 128, 3, True)
    names = [[case.name for case in plan.cases] for plan in plans]
    assert names == [["D", "A", "custom"], ["custom"], ["A", "B", "C", "D"], ["A", "B", "C"]]
