"""The asv suite and the regression gate. No test asserts a time."""

import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import convolutions, drift, gate, launches, memory, peers, recorded, scan, step_time
from benchmarks import suite as suites
from benchmarks.suite import VARIABLE, Suite
from stiefelkit import errors
from stiefelkit.measuring.plans import CASES, ScanCase
from stiefelkit.parametrizations.cayley import Cayley

ROOT = Path(__file__).parents[2]
MODULES = (convolutions, drift, launches, memory, peers, recorded, scan, step_time)
SUITES = [
    each
    for module in MODULES
    for each in vars(module).values()
    if isinstance(each, type) and each.__module__ == module.__name__ and not each.__name__.startswith("_")
]


@pytest.fixture(name="smoke")
def _smoke(monkeypatch):
    monkeypatch.setenv(VARIABLE, "smoke")


@pytest.fixture(name="full")
def _full(monkeypatch):
    monkeypatch.setenv(VARIABLE, "full")


def tracked(suite: type[Suite], cell: tuple[str, ...]) -> float:
    """The figure as asv gets it."""
    table = suite()
    table.setup(*cell)
    (name,) = [name for name in dir(table) if name.startswith("track_")]
    return getattr(table, name)(*cell)


def run(*words: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    # asv drops it as well, and a copy of the package must not find the original before itself
    environment.pop("PYTHONPATH", None)
    return subprocess.run([sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True)


# The tables


def test_asv_finds_nothing_wrong():
    discovery = pytest.importorskip("asv_runner.discovery", reason="asv, of the extra [bench], is not installed")
    found = list(discovery.disc_benchmarks(str(ROOT / "benchmarks")))
    names = {f"{suite.__module__.partition('.')[2]}.{suite.__name__}" for suite in SUITES}
    assert {benchmark.name.rpartition(".")[0] for benchmark in found} == names
    assert all(benchmark.check(str(ROOT / "benchmarks")) for benchmark in found)


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: f"{suite.__module__}.{suite.__name__}")
def test_tables_name_their_axes_keep_a_version_and_have_cells_of_quick_mode(suite):
    assert len(suite.axes) == len(suite.param_names) == len(suite.params)
    assert all(len(set(axis)) == len(axis) > 0 for axis in suite.axes)
    # without one, each change of the code would start a new history
    assert suite.version in ("1", "2")
    levels = {suite().level(*cell) for cell in itertools.product(*suite.axes)}
    assert levels & {"smoke", "quick"}  # cells of the smoke test are run in quick mode too


@pytest.mark.usefixtures("smoke")
def test_cells_beyond_the_mode_are_left_out_with_a_reason():
    with pytest.raises(NotImplementedError, match="smoke"):
        drift.Frames().setup("cayley", "float32", "cpu", "10000 steps")


@pytest.mark.usefixtures("full")
def test_cells_of_a_gpu_are_left_out_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for suite in (each for each in SUITES if "device" in each.param_names):
        place = suite.param_names.index("device")
        for cell in itertools.product(*suite.axes):
            reason = suite().reason_against(*cell)
            assert reason == ("there is no CUDA device" if cell[place].startswith("cuda") else None)
    with pytest.raises(NotImplementedError, match="complex"):
        drift.Frames().setup("fourier", "float32", "cpu", "1000 steps")


# Figures, at sizes that take no time


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("weights", drift.WEIGHTS)
@pytest.mark.parametrize(("method", "length"), [("cayley", "training"), ("multiplicative_cayley", "1000 steps")])
def test_frames_lose_less_than_half_a_bit(monkeypatch, method, weights, length):
    monkeypatch.setattr(drift, "N", 32)
    monkeypatch.setitem(drift.RUNS, length, {**drift.RUNS[length], "steps": 30})
    assert 0 <= tracked(drift.Frames, (method, weights, "cpu", length)) < 0.5


def test_a_layer_with_a_parameter_that_wants_no_gradient_is_timed(monkeypatch):
    frozen = torch.nn.Conv2d(16, 16, 3, padding="same")
    frozen.bias.requires_grad_(False)  # type: ignore[union-attr]
    monkeypatch.setitem(convolutions.CONTENDERS, "orthogonium", lambda: frozen)
    assert len(convolutions.forward_backward("orthogonium", 4, "cpu")()) == 2


def test_a_frame_that_is_lost_is_a_failure_and_no_empty_cell(monkeypatch):
    monkeypatch.setattr(drift, "N", 4)
    monkeypatch.setitem(drift.RUNS, "1000 steps", {"steps": 20})
    monkeypatch.setattr(Cayley, "forward", lambda self, skew, *rest: skew.new_full(self.shape, math.nan) + skew.sum())
    with pytest.raises(ArithmeticError, match="cayley lost its frame"):
        tracked(drift.Frames, ("cayley", "float32", "cpu", "1000 steps"))


def test_the_weights_of_a_trained_net_lose_less_than_half_a_bit(monkeypatch):
    monkeypatch.setattr(drift.Models, "steps", 2)
    assert 0 <= tracked(drift.Models, ("scornn", "cpu")) < 0.5


@pytest.mark.slow
@pytest.mark.usefixtures("full")
@pytest.mark.parametrize(
    ("suite", "cell"),
    [
        (step_time.Parametrizations, ("cayley (fast)", "step", "8x4", "complex64", "cpu")),
        (step_time.Optimizers, ("cayley_sgd (exact)", "8x4", "float32", "cpu")),
        (peers.Parametrizations, ("householder (exact)", "forward_backward", "8x4", "cpu")),
        (peers.Optimizers, ("multiplicative_cayley (fast)", "8x4", "cpu")),
        (memory.Parametrizations, ("cayley (exact)", "64x64", "cpu")),
        (scan.Scan, ("A", "inplace", "last_state", "cpu")),
        (peers.Scan, ("A", "eager_loop", "cpu")),
        (memory.Scan, ("A", "eager_loop", "sequence", "cpu")),
    ],
)
def test_figures_of_small_cells_are_finite(monkeypatch, suite, cell):
    monkeypatch.setitem(CASES, "A", ScanCase("A", T=8, n=4, B=2))
    for module in (suites, step_time, memory, peers, scan):
        monkeypatch.setattr(module, "SIZES", {"8x4": "quick", "64x64": "quick"}, raising=False)
        monkeypatch.setattr(module, "patience", lambda: {"repeats": 2, "seconds": 1e-3}, raising=False)
    assert 0 <= tracked(suite, cell) < math.inf


# The gate


class Figures(Suite):
    """What is measured one time after the other."""

    unit = "ratio"
    axes = (("this",), ("cpu",))
    param_names = ("what", "device")
    left: list[float]

    def level(self, *cell):
        return "smoke"

    def measure(self, *cell):
        figure = Figures.left.pop(0)
        if figure < 0:
            raise errors.OptionError("it needs another option.")
        return figure


class Bits(Figures):
    unit = "bits"


@pytest.mark.parametrize(
    ("suite", "before", "measured", "verdict"),
    [
        (Bits, 0.1, [0.6], None),
        (Bits, 0.1, [0.61], r"0\.61 bits, baseline 0\.1, allowed 0\.6"),
        (Bits, 3.0, [-1], "not measured any more: it needs another option"),
        (Figures, 0.5, [0.59], None),
        (Figures, 0.5, [0.7, 0.65, 0.55], None),
        (Figures, 0.5, [0.7, 0.65, 0.63, 0.61], r"0\.61 ratio, baseline 0\.5, allowed 0\.6"),
        (Figures, 0.5, [], "fails: IndexError"),
    ],
)
def test_a_loss_of_half_a_bit_or_a_fifth_of_a_ratio_is_a_regression(suite, before, measured, verdict):
    Figures.left = list(measured)
    found = gate.regression(gate.Track(suite, ("this", "cpu")), before)
    assert (found is None) if verdict is None else (found is not None and re.search(verdict, found))
    assert Figures.left == []


def test_another_machine_than_the_baselines_may_double_a_ratio(tmp_path, monkeypatch, capsys):
    track = gate.Track(Figures, ("this", "cpu"))
    monkeypatch.setattr(gate, "tracks", lambda: [track])
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps({"measured_with": {"processor": "another"}, "tracks": {track.name: 0.5}}))
    words = ["--subset", "smoke", "--baseline", str(baseline)]
    Figures.left = [0.9]
    assert gate.main(words) == 0
    assert "another machine" in capsys.readouterr().out
    Figures.left = [1.1] * gate.TRIES
    assert gate.main(words) == 1


