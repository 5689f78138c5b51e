"""Sequence generation: an excerpt of a recording, and nothing to read it from."""

from pathlib import Path

import numpy as np
import pytest
import small_data
import torch
from task_laws import Constant

from stiefelkit.errors import DataError, OptionError
from stiefelkit.figure import Figures
from stiefelkit.testing import seeds
from stiefelkit.training import checkpoint, data, train
from stiefelkit.training.config import Config
from stiefelkit.training.plot import plot
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import RunFolder, by_kind, read_log, summarise
from stiefelkit.training.tasks.waveform import Waveform

SAMPLES = 0.4 * np.sin(np.arange(2000) ** 1.1 / 5) * np.linspace(0.5, 1, 2000)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(data.VARIABLE, str(tmp_path / "data"))
    small_data.write(tmp_path / "data" / "b.wav", SAMPLES, 44100)
    return tmp_path / "data"


def test_excerpts_follow_each_other_and_reach_one() -> None:
    start = round(0.01 * 44100)
    for k in range(4):
        x, y = Waveform(excerpt=k, start=0.01).held_out()
        piece = SAMPLES[start + 320 * k : start + 320 * (k + 1)]
        assert torch.equal(x, torch.ones(1, 320, 1))
        assert y.shape == (1, 320)
        assert np.abs(y[0].numpy() - piece / np.abs(piece).max()).max() < 1e-3


def test_the_mean_scores_one() -> None:
    task = Waveform(T=100)
    _, y = task.held_out()
    assert task.evaluate(Constant(y.mean(dim=1)))["loss"] == pytest.approx(1, rel=1e-5)
    assert task.evaluate(Constant(y.mean(dim=1) + y.std(correction=0)))["loss"] == pytest.approx(2, rel=1e-5)


def test_every_step_reads_the_one_sequence() -> None:
    task = Waveform(T=50)
    batches = [task.batch(step, 1, seeds.seed(step)) for step in (0, 7)]
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))
    with pytest.raises(OptionError, match="its 1 training sequences"):
        task.batch(0, 2, seeds.seed())


def test_the_first_recording_by_name_is_taken_unless_one_is_named_and_what_is_no_excerpt_refused(folder: Path) -> None:
    small_data.write(folder / "a.flac", SAMPLES[::-1])
    assert not torch.equal(Waveform().held_out()[1], Waveform(file="b.wav").held_out()[1])
    small_data.write(folder / "silence.wav", np.zeros(999))
    for task, words in (
        (Waveform(file="c.wav"), "none"),
        (Waveform(file="silence.wav"), "constant"),
        (Waveform(file="b.wav", excerpt=6), "2000"),
    ):
        with pytest.raises(DataError, match=words):
            task.held_out()


def test_a_run_learns_and_logs_no_epoch_of_one_step(tmp_path: Path) -> None:
    task = Waveform(T=20, excerpt=2)
    config = Config.resolve(task, "scurnn", Settings(hidden_size=12, steps=80, lr=1e-2, seed=seeds.seed()))
    train.train(config, tmp_path / "run")
    assert summarise(tmp_path / "run").test["loss"] < 0.7
    assert {line["kind"] for line in read_log(tmp_path / "run" / "log.jsonl", task.scores)} == {"train", "test"}


def test_the_last_checkpoint_generates_what_the_log_has_scored(tmp_path: Path) -> None:
    task = Waveform(T=20)
    settings = Settings(hidden_size=4, steps=4, eval_every=2, lr=1e-2, seed=seeds.seed(1))
    train.train(Config.resolve(task, "ornn", settings), tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    model, (x, y) = run.config.build_model(task), task.held_out()
    saved = checkpoint.latest(run.checkpoints)
    assert saved is not None
    model.load_state_dict(saved[1]["model"])
    error = float(task.loss(task.answer(model, x), y))
    assert error == pytest.approx(by_kind(run)["test"][-1]["loss"], rel=1e-4)
    assert [path.stem for path in plot([run.path], tmp_path, Figures(dpi=40))] == ["learning", "orthogonality"]
