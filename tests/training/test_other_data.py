"""A run goes on with the data that it was started with, wherever they lie now, and with no others."""

import shlex
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import small_data
from tiny_runs import is_data, snapshot

from stiefelkit.cli import main
from stiefelkit.errors import RunError
from stiefelkit.testing import seeds
from stiefelkit.training import data
from stiefelkit.training.config import Config
from stiefelkit.training.display import Terminal
from stiefelkit.training.tasks import create
from stiefelkit.training.tasks.chars import Chars
from stiefelkit.training.train import resume, train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_data.every(tmp_path_factory.mktemp("data"))


def begun(folder: Path, run: Path) -> Path:
    """A run of two steps on a text."""
    with data.named(folder):
        train(Config("chars", "lstm", {"T": 9}, hidden_size=4, steps=2, batch_size=8, seed=seeds.seed()), run)
    return run


def other_text(folder: Path) -> Path:
    """A folder with a text in the same characters."""
    (folder / "chars").mkdir(parents=True)
    small_data.text(folder / "chars" / "words.txt", 650)
    return folder


def test_a_text_may_move_but_not_change(folder: Path, tmp_path: Path) -> None:
    run = begun(folder, tmp_path / "run")
    before = snapshot(run)
    with data.named(other_text(tmp_path / "other")), pytest.raises(RunError, match=r"sha256.*--data") as caught:
        resume(run, {"steps": 4})
    assert len(str(caught.value).splitlines()) == 1
    assert snapshot(run) == before
    moved = tmp_path / "moved"
    moved.mkdir()
    shutil.copy(folder / "chars" / "words.txt", moved / "renamed.txt")
    with data.named(moved):
        assert resume(run, {"steps": 4}).step == 4


def test_a_run_from_before_there_were_digests_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chars, "data_digest", lambda task: None)
    run = begun(folder, tmp_path / "run")
    assert b'"data"' not in (run / "config.json").read_bytes()
    monkeypatch.undo()
    with data.named(other_text(tmp_path / "other")):
        assert resume(run, {"steps": 4}).step == 4


@pytest.mark.parametrize("name", ["speech", "chars", "waveform"])
def test_a_digest_is_of_the_content_alone(name: str, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / name, tmp_path / "same")
    shutil.copytree(folder / name, tmp_path / "other")
    file = sorted(filter(is_data, (tmp_path / "other").rglob("*")))[-1]
    if name == "chars":
        file.write_text(file.read_text().replace("a", "b", 1))
    else:
        small_data.write(file, np.linspace(-0.5, 0.5, 4000))
    digests = []
    for place in (folder, tmp_path / "same", tmp_path / "other"):
        with data.named(place):
            digests.append(create(name).data_digest())
    assert digests[0] == digests[1] != digests[2]
    assert create("copying").data_digest() is None


@pytest.mark.parametrize("command", ["train", "compare"])
def test_the_line_to_resume_with_names_the_data(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Terminal, "stepped", lambda display, step, loss: signal.raise_signal(signal.SIGINT))
    models = {"train": "--model", "compare": "--models"}[command]
    words = [command, "chars", models, "lstm", "--T", "9", "--hidden-size", "4", "--steps", "2", "--batch-size", "8"]
    assert main([*words, "--data", str(folder), "--out", str(tmp_path / "run")]) == 130
    line = shlex.split(capsys.readouterr().out.splitlines()[-1].partition("resume with: ")[2])
    assert line[line.index("--data") + 1] == str(folder)
    monkeypatch.undo()
    assert main(line[1:]) == 0
    if command == "compare":
        (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("│ lstm"))
        assert float(row.split("│")[3]) > 0, "the share of the baseline"