def test_an_update_takes_the_median_and_what_it_refused_or_what_is_new_is_no_regression(capsys):
    Figures.left = [0.9, 0.5, 0.7]
    track = gate.Track(Figures, ("this", "cpu"))
    assert gate.updated([track], {"drift.Frames(gone, float32, cpu, 1000 steps)": 0.1}) == {track.name: 0.7}
    Figures.left = [-1.0]
    assert gate.updated([track], {}) == {track.name: None}
    assert gate.compare([track], {track.name: None}) == gate.compare([track], {}) == []
    assert "not in the baseline" in capsys.readouterr().out


@pytest.mark.usefixtures("smoke")
def test_the_baseline_has_a_figure_for_each_track_of_the_smoke_test(monkeypatch):
    baseline = json.loads(gate.BASELINE.read_text())["tracks"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    due = [track.name for track in gate.tracks() if track.is_due]
    assert due
    assert [name for name in due if baseline.get(name) is None] == []


@pytest.mark.usefixtures("smoke")
def test_tracks_that_are_gone_are_regressions(tmp_path, capsys):
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps({"measured_with": {}, "tracks": {"drift.Frames(gone, float32, cpu, 1 step)": 0.1}}))
    words = ["--subset", "smoke", "--tracks", r"multiplicative_cayley, float32|gone", "--baseline", str(baseline)]
    assert gate.main(words) == 1
    assert "is no track any more" in capsys.readouterr().out


