"""A small training command, the config that it wrote, and commands that must fail."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import TRAIN

from stiefelkit.cli import main


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "run"
    assert main([*TRAIN.split(), "--out", str(path)]) == 0
    return path


@pytest.fixture
def config() -> Callable[[str], dict[str, Any]]:
    return lambda path: json.loads(Path(path, "config.json").read_text())["config"]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Runs a command that must fail, and returns its one sentence."""

    def run(words: str) -> str:
        before = sorted(Path().rglob("*"))
        capsys.readouterr()
        assert main(words.split()) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1, error
        assert error.startswith("Error: ")
        assert sorted(Path().rglob("*")) == before
        return error

    return run
