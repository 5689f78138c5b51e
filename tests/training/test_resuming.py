"""The laws of resuming: a run stopped anyhow and resumed gives the same bits; nothing is lost."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import Killed, Watching, content, killed_at, killed_by, longer

from stiefelkit.cli import main
from stiefelkit.errors import RunError
from stiefelkit.machine import processor
from stiefelkit.training import train
from stiefelkit.training.run_folder import is_run, read_log, summarise, versions


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    train.train(longer(), path)
    return path


@pytest.mark.parametrize("step", range(1, 13))
def test_a_run_killed_after_any_step_resumes_to_the_same_bits(step: int, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"
    with pytest.raises(Killed):
        train.train(longer(), path, killed_at(step))
    assert train.resume(path).step == 12
    assert content(path) == content(whole)


@pytest.mark.parametrize("function", ["mkdir", "rename", "replace", "fsync"])
@pytest.mark.parametrize("call", range(1, 12, 2))
def test_a_run_killed_while_writing_resumes_to_the_same_bits(
    function: str, call: int, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run"
    killed_by(monkeypatch, function, call)
    try:
        train.train(longer(), path)
    except Killed:
        pass
    monkeypatch.undo()
    if is_run(path):
        train.resume(path)
    else:
        train.train(longer(), path)
    assert content(path) == content(whole)


def test_ctrl_c_finishes_the_step_saves_and_resumes_to_the_same_bits(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run"

    def interrupt(step: int) -> None:
        if step == 7:
            signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    outcome = train.train(longer(), path, Watching(interrupt))
    assert (outcome.step, outcome.signal) == (7, signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert train.resume(path).signal is None
    assert content(path) == content(whole)


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no such signal here")
def test_a_signal_that_is_ignored_stays_ignored(whole: Path, tmp_path: Path) -> None:
    """As SIGHUP is under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        hang_up = Watching(lambda step: signal.raise_signal(signal.SIGHUP))
        assert train.train(longer(), tmp_path / "run", hang_up).signal is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert content(tmp_path / "run") == content(whole)


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    def interrupt(step: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train.train(longer(), tmp_path / "run", Watching(interrupt))
    assert train.resume(tmp_path / "run").step == 12


@pytest.mark.slow
def test_a_process_killed_by_the_system_resumes_to_the_same_bits(tmp_path: Path) -> None:
    options = "--T 3 --train-size 40 --test-size 20 --hidden-size 6 --steps 60 --batch-size 8 --checkpoint-every 5"
    options += " --eval-every 10 --log-every 3 --optimizer rmsprop --lr 1e-3 --rates.skew 1e-4"
    words = ["train", "copying", "--model", "scornn", *options.split(), "--out"]
    killed, smooth = tmp_path / "killed", tmp_path / "smooth"
    first = subprocess.Popen([sys.executable, "-m", "stiefelkit", *words, str(killed)], stdout=subprocess.DEVNULL)
    log = killed / "log.jsonl"
    while first.poll() is None and not (log.exists() and log.stat().st_size > 2000):
        time.sleep(0.002)
    first.kill()
    first.wait()
    assert main([*words, str(killed), "--resume"]) == 0
    assert main([*words, str(smooth)]) == 0
    assert content(killed) == content(smooth)


def test_a_run_may_be_prolonged_if_the_schedule_is_constant(tmp_path: Path) -> None:
    train.train(longer(schedule="constant", steps=8), tmp_path / "a")
    train.resume(tmp_path / "a", {"steps": 12})
    train.train(longer(schedule="constant"), tmp_path / "b")
    assert content(tmp_path / "a")[1] == content(tmp_path / "b")[1]
    assert json.loads((tmp_path / "a/config.json").read_text())["config"]["steps"] == 12


def test_a_run_resumes_only_as_it_began(whole: Path) -> None:
    for asked in ({"hidden_size": 6}, {"steps": 20}, {"task_options": {"T": 3}}, {"model": "lstm"}):
        with pytest.raises(RunError, match=next(iter(asked))):
            train.resume(whole, asked)
    for config in (longer(options={"bandwidth": 2}), longer(lr=0.5)):
        with pytest.raises(RunError, match="began"):
            train.resume(whole, config)
    assert train.resume(whole, longer()).already
    assert train.resume(whole, {"hidden_size": 5, "task_options": {"T": 2}}).already


def test_a_finished_run_is_not_changed_and_nothing_overwritten(whole: Path, tmp_path: Path) -> None:
    before = content(whole)
    assert train.resume(whole).already
    with pytest.raises(RunError, match="--resume"):
        train.train(longer(), whole)
    assert content(whole) == before
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(RunError, match="--out"):
        train.train(longer(), tmp_path)
    with pytest.raises(RunError, match="--out"):
        train.train(longer(), tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_another_torch_and_another_processor_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run"
    with pytest.raises(Killed):
        train.train(longer(), path, killed_at(7))
    elsewhere = {"torch": "1.2.3", "processor": "another (AVX2)"}
    monkeypatch.setattr(train, "versions", lambda device: versions(device) | elsewhere)
    display = Watching()
    train.resume(path, display=display)
    assert f"torch {torch.__version__}, now it is 1.2.3" in display.notes[0]
    assert f"processor {processor('cpu')}, now it is another (AVX2)" in display.notes[1]


def test_two_processes_cannot_train_in_one_folder(tmp_path: Path) -> None:
    def intrude(step: int) -> None:
        with pytest.raises(RunError, match="another process"):
            train.resume(tmp_path / "run")

    train.train(longer(steps=1), tmp_path / "run", Watching(intrude))


def test_a_run_keeps_two_checkpoints_and_its_log_tells_loss_scores_orthogonality_and_time(whole: Path) -> None:
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == ["step-00000008", "step-00000012"]
    log = read_log(whole / "log.jsonl")
    assert [line["step"] for line in log if line["kind"] == "train"] == [1, 2, 4, 6, 8, 10, 12]
    assert [line["step"] for line in log if line["kind"] == "test"] == [5, 10, 12]
    line = log[0]
    assert set(line["orthogonality"]) == {"rnn.weight_hh_l0"}
    assert line["ms_per_step"] > 0
    assert 0 <= line["accuracy"] <= 1
    assert log[-1].keys() == {"kind", "step", "loss", "accuracy"}
    summary = summarise(whole)
    assert summary.parameters == sum(p.numel() for p in longer().build_model().parameters())
    assert summary.orthogonality is not None
