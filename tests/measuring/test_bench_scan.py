"""The race of the scan: who takes part, what is compared with what, how memory is measured. No test asserts a time."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from stiefelkit import errors, registry
from stiefelkit.cli import main
from stiefelkit.measuring.races import scan as scan_race
from stiefelkit.measuring.races.plan import ScanRace
from stiefelkit.measuring.races.recurrences import (
    LOOP,
    Sequences,
    fast_backends,
    ours,
    picked_backend,
    recurrence_peers,
)
from stiefelkit.measuring.races.scan import LOSSES, races, resident_bytes, whole_and_scan
from stiefelkit.measuring.races.scan_cases import CASES, ScanCase, read_case
from stiefelkit.metrics import orthogonality_error
from stiefelkit.testing import seeds

REAL = ScanCase("real", T=6, n=4, B=3, m=2, matched=5)
COMPLEX = ScanCase("complex", T=5, n=4, B=3, is_complex=True)
KEYS = [
    *("operation", "case", "contender", "T", "n", "B", "m", "is_complex", "activation", "dtype", "device"),
    *("seconds", "limit_units", "time_over_ours", "memory_sequence", "memory_last_state", "spread", "samples"),
]
QUICK = ["--repeats", "2", "--seconds", "1e-3"]
TWO = "T=4,n=3,B=2"


def plan(**changes) -> ScanRace:
    return ScanRace(**{"seed": seeds.seed(), "cases": (REAL,), "repeats": 2, "seconds": 1e-3, "peers": True, **changes})


def float64(case: ScanCase, activation: str = "modrelu") -> Sequences:
    return Sequences(case, activation, torch.float64)


# The cases


def test_the_cases_are_those_of_the_papers_and_a_wide_one():
    sizes = {name: (case.T, case.n, case.B, case.m, case.is_complex, case.matched) for name, case in CASES.items()}
    assert sizes == {
        "A": (784, 170, 128, 1, False, 128),
        "B": (1020, 190, 20, 10, False, 68),
        "C": (200, 512, 50, 129, False, None),
        "D": (784, 116, 50, 1, True, 128),
        "E": (784, 512, 50, 1, True, None),
        "F": (784, 1024, 128, 1, True, None),
        "G": (784, 256, 128, 1, False, None),
    }
    assert {name: (case.map, case.map_options) for name, case in CASES.items() if case.map} == {
        "E": ("fourier", {}),
        "F": ("givens", {"layers": 2}),
        "G": ("householder", {"reflections": 32}),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("map", "options"), [("fourier", {}), ("givens", {"layers": 2})])
def test_factors_race_beside_their_matrix(map, options):
    case = ScanCase("own", T=9, n=4, B=3, is_complex=True, map=map, map_options=options)
    (race,) = races(plan(cases=(case,), peers=False))
    names = {f"scan ({name}){last}" for name in ("inplace", "factors") for last in ("", ", last state")}
    assert {row.contender for row in race.rows} == names
    drawn = float64(case)
    entries = ours(fast_backends(drawn))
    results = [entries[name](drawn).sequence() for name in ("inplace", "factors")]
    torch.testing.assert_close(*results)


@pytest.mark.slow
def test_factors_are_left_out_of_a_case_without_a_map():
    (race,) = races(plan(backends=("inplace", "factors"), peers=False))
    assert "scan (factors)" in race.left_out


def test_a_case_of_ones_own_is_read_from_words():
    assert read_case("T=784, n=170,B=128,m=3,complex") == ScanCase("custom", 784, 170, 128, 3, True)
    assert read_case("B=2,n=3,T=4") == ScanCase("custom", 4, 3, 2)


def test_cases_left_out_are_those_that_the_activation_can_do():
    assert [case.name for case in ScanRace().cases] == ["A", "B", "C", "D"]
    assert [case.name for case in ScanRace(activation="tanh").cases] == ["A", "B", "C"]
    with pytest.raises(errors.DtypeError, match="Complex states"):
        ScanRace(activation="tanh", cases=(CASES["D"],))


@pytest.mark.slow
@pytest.mark.parametrize("case", [REAL, COMPLEX])
def test_every_peer_races_or_is_left_out_with_its_reason(case):
    (race,) = races(plan(cases=(case,)))
    raced = {row.contender for row in race.rows}
    assert raced | set(race.left_out) == {"scan (inplace)", "scan (inplace), last state", *recurrence_peers.names()}
    assert set(race.left_out) == (set() if case is REAL else {"torch_lstm_matched"})
    (race,) = races(plan(cases=(case,), peers=False))
    assert {row.contender for row in race.rows} == {"scan (inplace)", "scan (inplace), last state"}


@pytest.mark.slow
def test_a_plugin_may_bring_a_peer_and_one_that_fails_is_left_out(monkeypatch):
    def broken(drawn):
        raise RuntimeError("no kernel\nand a long trace")

    table: dict[str, Any] = {"theirs": recurrence_peers.get(LOOP), "broken": broken}
    monkeypatch.setattr(scan_race, "recurrence_peers", registry.Registry("nobody.home", "peer", table))
    (race,) = races(plan())
    assert {row.contender for row in race.rows if row.is_peer} == {"theirs"}
    assert race.left_out == {"broken": "no kernel"}


# What is compared with what


@pytest.mark.slow
def test_a_row_is_its_time_over_the_limit_and_over_that_of_the_scan_that_auto_picks(monkeypatch):
    for case in (REAL, COMPLEX):
        (race,) = races(plan(cases=(case,), backends=("reference", "inplace")))
        seconds = {row.contender: row["seconds"] for row in race.rows}
        picked = f"scan ({picked_backend(plan().drawn(case))})"
        for row in race.rows:
            assert row["limit_units"] == row["seconds"] / race.unit
            assert row["time_over_ours"] == row["seconds"] / seconds[picked]
        order = [(row.is_peer, row["seconds"]) for row in race.rows]
        assert order == sorted(order)
    monkeypatch.setattr(scan_race.recurrences, "picked_backend", lambda drawn: "another")
    (race,) = races(plan(backends=("reference", "inplace")))
    seconds = {row.contender: row["seconds"] for row in race.rows}
    fastest = min(seconds["scan (reference)"], seconds["scan (inplace)"])
    assert all(row["time_over_ours"] == row["seconds"] / fastest for row in race.rows)


@pytest.mark.slow
def test_rows_name_the_contenders_own_width_and_field():
    (race,) = races(plan(cases=(COMPLEX,)))
    widths = {row.contender: (row["n"], row["is_complex"]) for row in race.rows}
    assert widths["scan (inplace)"] == widths[LOOP] == (4, True)
    assert widths["torch_rnn"] == (8, False)
    assert {row["operation"] for row in race.rows if "last state" in row.contender} == {"last_state"}


# A training step


def test_the_scan_alone_gets_what_the_training_step_gives_its_scan(monkeypatch):
    from stiefelkit.nn import rnn

    calls: list[Any] = []
    scan = rnn.scan

    def noted(*arguments, **options):
        calls.append((arguments, options))
        return scan(*arguments, **options)

    monkeypatch.setattr(rnn, "scan", noted)
    step, alone = whole_and_scan(REAL, torch.device("cpu"), seed=seeds.seed())
    for _ in range(3):
        step()
    step_call = calls[-1]
    alone()
    ((x, w, h0), options), ((its_x, its_w, its_h0), its_options) = step_call, calls[-1]
    assert torch.equal(x, its_x)
    assert torch.equal(h0, its_h0)
    assert w.shape == its_w.shape
    assert its_w.is_leaf
    assert its_w.requires_grad
    assert orthogonality_error(its_w) < 1e-5
    assert options.keys() == its_options.keys()
    for name, value in options.items():
        assert value is its_options[name] or value == its_options[name], name


@pytest.mark.slow
def test_a_training_step_trains_and_its_time_is_compared_with_the_scan():
    step, _ = whole_and_scan(REAL, torch.device("cpu"), seed=seeds.seed())
    step()
    *_, race = races(plan(training_step=True, cases=(COMPLEX, REAL)))
    assert (race.operation, race.subject) == ("training_step", REAL)
    whole, alone = race.rows
    assert (whole.contender, alone.contender) == ("scornn", "scornn, scan alone")
    assert whole["time_over_ours"] == whole["seconds"] / alone["seconds"]
    assert alone["time_over_ours"] == 1


# Memory


@pytest.mark.slow
def test_our_scan_needs_at_most_half_the_memory_of_the_loop():
    drawn = Sequences(ScanCase("custom", T=256, n=64, B=64))
    unit = 256 * 64 * 64 * 4
    for loss in LOSSES:
        ours_grows = resident_bytes(drawn, "inplace", loss, is_peer=False)
        loop_grows = resident_bytes(drawn, LOOP, loss, is_peer=True)
        assert loop_grows > 4 * unit
        assert ours_grows <= loop_grows / 2


@pytest.mark.slow
def test_what_cannot_be_measured_says_why(monkeypatch):
    drawn = Sequences(REAL)
    with pytest.raises(errors.OptionError, match="no LSTM"):
        resident_bytes(Sequences(COMPLEX), "torch_lstm_matched", "sequence", is_peer=True)
    monkeypatch.setattr(scan_race.sys, "executable", "false")
    with pytest.raises(errors.OptionError, match="it ended with code 1"):
        resident_bytes(drawn, "inplace", "sequence", is_peer=False)


def test_memory_stands_in_the_rows_of_whole_sequences(monkeypatch):
    asked = []

    def fake(drawn, contender, loss, is_peer, threads):
        asked.append((contender, loss, is_peer))
        if contender == "torch_rnn":
            raise errors.OptionError("no room.")
        return 7 if loss == "sequence" else 3

    monkeypatch.setattr(scan_race, "resident_bytes", fake)
    (race,) = races(plan(memory=True))
    figures = {row.contender: (row["memory_sequence"], row["memory_last_state"]) for row in race.rows}
    assert figures["scan (inplace)"] == figures[LOOP] == (7, 3)
    assert figures["torch_rnn"] == figures["scan (inplace), last state"] == (None, None)
    assert {words: reason for words, reason in race.left_out.items() if "torch_rnn" in words} == {
        "memory of torch_rnn, sequence": "no room.",
        "memory of torch_rnn, last state": "no room.",
    }
    assert ("inplace", "sequence", False) in asked
    assert (LOOP, "last_state", True) in asked


# The command


@pytest.fixture
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")


def bench(words: str, *more: str) -> int:
    return main(["bench", "scan", *words.split(), *more])


def test_the_command_prints_tables_and_writes_rows(capsys, monkeypatch):
    monkeypatch.setattr(scan_race, "resident_bytes", lambda *arguments: 2_000_000)
    assert bench(f"--case {TWO},complex --peers --memory --json rows.json", *QUICK) == 0
    shown = capsys.readouterr().out
    rows = json.loads(Path("rows.json").read_text())
    assert all(list(row) == KEYS for row in rows)
    assert all(row["contender"] in shown for row in rows)
    assert "custom: complex, T = 4, n = 3, B = 2, m = 1" in shown
    assert "peak memory" in shown
    assert "2.00" in shown
    assert {row["case"] for row in rows} == {"custom"}
    assert "torch_lstm_matched: the papers match no LSTM with case custom" in shown
    assert max(len(line) for line in shown.splitlines() if "Left out" not in line) <= 80
    scan = next(row for row in rows if row["contender"] == "scan (inplace)")
    assert scan["time_over_ours"] == 1
    assert scan["memory_sequence"] == scan["memory_last_state"] == 2_000_000


@pytest.mark.slow
def test_the_command_times_a_training_step(capsys):
    assert bench(f"--case {TWO} --training-step --json rows.json", *QUICK) == 0
    shown = capsys.readouterr().out
    rows = json.loads(Path("rows.json").read_text())
    whole, alone = (row for row in rows if row["operation"] == "training_step")
    assert f"{1 - alone['seconds'] / whole['seconds']:.1%}" in shown
    assert "outside the scan" in shown


@pytest.mark.slow
def test_the_command_takes_activations_backends_and_dtypes(capsys):
    assert bench(f"--case {TWO} --activation tanh --backends reference --dtype float64", *QUICK) == 0
    shown = capsys.readouterr().out
    assert "tanh, float64, cpu" in shown
    assert "scan (reference)" in shown
    assert "inplace" not in shown


def test_cases_race_in_the_order_named_and_one_of_ones_own_after_them(monkeypatch):
    plans = []
    monkeypatch.setattr(scan_race, "races", lambda plan, watch, deadline: plans.append(plan) or iter(()))
    for words in ("--cases D,A --case T=1,n=1,B=1", "--case T=1,n=1,B=1", "", "--activation relu"):
        bench(words)
    names = [[case.name for case in plan.cases] for plan in plans]
    assert names == [["D", "A", "custom"], ["custom"], ["A", "B", "C", "D"], ["A", "B", "C"]]


def test_help_says_what_is_drawn_and_what_the_limit_is(capsys):
    assert bench("--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("W a Haar frame", "U(-0.01, 0)", "T of (B, n) by (n, n) forward", "T=1020, n=190, B=20, m=10"):
        assert words in shown


def test_the_page_describes_every_peer():
    page = Path(__file__).parents[2].joinpath("docs", "benchmarks.md").read_text()
    assert all(f"`{name}`" in page for name in recurrence_peers.names())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--cases H", "known: A, B, C, D, E, F, G"),
        ("--case T=3", "n and B"),
        ("--case T=3,n=x,B=2", "'n=x'"),
        ("--case T=3,n=2,B=2,T=4", "'T=4'"),
        ("--case T=0,n=2,B=2", "an integer T >= 1, got 0"),
        ("--activation tahn", 'did you mean "tanh"'),
        ("--activation tanh --cases D", "'tanh'"),
        ("--backends inplaec", 'did you mean "inplace"'),
        ("--dtype float16", 'did you mean "float64"'),
        ("--training-step --cases D", "a real case"),
        (f"--training-step --activation tanh --case {TWO}", "tanh"),
        ("--device cuda:99", "99"),
        ("--repeats 0", "repeats"),
        ("--seconds 0", "seconds"),
        ("--threads 0", "threads"),
        ("--seed -1", "seed"),
        ("--json nowhere/rows.json", "nowhere"),
    ],
)
def test_an_error_of_the_user_is_one_sentence(words, says, capsys):
    assert bench(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("Error: ")
    assert len(err.splitlines()) == 1
    assert says in err
    assert not list(Path().iterdir())


@pytest.mark.slow
def test_a_race_of_nobody_is_an_error(capsys):
    assert bench(f"--case {TWO} --backends triton --json rows.json") == 2
    out, err = capsys.readouterr()
    assert "scan (triton)" in out
    assert err.startswith("Error: The race needs a contender")
    assert not Path("rows.json").exists()
