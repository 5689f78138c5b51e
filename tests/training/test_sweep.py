"""Sweeps: each trial is a run as `train` makes it; studies resume, are shared by processes, and end bad runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import optuna
import pytest

from stiefelkit.cli import main
from stiefelkit.testing import seeds
from stiefelkit.training.run_folder import RunFolder, is_run, last_step, summarise

ONE, TWO = seeds.seed(1), seeds.seed(2)
FILE = f"""
task = "adding"
model = "scornn"
T = 4
train-size = 40
test-size = 20
hidden-size = 4
batch-size = 10
steps = 4
eval-every = 2
checkpoint-every = 2
[vary]
lr = [1e-3, 1e-2]
seed = [{ONE}, {TWO}]
"""
RUNS = {f"lr={lr},seed={seed}" for lr in (0.001, 0.01) for seed in (ONE, TWO)}
SEARCH = FILE.replace("lr = [1e-3, 1e-2]", "lr = {low = 1e-3, high = 1e-2, log = true}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(FILE)
    return tmp_path / "small.toml"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def trials(out: Path) -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name="small", storage=f"sqlite:///{out / 'sweep.db'}").trials


def started(file: Path, out: Path) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "stiefelkit", "sweep", str(file), "--out", str(out)]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def test_each_combination_is_the_run_of_its_line_and_the_best_comes_first(file: Path, out: Path, capsys):
    assert main(["sweep", str(file), "--out", str(out)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("│ lr=")]
    assert {line[1] for line in lines} == RUNS
    losses = [summarise(out / line[1]).test["loss"] for line in lines]
    assert losses == sorted(losses)
    assert [line[3] for line in lines] == [f"{loss:.5f}" for loss in losses]

    alone = out.parent / "alone"
    words = "train adding --model scornn --T 4 --train-size 40 --test-size 20 --hidden-size 4 --batch-size 10 --steps 4"
    words += f" --eval-every 2 --checkpoint-every 2 --lr 1e-2 --seed {TWO} --out {alone}"
    assert main(words.split()) == 0
    run = out / f"lr=0.01,seed={TWO}"
    assert RunFolder.open(run).config == RunFolder.open(alone).config
    assert summarise(run).test == summarise(alone).test

    assert main(["sweep", str(file), "--out", str(out)]) == 0  # which has nothing left to do
    assert len(trials(out)) == 4


@pytest.mark.slow
def test_a_search_draws_from_its_ranges_until_so_many_trials_are_done(file: Path, out: Path):
    file.write_text(SEARCH)
    for most in (2, 3):
        assert main(["sweep", str(file), "--out", str(out), "--trials", str(most)]) == 0
        assert len(trials(out)) == most
    assert len({trial.params["lr"] for trial in trials(out)}) == 3
    assert all(1e-3 <= trial.params["lr"] <= 1e-2 for trial in trials(out))
    assert sum(is_run(path) for path in out.iterdir()) == 3


def test_the_pruner_ends_a_bad_run_after_an_evaluation(file: Path, out: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(optuna.pruners, "MedianPruner", lambda: optuna.pruners.ThresholdPruner(upper=1e-9))
    file.write_text(SEARCH)
    assert main(["sweep", str(file), "--out", str(out), "--trials", "1"]) == 0
    assert "pruned" in capsys.readouterr().out
    (trial,) = trials(out)
    assert (trial.state.name, list(trial.intermediate_values)) == ("PRUNED", [2])
    assert last_step(out / trial.user_attrs["run"]) < 4


@pytest.mark.slow
def test_a_run_that_diverges_is_named_and_the_others_go_on(file: Path, out: Path, capsys):
    file.write_text(FILE.replace("lr = [1e-3, 1e-2]", 'lr = [1e-3, 1e30]\noptimizer = ["sgd"]'))
    assert main(["sweep", str(file), "--out", str(out)]) == 0
    assert capsys.readouterr().out.count("needs finite numbers") == 2
    assert [trial.state.name for trial in trials(out)] == ["COMPLETE", "COMPLETE", "PRUNED", "PRUNED"]


@pytest.mark.slow
def test_two_processes_share_the_work_of_one_study(file: Path, out: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    longer = FILE.replace("steps = 4", "steps = 300").replace("checkpoint-every = 2", "checkpoint-every = 150")
    file.write_text(longer.replace("eval-every = 2\n", ""))
    first = started(file, out)
    while not (out / "sweep.db").exists() or not any(is_run(run) for run in out.iterdir()):
        assert first.poll() is None
        time.sleep(0.1)
    assert main(["sweep", str(file), "--out", str(out)]) == 0  # this process has loaded all, so it comes in time
    printed = [first.communicate()[0], capsys.readouterr().out]
    assert first.returncode == 0, printed
    complete = [trial.user_attrs["run"] for trial in trials(out) if trial.state.name == "COMPLETE"]
    assert len(complete) == len({*complete}) == 4
    runs = [each.count("300/300") for each in printed]
    assert min(runs) > 0, printed
    assert sum(runs) == 4


class Impatient(optuna.storages.RDBStorage):
    """A storage that takes a trial for dead after two seconds without a heartbeat, not twenty."""

    def __init__(self, url: str, **options: Any):
        quick: dict[str, Any] = {**options, "heartbeat_interval": 1, "grace_period": 2}
        super().__init__(url, **quick)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_or_killed_sweep_leaves_no_process_and_goes_on_to_the_same_bits(
    file: Path, out: Path, number: int, monkeypatch: pytest.MonkeyPatch
):
    longer = FILE.replace("steps = 4", "steps = 200").replace("checkpoint-every = 2", "checkpoint-every = 10")
    file.write_text(longer.replace("lr = [1e-3, 1e-2]", "lr = [1e-3]"))
    process = started(file, out)
    run = out / f"lr=0.001,seed={ONE}"
    while last_step(run) < 20:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(number)
    printed, _ = process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert ("the same command continues it" in printed) == (number == signal.SIGINT)
    assert (step := last_step(run)) < 200
    time.sleep(0.5)
    assert last_step(run) == step
    monkeypatch.setattr(optuna.storages, "RDBStorage", Impatient)
    while sum(trial.state.name == "COMPLETE" for trial in trials(out)) < 2:  # a killed one is noticed by its heartbeat
        assert main(["sweep", str(file), "--out", str(out)]) == 0
        time.sleep(0.5)
    whole = out.parent / "whole"
    assert main(["sweep", str(file), "--out", str(whole)]) == 0
    tensors = [(path / run.name / "checkpoints" / "step-00000200") for path in (out, whole)]
    for left, right in zip(*(sorted(path.glob("*.safetensors")) for path in tensors), strict=True):
        assert left.read_bytes() == right.read_bytes()


def test_a_study_goes_on_with_the_options_that_it_began_with_alone(file: Path, out: Path, capsys):
    file.write_text(FILE.replace("lr = [1e-3, 1e-2]", "lr = [1e-3]").replace(f", {TWO}", ""))
    assert main(["sweep", str(file), "--out", str(out)]) == 0
    capsys.readouterr()
    file.write_text(file.read_text().replace("T = 4", "T = 5"))
    assert main(["sweep", str(file), "--out", str(out)]) == 2
    assert "began with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (("steps = 4", "stepz = 4"), "stepz"),
        (('model = "scornn"', ""), "model"),
        (("lr = [1e-3, 1e-2]", "lr = 1e-3"), "vary.lr"),
        (("lr = [1e-3, 1e-2]", "lr = {low = 1e-3}"), "vary.lr"),
        (("lr = [1e-3, 1e-2]", "rates.phase = [1e-3]"), "'phase'"),
    ],
)
def test_what_a_file_has_wrong_is_said_before_anything_runs(file: Path, out: Path, capsys, change, word):
    file.write_text(FILE.replace(*change))
    assert main(["sweep", str(file), "--out", str(out)]) == 2
    assert word in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_without_optuna_the_extra_is_named(file: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "stiefelkit.training.sweep")
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert main(["sweep", str(file)]) == 2
    assert "stiefelkit[sweep]" in capsys.readouterr().err


@pytest.mark.slow
def test_examples_set_apart_are_what_to_choose_by(tmp_path: Path, file: Path, out: Path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("to be or not to be, that is the question. " * 50)
    file.write_text(
        'task = "chars"\nmodel = "lstm"\nT = 8\nhidden-size = 4\nsteps = 2\neval-every = 2\n[vary]\nseed = [1]\n'
    )
    assert main(["sweep", str(file), "--out", str(out), "--data", str(tmp_path / "texts")]) == 0
    (trial,) = trials(out)
    summary = summarise(out / "seed=1")
    assert (trial.value, trial.user_attrs["test"]) == (summary.validation["loss"], summary.test["loss"])
    assert trial.value != trial.user_attrs["test"]
