"""A run folder that somebody else has made touches nothing outside of it, and keeps nobody waiting."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stiefelkit.errors import RunError
from stiefelkit.training import train
from stiefelkit.training.board import Board
from stiefelkit.training.plot import plot
from stiefelkit.training.summary import summarise

pytest_plugins = ("tiny_runs",)
pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="links and pipes of POSIX")

STEP = "checkpoints/step-00000004"
FILES = ("config.json", "log.jsonl", ".lock", f"{STEP}/state.json", f"{STEP}/tensors.safetensors")


def linked(name: str, moved: bool) -> Callable[[Path, Path], None]:
    """Puts a link in the place of something in the run, to a victim or to the thing itself, moved out of the run."""

    def harm(run: Path, outside: Path) -> None:
        place, aside = run / name, outside / "aside"
        if place.exists() and moved:
            shutil.move(place, aside)
        elif place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
        place.symlink_to(aside if moved and aside.exists() else outside / "victim")

    return harm


def piped(name: str) -> Callable[[Path, Path], None]:
    def harm(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        os.mkfifo(run / name)

    return harm


def linked_folder(name: str) -> Callable[[Path, Path], None]:
    def harm(run: Path, outside: Path) -> None:
        (run / name).symlink_to(outside / "folder")

    return harm


WAYS: dict[str, Callable[[Path, Path], None]] = {
    **{f"{name} is a link to another file": linked(name, moved=False) for name in FILES},
    **{f"{name} is a link to itself, moved": linked(name, moved=True) for name in (*FILES, STEP, "checkpoints")},
    **{f"{name} is a pipe": piped(name) for name in FILES},
    "the temporary config is a link": linked(".config.json.tmp", moved=False),
    "the temporary config is a pipe": piped(".config.json.tmp"),
    "a temporary checkpoint is a link": linked_folder("checkpoints/.tmp-00000003"),
    "a later checkpoint is a link": linked_folder("checkpoints/step-00000005"),
    "the curves are a link": linked_folder("tensorboard"),
    "a plot is a link": linked("learning.png", moved=False),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the user's, which must be found as it was left."""
    place = tmp_path / "outside"
    (place / "folder").mkdir(parents=True)
    (place / "victim").write_bytes(b"the user's own\n")
    (place / "folder" / "kept").write_bytes(b"the user's own, too\n")
    return place


def content(place: Path) -> dict[str, bytes]:
    return {str(p.relative_to(place)): p.read_bytes() for p in sorted(place.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("way", WAYS)
def test_a_hostile_run_touches_nothing_outside_of_its_folder(run: Path, outside: Path, way: str):
    WAYS[way](run, outside)
    before = content(outside)
    for act in (
        lambda: train.resume(run, board=Board(tensorboard=True)),
        lambda: summarise(run),
        lambda: plot([run], run),
    ):
        sentence = refusal(act)
        assert len(sentence.splitlines()) <= 1
        assert not sentence.rstrip(".").endswith("None")
        assert content(outside) == before


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except RunError as error:
        return str(error)
    return ""
