"""A run folder that somebody else has made touches nothing outside of it, and keeps nobody waiting."""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stiefelkit.cli import main
from stiefelkit.measuring.report import KIND
from stiefelkit.training import checkpoint

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


def made(name: str, make: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    """Puts something in the place of a file of the run, by a function of its path and the folder outside."""

    def harm(run: Path, outside: Path) -> None:
        if make is not os.link:
            (run / name).unlink(missing_ok=True)
        elif not (run / name).exists():
            (run / name).write_bytes(b"")
        try:
            make(run / name, outside / "aside")
        except PermissionError:
            pytest.skip("needs the right to make devices")

    return harm


def pipe(place: Path, outside: Path) -> None:
    os.mkfifo(place)


def device(place: Path, outside: Path) -> None:
    os.mknod(place, 0o666 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which has no end


def open_output(place: Path, outside: Path) -> None:
    place.symlink_to("/proc/self/fd/1")


def link_to_folder(place: Path, outside: Path) -> None:
    place.symlink_to(outside.parent / "folder")


def configured(**fields: Any) -> Callable[[Path, Path], None]:
    """Changes the config of a run, and gives it the digest of what it says then."""

    def harm(run: Path, outside: Path) -> None:
        record = json.loads((run / "config.json").read_bytes())
        record["config"].update(fields)
        del record["sha256"]
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        (run / "config.json").write_text(json.dumps(record | {"sha256": digest}))

    return harm


WAYS: dict[str, Callable[[Path, Path], None]] = {
    **{f"{name} is a link to another file": linked(name, moved=False) for name in FILES},
    **{f"{name} is a link to itself, moved": linked(name, moved=True) for name in (*FILES, STEP, "checkpoints")},
    **{f"{name} is a pipe": made(name, pipe) for name in (*FILES, ".config.json.tmp")},
    **{f"{name} is a hard link": made(name, os.link) for name in (*FILES, "learning.png", ".config.json.tmp")},
    **{f"{name} is a device": made(name, device) for name in FILES},
    **{f"{name} is what is open": made(name, open_output) for name in (*FILES, "learning.png")},
    "the temporary config is a link": linked(".config.json.tmp", moved=False),
    "a temporary checkpoint is a link": made("checkpoints/.tmp-00000003", link_to_folder),
    "a later checkpoint is a link": made("checkpoints/step-00000005", link_to_folder),
    "a plot is a link": linked("learning.png", moved=False),
    **{f"{name} is huge": lambda run, outside, name=name: os.truncate(run / name, 2**37) for name in FILES},
    "a model is a path": configured(model="../outside/victim"),
    "a model is a list": configured(model=[]),
    "data lie outside": configured(task="chars", task_options={"file": "../outside/*"}),
}
SWEEP = """task = "copying"
model = "scurnn"
T = 2
train-size = 30
test-size = 20
hidden-size = 4
steps = 2
batch-size = 8
[vary]
seed = [1]
"""
RECORD = {
    "kind": KIND,
    "machine": dict.fromkeys(("CPU", "device", "stiefelkit"), ""),
    "date": "",
    "command": "",
    "parts": [],
}
SMALL = "--T 2 --train-size 30 --test-size 20 --hidden-size 4 --batch-size 8"
COMMANDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "train": (f"train copying --model scurnn {SMALL} --steps 2 --out OUT/run", ("run", ".run.tmp")),
    "compare": (
        f"compare copying --models scurnn {SMALL} --steps 2 --out OUT --resume",
        ("scurnn", ".scurnn.tmp", "summary.json", ".summary.json.tmp", "learning.png"),
    ),
    "sweep": ("sweep TMP/sweep.toml --out OUT", ("seed=1", ".seed=1.tmp", "sweep.db", "sweep.db-journal")),
    "reproduce": ("reproduce scornn-adding-200 --epochs 1 --out OUT", ("scornn-adding-200",)),
    "reproduce --report": ("reproduce --report --out OUT", ("report", "scornn-adding-200")),
    "new-plugin": ("new-plugin apple --out OUT", ("stiefelkit-apple",)),
    "drift": (
        "drift --methods cayley --sizes 4x4 --steps 2 --out OUT",
        ("drift.json", ".drift.json.tmp", "drift.png", ".drift.png.tmp"),
    ),
    "bench": (
        "bench parametrizations --sizes 4,8 --parametrizations cayley --seconds 1e-3 --json OUT/rows.json",
        ("rows.json",),
    ),
    "report": ("report --from TMP/record.json --out OUT/page.html", ("page.html", ".page.html.tmp")),
}
"""Command to its words, and to the names in its folder that are links."""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder of the user's, which must be found as it was left."""
    place = tmp_path / "outside"
    (place / "folder").mkdir(parents=True)
    (place / "victim").write_bytes(b"the user's own\n")
    (place / "folder" / "kept").write_bytes(b"the user's own, too\n")
    (place / "victim").chmod(0o640)
    (place / "folder" / "kept").chmod(0o400)
    return place


def content(place: Path) -> dict[str, tuple[Any, ...]]:
    """All that a file, folder or link is: its bytes or where it leads, its mode, and when it was written."""
    found = {}
    for path in [place, *sorted(place.rglob("*"))]:
        state = path.lstat()
        holds = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(place))] = holds, state.st_mode, state.st_mtime_ns
    return found


