"""Thousands of damaged run folders: whatever matters is told in one sentence, and nothing else is touched.

Whether a mutation matters is decided by rule, before anything is run:

- state.json: every byte of the last checkpoint's matters; it may be told by a note, with the checkpoint before in use
  and the same bits in the end. That of an earlier checkpoint is not read while the last is whole.
- config.json: it says the same if it is JSON without a key that comes twice, with the same keys, values and types.
- log.jsonl: what lies behind the bytes that the checkpoint counts belongs to steps that will be done again.

STIEFELKIT_MUTATIONS sets how many of each file there are; `pytest -rP` shows the tally.
"""

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Killed

from stiefelkit.cli import main
from stiefelkit.errors import StiefelkitError
from stiefelkit.testing.seeds import seed
from stiefelkit.training import checkpoint, train
from stiefelkit.training.config import Config
from stiefelkit.training.display import Silent
from stiefelkit.training.log import read
from stiefelkit.training.plot import plot
from stiefelkit.training.summary import summarise

torch.set_num_threads(1)

COUNT = int(os.environ.get("STIEFELKIT_MUTATIONS", "80"))
COMMANDS, FIGURES = 10, 50
"""Every so many mutations the command line is tried, and a figure drawn."""

Draw = random.Random
Mutation = Callable[[bytes, Draw], bytes | None]
"""From content to other content, or to None for a folder in the file's place."""


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
    log = [{key: value for key, value in line.items() if key != "ms_per_step"} for line in read(path / "log.jsonl")]
    return (checkpoint.checkpoints(path / "checkpoints")[-1] / checkpoint.TENSORS).read_bytes(), log


def flipped(content: bytes, draw: Draw) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice([1, 1, 1, 2, 8])):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncated(content: bytes, draw: Draw) -> bytes:
    return content[: draw.randrange(len(content))]


def inserted(content: bytes, draw: Draw) -> bytes:
    at = draw.randrange(len(content) + 1)
    return (
        content[:at] + draw.choice([b" ", b"\n", b"0", b'"', b"}", b",", b"\x00", b"\xff", content[:50]]) + content[at:]
    )


def cut_out(content: bytes, draw: Draw) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + content[at + draw.choice([1, 1, 2, 10, 100]) :]


def swapped(content: bytes, draw: Draw) -> bytes:
    """Two lines change places; where there is one line, two runs of bytes."""
    lines = content.splitlines(keepends=True)
    if len(lines) < 2:
        a, b, c = sorted(draw.sample(range(len(content) + 1), 3))
        return content[:a] + content[b:c] + content[a:b] + content[c:]
    i, j = draw.sample(range(len(lines)), 2)
    lines[i], lines[j] = lines[j], lines[i]
    return b"".join(lines)


def other_digit(content: bytes, draw: Draw) -> bytes:
    changed = bytearray(content)
    at = draw.choice([i for i, byte in enumerate(content) if 48 <= byte < 58])
    changed[at] = 48 + (changed[at] - 48 + draw.randrange(1, 10)) % 10
    return bytes(changed)


def emptied(content: bytes, draw: Draw) -> bytes:
    return b""


def appended(content: bytes, draw: Draw) -> bytes:
    return content + draw.choice([b" ", b"\n", b"{}", b"garbage\n", b'{"kind": "train"}\n', draw.randbytes(20)])


def folder_instead(content: bytes, draw: Draw) -> None:
    return None


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    """Containers and the keys in them, all the way down."""
    if isinstance(tree, dict):
        own: list[tuple[Any, Any]] = [(tree, key) for key in tree]
    else:
        own = [(tree, index) for index in range(len(tree))] if isinstance(tree, list) else []
    return own + [spot for container, key in own for spot in _spots(container[key])]


def _in_json(change: Callable[[Any, Any, Draw], None]) -> Mutation:
    """A change in the content, of a whole file or of one line of it, that is still JSON."""

    def mutate(content: bytes, draw: Draw) -> bytes:
        lines = content.splitlines(keepends=True)
        at = draw.randrange(len(lines)) if content.endswith(b"}\n") and content.startswith(b'{"kind') else None
        tree = json.loads(content if at is None else lines[at])
        change(*draw.choice(_spots(tree)), draw)
        if at is None:
            return json.dumps(tree, indent=2 if content.startswith(b"{\n") else None).encode() + content[-1:].strip(
                b"}"
            )
        lines[at] = json.dumps(tree).encode() + b"\n"
        return b"".join(lines)

    return mutate


def _drop(container: Any, key: Any, draw: Draw) -> None:
    del container[key]


def _retype(container: Any, key: Any, draw: Draw) -> None:
    value = container[key]
    others: list[Any] = [None, True, [], {}, "", str(value), [value], {"": value}, float("nan"), 10**400, 1e308]
    others += [float(value)] if type(value) is int else [int(value)] if type(value) is float else []
    container[key] = draw.choice(others)


def _revalue(container: Any, key: Any, draw: Draw) -> None:
    value = container[key]
    if type(value) in (int, float):
        container[key] = draw.choice([value + 1, -value - 1, value * 2 + 1, 0 if value else 7])
    elif isinstance(value, str):
        container[key] = draw.choice(["", "adding", f"{value}x", value.upper(), "\ud800"])
    else:
        container[key] = 1


def _rename(container: Any, key: Any, draw: Draw) -> None:
    if isinstance(container, dict):
        container[f"{key}_"] = container.pop(key)
    else:
        container.append(container[key])


def doubled_key(content: bytes, draw: Draw) -> bytes:
    places = [i for i in range(len(content)) if content[i : i + 1] == b"{"]
    at = draw.choice(places) + 1
    key = draw.choice([b'"step": 1, ', b'"seed": 0, ', b'"seed": 0, "seed": 0, ', b'"lr": 1.0, "lr": 0.1, '])
    return content[:at] + key + content[at:]


def nested(content: bytes, draw: Draw) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + draw.choice([b"[", b'{"a":']) * 20_000 + content[at:]


MUTATIONS: dict[str, Mutation] = {
    "bits flipped": flipped,
    "truncated": truncated,
    "bytes inserted": inserted,
    "bytes cut out": cut_out,
    "lines swapped": swapped,
    "another digit": other_digit,
    "emptied": emptied,
    "garbage appended": appended,
    "a folder instead": folder_instead,
    "key deleted": _in_json(_drop),
    "type changed": _in_json(_retype),
    "value changed": _in_json(_revalue),
    "key renamed": _in_json(_rename),
    "key doubled": doubled_key,
    "nested deeply": nested,
}


def mutated(content: bytes, draw: Draw) -> tuple[str, bytes | None]:
    """The name of a mutation and other content than was given."""
    while True:
        name = draw.choice(list(MUTATIONS))
        result = MUTATIONS[name](content, draw)
        if result != content:
            return name, result


def says_the_same(a: bytes, b: bytes | None) -> bool:
    """Whether two files hold the same JSON, down to the types, and no key twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    try:
        return b is not None and repr(_ordered(json.loads(b, object_pairs_hook=unique))) == repr(
            _ordered(json.loads(a))
        )
    except (ValueError, RecursionError, AssertionError):
        return False


def _ordered(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _ordered(tree[key]) for key in sorted(tree)}
    return [_ordered(item) for item in tree] if isinstance(tree, list) else tree


def put(path: Path, content: bytes | None) -> None:
    if content is None:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content)


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
