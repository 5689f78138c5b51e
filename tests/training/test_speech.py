"""Speech: which frames are predicted from which, what both means are of, whose recordings are where."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import small_data
import torch
from torch import Tensor, nn

from stiefelkit.errors import DataError, OptionError
from stiefelkit.testing import seeds
from stiefelkit.training import data, train
from stiefelkit.training.config import Config
from stiefelkit.training.data import recording
from stiefelkit.training.plot import plot
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import RunFolder, by_kind, summarise
from stiefelkit.training.tasks.speech import CORE_TEST, DEVELOPMENT, Recordings, Speech, corpus, recordings


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data.speech(tmp_path_factory.mktemp("speech"))


@pytest.fixture
def task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Speech:
    monkeypatch.setenv(data.VARIABLE, str(folder))
    return Speech(validation_speakers=2)


@pytest.fixture
def read_in(folder: Path) -> dict[str, Recordings]:
    return corpus(folder, 2)


class Repeating(nn.Module):
    """Answers what it reads, and keeps it."""

    def __init__(self, seen: list[Tensor] | None = None):
        super().__init__()
        self.seen = [] if seen is None else seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x


def test_a_frame_is_the_log_power_of_its_own_window(read_in: dict[str, Recordings]) -> None:
    samples, _ = recording(read_in["train"].paths[3])
    frames = read_in["train"].pieces[3]
    # periodic: 256 of 257 points, so that two windows half a window apart add to one
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    assert frames.shape == (1 + (len(samples) - 256) // 128, 129)
    for k, frame in enumerate(frames):
        spectrum = np.fft.rfft(samples[128 * k : 128 * k + 256].astype(float) * hann)
        assert np.abs(frame.numpy() - 10 * np.log10(1e-5 + np.abs(spectrum) ** 2)).max() < 1e-2


def test_a_target_is_the_frame_after_its_input_and_never_padding(task: Speech, read_in: dict[str, Recordings]) -> None:
    x, y = task.held_out()
    lengths = [len(frames) - 1 for frames in read_in["test"].pieces]
    assert len(set(lengths)) > 1
    for k, length in enumerate(lengths):
        assert torch.equal(x[k, 1:length], y[k, : length - 1])
        assert torch.equal(y[k, length - 1], read_in["test"].pieces[k][-1])
        assert y[k, :length].isfinite().all()
        assert y[k, length:].isinf().all()
        assert not x[k, length:].any()


def test_the_loss_is_the_mean_over_real_frames_and_padded_that_over_all(
    task: Speech, read_in: dict[str, Recordings]
) -> None:
    # repeating the last frame, recording by recording, without any padding
    errors = [(frames[:-1] - frames[1:]).square().double() for frames in read_in["test"].pieces]
    total, real = sum(each.sum() for each in errors), sum(each.numel() for each in errors)
    longest = max(len(frames) - 1 for part in read_in.values() for frames in part.pieces)
    scores = task.evaluate(Repeating(), chunk=5)
    assert scores["loss"] == pytest.approx(float(total / real), rel=1e-5)
    assert scores["padded"] == pytest.approx(float(total) / (len(errors) * longest * 129), rel=1e-5)
    x, y = task.held_out()
    assert float(task.loss(x, y)) == pytest.approx(scores["loss"], rel=1e-5)


def test_what_is_answered_in_padding_is_neither_loss_nor_gradient(task: Speech) -> None:
    x, y = task.batch(0, 20, seeds.seed())
    outside = y.isinf()
    assert outside.any()
    output = x.clone().requires_grad_()
    task.loss(output, y).backward()
    assert output.grad is not None
    assert output.grad.isfinite().all()
    assert not output.grad[outside].any()
    assert torch.equal(task.loss(torch.where(outside, 1e6, x), y), task.loss(x, y))


def test_a_model_of_standardized_levels_answers_in_decibels(task: Speech, read_in: dict[str, Recordings]) -> None:
    x, frames = torch.cat(read_in["train"].pieces)[None], torch.cat(read_in["train"].pieces)
    seen: list[Tensor] = []
    assert torch.allclose(task.answer(nn.Sequential(Repeating(seen)), x), x, atol=1e-3)
    assert torch.allclose(seen[0].std((0, 1)), torch.ones(129), atol=1e-2)
    with torch.no_grad():
        assert torch.allclose(task.answer(nn.Threshold(1e9, 0.0), x)[0, 0], frames.mean(0), atol=1e-3)


def test_the_baseline_is_the_best_line_from_the_last_frame(task: Speech, read_in: dict[str, Recordings]) -> None:
    x, y, test_x, test_y = (
        torch.cat([frames[cut] for frames in read_in[part].pieces]).double()
        for part in ("train", "test")
        for cut in (slice(-1), slice(1, None))
    )
    errors = []
    for k in range(129):
        fit = torch.linalg.lstsq(torch.stack([x[:, k], torch.ones(len(x))], 1).double(), y[:, k : k + 1]).solution
        errors.append((fit[0] * test_x[:, k] + fit[1] - test_y[:, k]).square().mean())
    assert task.baseline["loss"] == pytest.approx(float(torch.stack(errors).mean()), rel=1e-4)
    assert task.baseline["loss"] < task.evaluate(Repeating())["loss"]


def test_splits_are_of_different_speakers_and_fewer_recordings_of_all(task: Speech, folder: Path) -> None:
    first = recordings(folder, 2)
    who = {split: {path.parent.name for path in paths} for split, paths in first.items()}
    assert [len(names) for names in who.values()] == [8, 2, 3]
    assert not who["train"] & who["valid"]
    assert sum(map(len, first.values())) == 13 * 8
    few = Speech(validation_speakers=2, train_size=8)
    assert few.sequences == 8
    assert {path.parent.name for path in few._split("train").paths} == who["train"]
    with pytest.raises(OptionError, match="train_size"):
        Speech(validation_speakers=2, train_size=65).batch(0, 5, seeds.seed())


@pytest.fixture(scope="module")
def timit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data.timit(tmp_path_factory.mktemp("timit") / "TIMIT")


def test_timit_is_split_as_the_papers_do(timit: Path) -> None:
    assert (len(DEVELOPMENT), len(CORE_TEST), DEVELOPMENT & CORE_TEST) == (50, 24, set())
    splits = recordings(timit.parent, 7)
    who = {split: {path.parent.name.lower() for path in paths} for split, paths in splits.items()}
    assert who == {"train": {f"ftra{k}" for k in range(4)}, "valid": set(DEVELOPMENT), "test": set(CORE_TEST)}
    assert {path.name for paths in splits.values() for path in paths} == {"SX37.WAV"}
    assert len(corpus(timit, 7)["test"]) == 24


def test_a_copy_in_another_format_or_a_hidden_file_is_no_recording_of_its_own(timit: Path, tmp_path: Path) -> None:
    root = shutil.copytree(timit, tmp_path / "timit")
    for path in list(root.rglob("*.WAV")):
        shutil.copy(path, path.with_name(f"{path.name}.wav"))
        path.with_name(f"._{path.name}").write_text("what macOS leaves beside files")
    assert {split: len(paths) for split, paths in recordings(root, 7).items()} == {"train": 4, "valid": 50, "test": 24}


def test_folders_that_are_no_speech_are_refused(folder: Path, timit: Path, tmp_path: Path) -> None:
    def refused(root: Path, words: str, speakers: int = 2) -> None:
        with pytest.raises(DataError, match=words):
            recordings(root, speakers)

    shutil.copytree(timit, tmp_path / "t" / "timit")
    shutil.rmtree(next((tmp_path / "t").glob("timit/TEST/*/MDAB0")))
    refused(tmp_path / "t", "mdab0")
    shutil.copytree(folder, tmp_path / "a")
    refused(tmp_path / "a", "--validation-speakers", speakers=10)
    refused(tmp_path / "a" / "train", "with 0")
    shutil.copytree(folder, tmp_path / "a" / "b")
    for path in (tmp_path / "a" / "b" / "test").rglob("*.wav"):
        path.unlink()
    refused(tmp_path / "a", "with 2")
    refused(tmp_path / "a" / "b", "each part")


def test_a_run_learns_goes_on_and_is_read_where_its_data_are_not(
    task: Speech, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(hidden_size=12, steps=20, batch_size=16, eval_every=20, seed=seeds.seed())
    train.train(Config.resolve(task, "scornn", settings), tmp_path / "run")
    train.resume(tmp_path / "run", {"steps": 60})
    losses = [record["loss"] for record in by_kind(RunFolder.open(tmp_path / "run"))["test"]]
    assert losses[-1] < losses[0]
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    assert set(summarise(tmp_path / "run").test) == {"loss", "padded"}
    assert plot([tmp_path / "run"], tmp_path)