def kept(outside: Path, capsys: pytest.CaptureFixture[str], *commands: list[str]) -> list[str]:
    """Runs commands, each of which goes or is refused in a sentence, and nothing outside may change."""
    before, said = content(outside), []
    for words in commands:
        capsys.readouterr()
        code = main(words)
        error = capsys.readouterr().err
        assert code in (0, 2), error
        assert len(error.splitlines()) == (code == 2), error
        assert not error.rstrip(".\n").endswith("None")
        assert content(outside) == before, words
        said.append(error)
    return said


@pytest.mark.parametrize("way", WAYS)
def test_a_hostile_run_touches_nothing_outside_of_its_folder(
    run: Path, outside: Path, way: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    if any(name in way for name in FILES):  # where what is drawn is as ever; drawing takes nine tenths of the time
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda _, content, **options: content.write(b"drawn"))
    WAYS[way](run, outside)
    before, resumed = content(outside), ["train", "copying", "--out", str(run), "--resume"]
    kept(outside, capsys, resumed, ["plot", str(run)])
    assert content(outside) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_hostile_place_for_results_has_nothing_outside_touched(
    tmp_path: Path, outside: Path, command: str, capsys: pytest.CaptureFixture[str]
):
    out, (words, names) = tmp_path / "out", COMMANDS[command]
    (tmp_path / "sweep.toml").write_text(SWEEP)
    (tmp_path / "record.json").write_text(json.dumps(RECORD))
    line = [word.replace("OUT", str(out)).replace("TMP", str(tmp_path)) for word in words.split()]
    for name, place in zip(names, itertools.cycle(("folder", "victim", "missing"))):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        (out / name).symlink_to(outside / place)
        kept(outside, capsys, line)
    shutil.rmtree(out)
    out.mkdir()
    if not command.startswith("reproduce"):  # which trains for hours
        assert main(line) == 0


class Swapped:
    """Puts a link in the place of a folder before one of the calls by which a program asks the system for something."""

    def __init__(self) -> None:
        self.number, self.act = 0, None
        sys.addaudithook(self.hear)  # for as long as the process lives

    def hear(self, event: str, _: Any) -> None:
        if self.act and (event == "open" or event.startswith(("os.", "shutil.", "glob."))):
            self.number -= 1
            if not self.number:
                act, self.act = self.act, None
                act()

    def before(self, number: int, act: Callable[[], Any]) -> None:
        self.number, self.act = number, act


@pytest.mark.skipif(os.open not in os.supports_dir_fd, reason="needs descriptors of folders")
def test_a_folder_that_is_swapped_for_a_link_meanwhile_leads_nowhere(tmp_path: Path):
    swapped = Swapped()
    for number in itertools.count(1):
        run, outside = tmp_path / f"{number}" / "run", tmp_path / f"{number}" / "outside"
        for step in (1, 2, 3):
            run.mkdir(parents=True, exist_ok=True)
            checkpoint.save(run / "checkpoints", step, {"w": torch.ones(2)})
        for name in (".tmp-00000001", "step-00000001", "step-00000002", "step-00000004"):
            (outside / name).mkdir(parents=True)
            for file in (checkpoint.STATE, checkpoint.TENSORS):
                (outside / name / file).write_text("the user's own")
        before = content(outside)

        def swap(run: Path = run, outside: Path = outside) -> None:
            (run / "checkpoints").rename(run / "aside")
            (run / "checkpoints").symlink_to(outside)

        swapped.before(number, swap)
        with contextlib.suppress(OSError):
            checkpoint.save(run / "checkpoints", 4, {"w": torch.ones(2)})
        has_ended, swapped.act = swapped.act is not None, None
        assert content(outside) == before, number
        if has_ended:
            break
    assert number > 20


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[31mb", "[red]a", "-a", "\udcff"])
def test_a_run_of_any_name_is_resumed_plotted_and_spoken_of_in_a_line(
    run: Path, outside: Path, name: str, capsys: pytest.CaptureFixture[str]
):
    named = run.rename(run.parent / name)
    path = str(named)
    kept(outside, capsys, ["train", "copying", "--out", path, "--resume"], ["plot", path, "--out", f"{path}/plots"])
    (named / "config.json").write_text("{")
    (said,) = kept(outside, capsys, ["plot", path])
    assert said.rstrip("\n").isprintable()
    assert sorted(p.name for p in named.parent.iterdir()) == sorted([name, "outside"])
