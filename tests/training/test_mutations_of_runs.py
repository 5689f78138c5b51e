"""Thousands of damaged run folders: whatever matters is told in one sentence, and nothing else is touched.

Whether a mutation matters is decided by rule, before anything is run:

- state.json: every byte of the last checkpoint's matters; it may be told by a note, with the checkpoint before in use
  and the same bits in the end. That of an earlier checkpoint is not read while the last is whole.
- config.json: it says the same if it is JSON without a key that comes twice, with the same keys, values and types.
- log.jsonl: what lies behind the bytes that the checkpoint counts belongs to steps that will be done again.

STIEFELKIT_MUTATIONS sets how many of each file there are; `pytest -rP` shows the tally.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from file_mutations import MUTATIONS, Draw, mutated, put, says_the_same
from tiny_runs import Killed

from stiefelkit.cli import main
from stiefelkit.errors import StiefelkitError
from stiefelkit.testing.seeds import seed
from stiefelkit.training import checkpoint, train
from stiefelkit.training.config import Config
from stiefelkit.training.display import Silent
from stiefelkit.training.plot import plot
from stiefelkit.training.run_folder import MEASURED, read_log, summarise

torch.set_num_threads(1)

COUNT = int(os.environ.get("STIEFELKIT_MUTATIONS", "80"))
COMMANDS, FIGURES = 10, 50
"""Every so many mutations the command line is tried, and a figure drawn."""


class Fatal(Silent):
    """Kills the run after a step's line is written, and keeps the notes."""

    def __init__(self, fatal: int = 0):
        self.fatal = fatal
        self.notes: list[str] = []

    def record(self, record: Any) -> None:
        if record["step"] == self.fatal:
            raise Killed

    def note(self, sentence: str) -> None:
        self.notes.append(sentence)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps with checkpoints of steps 1 and 2, and one line in its log that none of them counts."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    config = Config(
        task="copying",
        model="scurnn",
        task_options={"T": 1, "train_size": 8, "test_size": 4},
        hidden_size=3,
        steps=3,
        batch_size=4,
        rates={"skew": 1e-4},
        eval_every=1,
        log_every=1,
        checkpoint_every=1,
    )
    with pytest.raises(Killed):
        train.train(config, path, Fatal(3))
    assert [checkpoint.step_of(each) for each in checkpoint.checkpoints(path / "checkpoints")] == [1, 2]
    return path


