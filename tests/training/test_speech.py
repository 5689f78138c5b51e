"""Speech: which frames are predicted from which, what both means are of, whose recordings are where, how it sounds."""

import shutil
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_data
import torch
from torch import Tensor, nn

from stiefelkit.errors import DataError, OptionError
from stiefelkit.testing import seeds
from stiefelkit.training import data, train
from stiefelkit.training.audio import read
from stiefelkit.training.config import Config
from stiefelkit.training.plot import plot
from stiefelkit.training.recipes import Settings
from stiefelkit.training.run_folder import summarise
from stiefelkit.training.tasks.speech import Speech
from stiefelkit.training.tasks.speech.corpus import CORE_TEST, DEVELOPMENT, Corpus, corpus, levels, rebuilt, recordings
from stiefelkit.training.tasks.speech.quality import Line, quality


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data.speech(tmp_path_factory.mktemp("speech"))


@pytest.fixture
def task(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Speech:
    monkeypatch.setenv(data.VARIABLE, str(folder))
    return Speech(validation_speakers=2)


@pytest.fixture
def read_in(folder: Path) -> Corpus:
    return corpus(folder, 2)


class Repeating(nn.Module):
    """Answers what it reads."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_frame_is_the_log_power_of_its_own_window(read_in: Corpus) -> None:
    samples, _ = read(read_in.paths["train"][3])
    frames = read_in.frames["train"][3]
    # periodic: 256 of 257 points, so that two windows half a window apart add to one
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(256) / 256)
    assert frames.shape == (1 + (len(samples) - 256) // 128, 129)
    for k, frame in enumerate(frames):
        spectrum = np.fft.rfft(samples[128 * k : 128 * k + 256].astype(float) * hann)
        assert np.abs(frame.numpy() - 10 * np.log10(1e-5 + np.abs(spectrum) ** 2)).max() < 1e-2


def test_a_target_is_the_frame_after_its_input_and_never_padding(task: Speech, read_in: Corpus) -> None:
    x, y = task.held_out()
    lengths = [len(frames) - 1 for frames in read_in.frames["test"]]
    assert len(set(lengths)) > 1
    for k, length in enumerate(lengths):
        assert torch.equal(x[k, 1:length], y[k, : length - 1])
        assert torch.equal(y[k, length - 1], read_in.frames["test"][k][-1])
        assert y[k, :length].isfinite().all()
        assert y[k, length:].isinf().all()
        assert not x[k, length:].any()


def test_the_loss_is_the_mean_over_real_frames_and_padded_that_over_all(task: Speech, read_in: Corpus) -> None:
    # repeating the last frame, recording by recording, without any padding
    errors = [(frames[:-1] - frames[1:]).square().double() for frames in read_in.frames["test"]]
    total, real = sum(each.sum() for each in errors), sum(each.numel() for each in errors)
    longest = max(len(frames) - 1 for split in read_in.frames.values() for frames in split)
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


def test_a_model_of_standardized_levels_answers_in_decibels(task: Speech, read_in: Corpus) -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.zeros_like(x)

    x, _ = task.held_out()
    train_frames = torch.cat(read_in.frames["train"])
    assert torch.allclose(task.answer(Mean(), x)[0, 0], train_frames.mean(0), atol=1e-3)
    assert torch.allclose(task.answer(Repeating(), x), x, atol=1e-3)

    class Seen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.x = x
            return x

    seen = Seen()
    task.answer(seen, train_frames.unsqueeze(0))
    assert torch.allclose(seen.x.std((0, 1)), torch.ones(129), atol=1e-2)


def test_the_baseline_is_the_best_line_from_the_last_frame(task: Speech, read_in: Corpus) -> None:
    line = Line.fitted(read_in.frames["train"])
    x = torch.cat([frames[:-1] for frames in read_in.frames["train"]]).double()
    y = torch.cat([frames[1:] for frames in read_in.frames["train"]]).double()
    for k in (0, 40, 128):
        fit = torch.linalg.lstsq(torch.stack([x[:, k], torch.ones(len(x))], 1).double(), y[:, k : k + 1]).solution
        assert line.slope[k].item() == pytest.approx(fit[0].item(), abs=1e-3)
        assert line.offset[k].item() == pytest.approx(fit[1].item(), abs=1e-2)
    assert task.baseline["loss"] < task.evaluate(Repeating())["loss"]


def test_splits_are_of_different_speakers(folder: Path) -> None:
    first, again = recordings(folder, 2), recordings(folder, 2)
    assert first == again
    who = {split: {path.parent.name for path in paths} for split, paths in first.items()}
    assert [len(names) for names in who.values()] == [8, 2, 3]
    assert not who["train"] & who["valid"]
    assert sum(map(len, first.values())) == 13 * 8


def test_fewer_recordings_are_of_all_speakers(task: Speech, folder: Path) -> None:
    few = Speech(validation_speakers=2, train_size=8)
    assert few.sequences == 8
    assert {recordings(folder, 2)["train"][i].parent.name for i in few._chosen()} == {
        path.parent.name for path in recordings(folder, 2)["train"]
    }
    with pytest.raises(OptionError, match="train_size <= 64"):
        Speech(validation_speakers=2, train_size=65).batch(0, 5, seeds.seed())


@pytest.mark.parametrize("options", [{"validation_speakers": 0}, {"train_size": 0}, {"quality": "yes"}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        Speech(**options)


@pytest.fixture(scope="module")
def timit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data.timit(tmp_path_factory.mktemp("timit") / "TIMIT")


def test_timit_is_split_as_the_papers_do(timit: Path) -> None:
    assert (len(DEVELOPMENT), len(CORE_TEST), DEVELOPMENT & CORE_TEST) == (50, 24, set())
    splits = recordings(timit.parent, 7)
    who = {split: {path.parent.name.lower() for path in paths} for split, paths in splits.items()}
    assert who == {"train": {f"ftra{k}" for k in range(4)}, "valid": set(DEVELOPMENT), "test": set(CORE_TEST)}
    assert {path.name for paths in splits.values() for path in paths} == {"SX37.WAV"}
    assert len(corpus(timit, 7).frames["test"]) == 24


def test_a_copy_in_another_format_or_a_hidden_file_is_no_recording_of_its_own(timit: Path, tmp_path: Path) -> None:
    root = shutil.copytree(timit, tmp_path / "timit")
    for path in list(root.rglob("*.WAV")):
        shutil.copy(path, path.with_name(f"{path.name}.wav"))
        path.with_name(f"._{path.name}").write_text("what macOS leaves beside files")
    assert {split: len(paths) for split, paths in recordings(root, 7).items()} == {"train": 4, "valid": 50, "test": 24}


def test_timit_without_a_test_speaker_is_refused(timit: Path, tmp_path: Path) -> None:
    root = shutil.copytree(timit, tmp_path / "timit")
    shutil.rmtree(next(root.glob("TEST/*/MDAB0")))
    refused(root, r"24 core test speakers.*mdab0 \(1 missing\)")


def refused(folder: Path, words: str, speakers: int = 2) -> None:
    with pytest.raises(DataError, match=words) as caught:
        corpus(folder, speakers)
    assert len(str(caught.value).splitlines()) == 1
    assert str(folder) in str(caught.value)


def test_folders_that_are_no_speech_are_refused(folder: Path, tmp_path: Path) -> None:
    refused(tmp_path, "with 0 of that kind; name its folder with --data")
    small_data.speech(tmp_path / "a", speakers=3, each=1)
    refused(tmp_path / "a", "--validation-speakers", speakers=3)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    refused(tmp_path, "with 2 of that kind")
    shutil.rmtree(tmp_path / "b" / "test" / "t00")
    for path in (tmp_path / "b" / "test").rglob("*.wav"):
        path.unlink()
    refused(tmp_path / "b", "in its test part")


def test_a_damaged_recording_stops_a_run_before_its_folder_appears(tmp_path: Path) -> None:
    root = small_data.speech(tmp_path / "data", speakers=3, each=1, ending=".flac")
    config = Config("speech", "lstm", {"validation_speakers": 1}, hidden_size=4, steps=2, batch_size=2)
    broken = root / "test" / "t01" / "u0.flac"
    whole = broken.read_bytes()
    for content, words in ((whole[:-9], "whole"), (b"", "whole")):
        broken.write_bytes(content)
        with data.named(root), pytest.raises(DataError, match=words):
            train.train(config, tmp_path / "run")
    small_data.write(broken, np.zeros(383))
    with data.named(root), pytest.raises(DataError, match="384 samples at 8000 Hz or more, got 383"):
        train.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_learns_goes_on_and_is_read_where_its_data_are_not(
    task: Speech, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(hidden_size=12, steps=20, batch_size=16, eval_every=20, seed=seeds.seed())
    train.train(Config.resolve(task, "scornn", settings), tmp_path / "run")
    train.resume(tmp_path / "run", {"steps": 60})
    first, last = (record["loss"] for record in (_test_lines(tmp_path / "run")[k] for k in (0, -1)))
    assert last < first
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    assert set(summarise(tmp_path / "run").test) == {"loss", "padded"}
    assert plot([tmp_path / "run"], tmp_path)


def _test_lines(run: Path) -> list[dict[str, float]]:
    from stiefelkit.training.run_folder import read_log

    return [record for record in read_log(run / "log.jsonl", ("loss",)) if record["kind"] == "test"]


@pytest.fixture
def spoken() -> np.ndarray:
    """Two seconds that swell and fade like syllables."""
    source = np.random.default_rng(seeds.seed(3))
    time = np.arange(16000) / 8000
    voiced = sum(np.sin(2 * np.pi * 120 * k * time + source.uniform(0, 6)) / k for k in range(1, 20))
    return (0.05 * voiced * np.sin(2 * np.pi * 2 * time) ** 2).astype(np.float32)


def test_true_levels_give_the_signal_back(spoken: np.ndarray) -> None:
    samples = torch.from_numpy(spoken)
    true, heard = rebuilt(samples, levels(samples)[1:])
    # from the middle of the second window to that of the last
    assert torch.allclose(true, samples[256 : 256 + len(true)], atol=1e-6)
    assert torch.allclose(heard, true, atol=1e-4)


def test_quality_falls_with_noise(spoken: np.ndarray) -> None:
    pytest.importorskip("pesq", reason="pesq, of the extra [speech], wants a compiler to be installed")
    noise = np.random.default_rng(seeds.seed(4)).normal(size=len(spoken)).astype(np.float32)
    clean, hissing, drowned = (quality([(spoken, spoken + scale * noise)]) for scale in (0.0, 0.01, 0.2))
    assert clean["segsnr"] == 35
    assert clean["stoi"] == pytest.approx(1, abs=1e-4)
    assert clean["pesq"] > 4.4
    for name in clean:
        assert clean[name] > hissing[name] > drowned[name]


def test_quality_is_of_what_the_model_predicts(tmp_path: Path, spoken: np.ndarray) -> None:
    pytest.importorskip("pesq", reason="pesq, of the extra [speech], wants a compiler to be installed")
    root = small_data.speech(tmp_path, speakers=3, each=1)
    small_data.write(root / "test" / "t00" / "long.wav", spoken)
    with data.named(root):
        task = Speech(validation_speakers=1, quality=True)
        assert set(task.baseline) == set(task.scores)
        repeated = task.evaluate(Repeating())
        assert set(repeated) == set(task.scores)

        class Louder(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x + 1

        assert task.evaluate(Louder())["segsnr"] < repeated["segsnr"]


def test_recordings_that_cannot_be_judged_are_noticed_before_training(
    tmp_path: Path, spoken: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = types.SimpleNamespace(pesq=lambda *_, **__: 1.0, PesqError=types.SimpleNamespace(RETURN_VALUES=0))
    monkeypatch.setitem(sys.modules, "pesq", stub)
    root = small_data.speech(tmp_path, speakers=3, each=1)
    for path in (root / "test").rglob("*.*"):
        small_data.write(path.with_suffix(".wav"), spoken[:1500])
    with data.named(root):
        with pytest.raises(DataError, match="Quality stoi needs a recording that is long and loud enough"):
            Speech(validation_speakers=1, quality=True).held_out()
        small_data.write(root / "test" / "t00" / "long.wav", spoken)
        corpus.cache_clear()
        assert len(Speech(validation_speakers=1, quality=True).held_out()[0]) > 1


@pytest.mark.parametrize("package", ["pystoi", "pesq"])
def test_quality_without_its_packages_says_what_to_install(
    package: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pystoi", sys.modules.get("pystoi", sys))
    monkeypatch.setitem(sys.modules, "pesq", sys.modules.get("pesq", sys))
    monkeypatch.setitem(sys.modules, package, None)
    with data.named(folder), pytest.raises(DataError, match=rf'{package}.*pip install "stiefelkit\[speech\]"'):
        Speech(validation_speakers=2, quality=True).held_out()
