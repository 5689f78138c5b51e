"""Runs of a few steps, whole and stopped, and what the tests of run folders do to them."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stiefelkit.errors import StiefelkitError
from stiefelkit.testing import seeds
from stiefelkit.training import checkpoint, train
from stiefelkit.training.config import Config
from stiefelkit.training.display import Screen, Terminal
from stiefelkit.training.run_folder import MEASURED, read_log

SMALL = f"--seed {seeds.seed()} --T 2 --train-size 30 --test-size 20 --hidden-size 5 --steps 6 --batch-size 8"
SMALL += " --eval-every 3 --log-every 2"
TRAIN = f"train copying --model scornn {SMALL}"
"""A command of a second, without --out."""


class Killed(BaseException):
    """Stands for SIGKILL: nobody may catch it."""


class Watching(Terminal):
    """Calls a function after each step, and keeps the notes."""

    def __init__(self, after: Callable[[int], None] = lambda step: None):
        super().__init__(Screen(quiet=True))
        self.after = after
        self.notes: list[str] = []

    def stepped(self, step: int, loss: float) -> None:
        self.after(step)

    def record(self, record: Any) -> None:
        pass

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


def killed_at(step: int) -> Watching:
    def kill(now: int) -> None:
        if now == step:
            raise Killed

    return Watching(kill)


def killed_by(monkeypatch: pytest.MonkeyPatch, function: str, call: int) -> None:
    """Has a call of a function of `os` stand for the last thing that a process does."""
    real, count = getattr(os, function), 0

    def fatal(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == call:
            raise Killed
        return real(*args, **kwargs)

    monkeypatch.setattr(os, function, fatal)


def small(**changes: Any) -> Config:
    return Config(
        **{
            "task": "copying",
            "model": "scurnn",
            "task_options": {"T": 2, "train_size": 30, "test_size": 20},
            "hidden_size": 4,
            "steps": 6,
            "batch_size": 8,
            "eval_every": 2,
            "log_every": 1,
            "checkpoint_every": 2,
        }
        | changes
    )


def longer(**changes: Any) -> Config:
    """A run of twelve steps whose rates fall, with lines and checkpoints at odd places."""
    every = {"eval_every": 5, "log_every": 2, "checkpoint_every": 4}
    config = {"seed": seeds.seed(), "hidden_size": 5, "steps": 12, "rates": {"skew": 1e-4}, "schedule": "cosine"}
    return small(**{**config, "clip_norm": 1.0, **every, **changes})


def content(path: Path) -> tuple[list[dict[str, Any]], bytes, Any]:
    """What two runs must share: the log without times, and the last checkpoint without counts of bytes and times."""
    log = [{key: value for key, value in line.items() if key not in MEASURED} for line in read_log(path / "log.jsonl")]
    _, state = checkpoint.load(checkpoint.checkpoints(path / "checkpoints")[-1])
    return log, weights(path), state["optimizer"].get("param_groups")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that died after step 5, with checkpoints of steps 2 and 4."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.raises(Killed):
        train.train(small(), path, killed_at(5))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    train.train(small(), path)
    return path


@pytest.fixture
def run(stopped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if is_data(each)}


def is_data(path: Path) -> bool:
    return path.is_file() and path.name != ".lock"


def weights(path: Path) -> bytes:
    return (checkpoint.checkpoints(path / "checkpoints")[-1] / checkpoint.TENSORS).read_bytes()


def refused(path: Path) -> str:
    """The sentence by which `path` is not resumed; nothing in it may change."""
    before = snapshot(path)
    with pytest.raises(StiefelkitError) as caught:
        train.resume(path)
    assert snapshot(path) == before
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content, indent=2) + "\n")


def flip(path: Path, byte: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[byte] ^= 1 << bit
    path.write_bytes(content)


def latest_state(path: Path) -> Path:
    return checkpoint.checkpoints(path / "checkpoints")[-1] / checkpoint.STATE
