"""Hundreds of damaged run folders: what matters is told in one sentence, and nothing else is touched.

A rule decides what matters before anything is run. Every byte of the last state.json does; a note may tell of it, with
the checkpoint before in use and the same bits in the end. A config.json says the same if its keys, values and types are
the same and no key comes twice. What lies behind the bytes of log.jsonl that the checkpoint counts will be done again.
STIEFELKIT_MUTATIONS sets how many of each file there are.
"""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from file_mutations import MUTATIONS, Draw, mutated, put, says_the_same
from tiny_runs import Killed, Watching, content, small, snapshot

from stiefelkit.cli import main
from stiefelkit.errors import StiefelkitError
from stiefelkit.testing.seeds import seed
from stiefelkit.training import checkpoint, train
from stiefelkit.training.plot import plot
from stiefelkit.training.run_folder import summarise

COUNT = int(os.environ.get("STIEFELKIT_MUTATIONS", "80"))
COMMANDS, FIGURES = 10, 50
"""Every so many mutations the command line is tried, and a figure drawn."""
LAST = "checkpoints/step-00000002/state.json"


class Fatal(Watching):
    """Kills the run after a step's line is written."""

    def record(self, record: Any) -> None:
        if record["step"] == 3:
            raise Killed


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with checkpoints of steps 1 and 2, and one line in its log that none of them counts."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    sizes = {"task_options": {"T": 1, "train_size": 8, "test_size": 4}, "hidden_size": 3, "steps": 3, "batch_size": 4}
    with pytest.raises(Killed):
        train.train(small(rates={"skew": 1e-4}, eval_every=1, checkpoint_every=1, **sizes), path, Fatal())
    assert [checkpoint.step_of(each) for each in checkpoint.checkpoints(path / "checkpoints")] == [1, 2]
    return path


class Trial:
    """Resumes damaged copies of a run, and keeps what must not be."""

    def __init__(self, stopped: Path, place: Path, capture: pytest.CaptureFixture[str]):
        self.stopped, self.place, self.capture = stopped, place, capture
        whole = Path(shutil.copytree(stopped, place / "whole"))
        train.resume(whole)
        self.ending = content(whole)
        self.failures: list[str] = []

    def run(self, number: int, name: str, file: str, damaged: bytes | None, matters: bool) -> None:
        """Resumes one copy: told or refused if the mutation matters, as if nothing had been otherwise."""
        path = Path(shutil.copytree(self.stopped, self.place / "run"))
        try:
            put(path / file, damaged)
            fault = self._fault(path, number, matters)
        finally:
            shutil.rmtree(path)
        if fault:
            self.failures.append(f"{fault}: {name} of {file}, number {number}, seed offset {seed()}")

    def _fault(self, path: Path, number: int, matters: bool) -> str:
        before, display = snapshot(path), Watching()
        try:
            for reader in (summarise, *([lambda path: plot([path], self.place)] if number % FIGURES == 0 else [])):
                with contextlib.suppress(StiefelkitError):
                    reader(path)
            train.resume(path, display=display)
        except StiefelkitError as error:
            if snapshot(path) != before:
                return "something written"
            if len(str(error).splitlines()) != 1 or not matters:
                return "harmless but refused" if not matters else "not one line"
            return "" if number % COMMANDS or self._is_refused_on_the_command_line(path) else "no sentence"
        except Exception as error:
            return f"traceback ({type(error).__name__})"
        if content(path) != self.ending:
            return "another result"
        return "" if matters == bool(display.notes) else "silent" if matters else "harmless but told"

    def _is_refused_on_the_command_line(self, path: Path) -> bool:
        self.capture.readouterr()
        code = main(["train", "copying", "--resume", "--out", str(path)])
        said = self.capture.readouterr()
        return code == 2 and said.err.startswith("Error: ") and said.err.count("\n") == 1 and not said.out


@pytest.fixture
def trial(stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Trial:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # what is written counts here, not when it reaches the disk
    return Trial(stopped, tmp_path, capsys)


@pytest.mark.parametrize("file", [LAST, "config.json", "log.jsonl"])
def test_mutations_are_told_or_refused(trial: Trial, file: str) -> None:
    draw = Draw(seed(1))
    original = (trial.stopped / file).read_bytes()
    counted = checkpoint.load((trial.stopped / LAST).parent)[1]["log"]["bytes"]
    for number in range(COUNT):
        name, damaged = mutated(original, draw)
        harmless = {
            LAST: False,
            "config.json": says_the_same(original, damaged),
            "log.jsonl": damaged is not None and damaged[:counted] == original[:counted],
        }
        trial.run(number, name, file, damaged, matters=not harmless[file])
    assert not trial.failures, "\n".join(trial.failures[:50])


def test_a_state_with_the_right_digests_is_taken_or_refused(stopped: Path, tmp_path: Path) -> None:
    draw, original = Draw(seed(2)), json.loads((stopped / LAST).read_bytes())["record"]
    for number in range(COUNT):
        name = draw.choice(["key deleted", "type changed", "value changed", "key renamed"])
        changed = json.loads(MUTATIONS[name](json.dumps(original).encode(), draw) or b"")
        path = Path(shutil.copytree(stopped, tmp_path / f"{number}"))
        shutil.rmtree(path / "checkpoints/step-00000001")
        (path / LAST).write_bytes(checkpoint._sealed(changed))
        with contextlib.suppress(StiefelkitError):
            assert train.resume(path).step == 3, (number, name)


@pytest.mark.parametrize(("key", "value"), [("steps", -1), ("loss", "0"), ("seconds", None)])
def test_a_window_that_is_none_is_refused(stopped: Path, tmp_path: Path, key: str, value: object) -> None:
    changed, path = json.loads((stopped / LAST).read_bytes())["record"], shutil.copytree(stopped, tmp_path / "run")
    window = dict(changed["state"]["items"])["window"]["items"]
    window[:] = [[name, value if name == key else kept] for name, kept in window]
    (path / LAST).write_bytes(checkpoint._sealed(changed))
    with pytest.raises(StiefelkitError, match=key):
        train.resume(path)


def test_the_trial_sees_what_is_silent_and_what_is_half_written(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saboteurs: a resume that looks at nothing, one that cleans up before it refuses, and one that breaks."""
    damaged = (trial.stopped / "config.json").read_bytes().replace(b'"seed": 0', b'"seed": 1')
    real = train.resume

    def blind(path: Path, display: Any) -> Any:
        shutil.copy(trial.stopped / "config.json", path)
        return real(path, display=display)

    def rash(path: Path, display: Any) -> Any:
        (path / "log.jsonl").write_bytes(b"")
        return real(path, display=display)

    def broken(path: Path, display: Any) -> Any:
        raise IndexError("a bug")

    for resume in (blind, rash, broken):
        monkeypatch.setattr(train, "resume", resume)
        trial.run(1, "another digit", "config.json", damaged, matters=True)
    assert [failure.partition(":")[0] for failure in trial.failures] == [
        "silent",
        "something written",
        "traceback (IndexError)",
    ]