# A regression that is planted


@pytest.fixture
def copy(tmp_path):
    """A copy of the package and its benchmarks."""
    for folder in ("stiefelkit", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path


def plant(copy: Path, file: str, lines: str) -> None:
    with (copy / "stiefelkit" / file).open("a") as source:
        source.write(lines)


def gated(copy: Path, tracks: str, *words: str) -> subprocess.CompletedProcess[str]:
    return run("-m", "benchmarks.gate", "--subset", "smoke", "--tracks", tracks, *words, cwd=copy)


@pytest.mark.slow
@pytest.mark.usefixtures("smoke")
def test_the_gate_passes_what_is_and_sees_that_the_last_newton_step_is_missing(copy, capsys):
    tracks = r"drift.*(matrix_exp|multiplicative)"
    assert gate.main(["--subset", "smoke", "--tracks", tracks]) == 0
    assert "2 tracks, 0 regressions" in capsys.readouterr().out
    plant(copy, "functional/_exponential/taylor.py", "\n\ndef polished(w):\n    return w\n")
    failed = gated(copy, tracks)
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "2 tracks, 1 regressions:" in failed.stdout
    assert re.fullmatch(
        r"drift\.Frames\(matrix_exp, float32, cpu, 1000 steps\): \S+ bits, baseline \S+, allowed \S+",
        failed.stdout.splitlines()[-1],
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("geotorch") is None, reason="geotorch, of the extra [bench], is missing")
def test_the_gate_sees_that_a_map_takes_five_times_as_long(copy):
    plant(
        copy,
        "parametrizations/householder.py",
        "\n\n_once = Householder.forward\n\n\ndef _again(self, *coordinates):\n"
        "    return sum(_once(self, *coordinates) for _ in range(5)) / 5\n\n\nHouseholder.forward = _again\n",
    )
    source = copy / "benchmarks" / "gate.py"  # what is five times as slow is so at the first try
    source.write_text(source.read_text().replace(f"TRIES = {gate.TRIES}\n", "TRIES = 1\n"))
    failed = gated(copy, "peers.*householder")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    assert "1 tracks, 1 regressions" in failed.stdout
    assert "peers.Parametrizations(householder (exact), forward_backward, 256x256, cpu)" in failed.stdout
