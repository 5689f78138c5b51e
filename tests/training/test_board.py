"""Curves for TensorBoard are those of the log, once each, however often a run was stopped."""

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import Killed, killed_at, small

from stiefelkit.cli import main
from stiefelkit.training.curves import Curves, scalars
from stiefelkit.training.display import Silent
from stiefelkit.training.run_folder import read_log
from stiefelkit.training.train import resume, train

Points = dict[str, list[tuple[int, Any]]]


def shown(run: Path) -> Points:
    """What TensorBoard draws."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def logged(run: Path) -> Points:
    points: Points = {}
    for record in read_log(run / "log.jsonl"):
        for name, value in scalars(record).items():
            points.setdefault(f"{record['kind']}/{name}", []).append((record["step"], pytest.approx(value, rel=1e-6)))
    return points


def test_curves_are_the_log(tmp_path: Path) -> None:
    train(small(), tmp_path / "run", Curves(tmp_path / "run", Silent()))
    points = shown(tmp_path / "run")
    assert points == logged(tmp_path / "run")
    for tag in ("train/loss", "train/gradient_norm", "train/drift_over_limit", "train/ms_per_step", "test/loss"):
        assert points[tag][-1][0] == 6


def test_a_run_that_goes_on_goes_on_in_the_same_curves(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Killed):
        train(small(), run, Curves(run, killed_at(3)))
    with pytest.raises(Killed):
        resume(run, display=Curves(run, killed_at(5)))
    resume(run, display=Curves(run, Silent()))
    assert shown(run) == logged(run)


def test_a_run_that_had_no_curves_gets_them_from_its_log(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(Killed):
        train(small(), run, killed_at(5))
    assert not (run / "tensorboard").exists()
    resume(run, display=Curves(run, Silent()))
    assert shown(run) == logged(run)


def test_commands_write_curves_and_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "--T 2 --train-size 30 --test-size 20 --hidden-size 4 --steps 2 --batch-size 8 --tensorboard"
    words = ["compare", "copying", "--models", "lstm", *options.split(), "--out", str(tmp_path / "all")]
    assert main(words) == 0
    assert shown(tmp_path / "all" / "lstm")["test/loss"][0][0] == 2
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    capsys.readouterr()
    for command in ("train copying --model lstm", "reproduce scornn-copying-1000"):
        given = options.split() if "train" in command else ["--tensorboard"]
        assert main([*command.split(), *given, "--out", str(tmp_path / "none")]) == 2
        assert 'pip install "stiefelkit[tensorboard]"' in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