def ending(path: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """What two finished runs must share: the last tensors, and the log without times."""
    log = [{key: value for key, value in line.items() if key not in MEASURED} for line in read_log(path / "log.jsonl")]
    return (checkpoint.checkpoints(path / "checkpoints")[-1] / checkpoint.TENSORS).read_bytes(), log


def snapshot(path: Path) -> dict[str, bytes | None]:
    """Everything under a folder: the content of files, None for folders."""
    return {str(each.relative_to(path)): each.read_bytes() if each.is_file() else None for each in path.rglob("*")}


class Trial:
    """Resumes damaged copies of a run and counts how that ends.

    Args:
        stopped: the run.
        place: where copies are made.
    """

    def __init__(self, stopped: Path, place: Path):
        self.stopped, self.place = stopped, place
        self.whole = Path(shutil.copytree(stopped, place / "whole"))
        train.resume(self.whole)
        self.ending = ending(self.whole)
        self.tally: Counter[tuple[str, str]] = Counter()
        self.failures: list[str] = []

    def run(self, number: int, name: str, files: dict[str, bytes | None], matters: bool) -> None:
        """Resumes one copy: told or refused if the mutation matters, as if nothing had been otherwise."""
        path = Path(shutil.copytree(self.stopped, self.place / "run"))
        try:
            for file, content in files.items():
                put(path / file, content)
            verdict = self._verdict(path, number, matters)
        finally:
            shutil.rmtree(path)
        self.tally[name, verdict] += 1
        if verdict.isupper():
            self.failures.append(f"{verdict}: {name} of {', '.join(files)}, number {number}, seed offset {seed()}")

    def _verdict(self, path: Path, number: int, matters: bool) -> str:
        before, display = snapshot(path), Fatal()
        try:
            if number % FIGURES == 0:
                self._read(path, lambda path: plot([path], self.place / "figures"))
            self._read(path, summarise)
        except Exception as error:
            return f"TRACEBACK OF A READER ({type(error).__name__})".upper()
        try:
            train.resume(path, display=display)
        except StiefelkitError as error:
            if snapshot(path) != before:
                return "SOMETHING WRITTEN"
            if len(str(error).splitlines()) != 1:
                return "NOT ONE LINE"
            if not matters:
                return "HARMLESS BUT REFUSED"
            if number % COMMANDS == 0 and not self._refused_on_the_command_line(path):
                return "NO SENTENCE ON THE COMMAND LINE"
            return "refused"
        except Exception as error:
            return f"TRACEBACK ({type(error).__name__})".upper()
        try:
            same = ending(path) == self.ending
        except StiefelkitError:
            same = False
        if not same:
            return "ANOTHER RESULT"
        if not matters:
            return "HARMLESS BUT TOLD" if display.notes else "harmless"
        return "told, the checkpoint before taken" if display.notes else "SILENT"

    @staticmethod
    def _read(path: Path, reader: Callable[[Path], Any]) -> None:
        try:
            reader(path)
        except StiefelkitError as error:
            if len(str(error).splitlines()) != 1:
                raise ValueError("not one line") from error

    def _refused_on_the_command_line(self, path: Path) -> bool:
        self.capture.readouterr()
        code = main(["train", "copying", "--resume", "--out", str(path)])
        said = self.capture.readouterr()
        return code == 2 and said.err.startswith("Error: ") and said.err.count("\n") == 1 and not said.out

    capture: pytest.CaptureFixture[str]

    def report(self, file: str) -> None:
        """Prints the tally, and fails if anything was not as it must be."""
        verdicts = sorted({verdict for _, verdict in self.tally})
        print(f"\n{file}: {self.tally.total()} mutations; " + ", ".join(self._counts(verdicts)))
        for name in MUTATIONS:
            print(f"  {name:18}" + ", ".join(f"{self.tally[name, v]} {v}" for v in verdicts if self.tally[name, v]))
        assert not self.failures, "\n".join(self.failures[:50])

    def _counts(self, verdicts: list[str]) -> list[str]:
        return [
            f"{sum(count for (_, v), count in self.tally.items() if v == verdict)} {verdict}" for verdict in verdicts
        ]


@pytest.fixture
def trial(stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Trial:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # what is written counts here, not when it reaches the disk
    made = Trial(stopped, tmp_path)
    made.capture = capsys
    return made


@pytest.mark.slow
def test_mutations_of_state_are_told(trial: Trial) -> None:
    draw = Draw(seed(1))
    first, last = (f"checkpoints/step-{step:08d}/state.json" for step in (1, 2))
    contents = {file: (trial.stopped / file).read_bytes() for file in (first, last)}
    for number in range(COUNT):
        which = draw.choice([[last], [last], [first, last], [first, last], [first]])
        name, content = mutated(contents[last], draw)
        files = {file: MUTATIONS[name](contents[file], draw) for file in which if file != last}
        if last in which:
            files[last] = content
        if any(files[file] == contents[file] for file in files):
            files = {last: content}
        trial.run(number, name, files, matters=last in files)
    trial.report("state.json")


def test_mutations_of_config_are_refused(trial: Trial) -> None:
    draw = Draw(seed(2))
    original = (trial.stopped / "config.json").read_bytes()
    for number in range(COUNT):
        name, content = mutated(original, draw)
        trial.run(number, name, {"config.json": content}, matters=not says_the_same(original, content))
    trial.report("config.json")


def test_mutations_of_the_log_are_refused(trial: Trial) -> None:
    draw = Draw(seed(3))
    original = (trial.stopped / "log.jsonl").read_bytes()
    _, state = checkpoint.load(checkpoint.checkpoints(trial.stopped / "checkpoints")[-1])
    counted = state["log"]["bytes"]
    assert 0 < counted < len(original)
    for number in range(COUNT):
        name, content = mutated(original, draw)
        harmless = content is not None and content[:counted] == original[:counted]
        trial.run(number, name, {"log.jsonl": content}, matters=not harmless)
    trial.report("log.jsonl")


def test_the_trial_sees_what_is_silent_and_what_is_half_written(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """The saboteurs: a resume that looks at nothing, one that cleans up before it refuses, and one that breaks."""
    content = (trial.stopped / "config.json").read_bytes().replace(b'"seed": 0', b'"seed": 1')
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
        trial.run(1, "another digit", {"config.json": content}, matters=True)
    verdicts = [failure.partition(":")[0] for failure in trial.failures]
    assert verdicts == ["SILENT", "SOMETHING WRITTEN", "TRACEBACK (INDEXERROR)"]
