"""Sequence generation: an excerpt of a recording, and nothing to read it from."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import small_data
import torch
from task_laws import Constant

from stiefelkit.errors import DataError, OptionError
from stiefelkit.figure import Figures
from stiefelkit.testing import seeds
from stiefelkit.training import data, train
from stiefelkit.training import plot as plotting
from stiefelkit.training.config import Config
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


def test_a_plot_has_the_sequences_of_the_last_checkpoints_where_they_and_the_data_are(tmp_path: Path) -> None:
    for model in ("lstm", "ornn"):
        settings = Settings(hidden_size=4, steps=4, eval_every=2, lr=1e-2, seed=seeds.seed(1))
        train.train(Config.resolve(Waveform(T=20), model, settings), tmp_path / "runs" / model)
    runs, figures = plotting.find_runs([tmp_path / "runs"]), Figures(dpi=40)
    drawn = plotting.plot(runs, tmp_path, figures)
    assert [path.stem for path in drawn] == ["learning", "orthogonality", "generated"]
    for folder in map(RunFolder.open, runs):
        true, generated, error = map(np.array, plotting._sequences(folder) or ())
        assert np.array_equal(true, folder.config.build_task().held_out()[1][0])
        assert error == pytest.approx(by_kind(folder)["test"][-1]["loss"], rel=1e-4)
        assert ((generated - true) ** 2).mean() / true.var() == pytest.approx(error, rel=1e-4)
    with data.named(tmp_path / "runs"):
        assert [path.stem for path in plotting.plot([tmp_path / "runs/lstm"], tmp_path, figures)] == ["learning"]
    shutil.rmtree(tmp_path / "runs/lstm/checkpoints")
    assert [path.stem for path in plotting.plot([tmp_path / "runs/lstm"], tmp_path, figures)] == ["learning"]
