"""Places that cannot be written, names that are too long, sizes that no memory holds: one sentence, nothing lost."""

import errno
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Watching, small, snapshot, weights

from stiefelkit import files
from stiefelkit.cli import main
from stiefelkit.errors import OptionError, RunError
from stiefelkit.training import train
from stiefelkit.training.run_folder import is_run

pytest_plugins = ("tiny_runs",)
torch.set_num_threads(1)


def test_memory_that_runs_out_in_training_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hungry(step: int) -> None:
        if step == 3:
            torch.empty(10**15)

    with pytest.raises(OptionError, match="memory"):
        train.train(small(), tmp_path / "run", Watching(hungry))
    assert train.resume(tmp_path / "run").step == 6


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """A disk that takes so many more writes or renames and then no more."""
    left = -1

    def limited(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")
            left -= 1
            return real(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "replace", "mkdir"):
        monkeypatch.setattr(os, name, limited(getattr(os, name)))

    def limit(count: int) -> None:
        nonlocal left
        left = count

    yield limit
    left = -1


@pytest.mark.parametrize("count", range(0, 24, 2))
def test_a_disk_that_is_full_at_any_point_ends_in_a_sentence_and_the_run_goes_on(
    count: int, full: Callable[[int], None], whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    full(count)
    with pytest.raises(RunError, match="No space left on device"):
        train.train(small(), path)
    full(-1)
    assert not [each for each in tmp_path.rglob("*") if each.name.startswith(".") and each.name.endswith(".tmp")]
    (train.resume(path) if is_run(path) else train.train(small(), path))
    assert weights(path) == weights(whole)


def test_a_run_goes_on_where_a_disk_filled_up_under_a_line_of_its_log(
    run: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = max(each.stat().st_size for each in run.rglob("*") if each.is_file())
    log = run / "log.jsonl"
    with open(log, "ab") as file:
        file.write(b"x" * 50)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    kept = len(log.read_bytes())
    assert size > 0
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (kept, before[1]))
        with pytest.raises(RunError, match="File too large"):
            train.resume(run)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert train.resume(run).step == 6
    assert weights(run) == weights(whole)


def test_files_are_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("old")

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        files.write_atomically(file, b"new")
    assert snapshot(tmp_path) == {"file": b"old"}


@pytest.mark.parametrize("kind", ["pipe", "open"])
def test_what_is_no_regular_file_is_not_replaced(kind: str, tmp_path: Path) -> None:
    """As root would replace /dev/null, and the link /dev/stdout."""
    place = tmp_path / "place"
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to("/proc/self/fd/1")
    before = place.lstat()
    with pytest.raises(RunError, match="it is no regular file"):
        files.write_atomically(place, b"new")
    assert (
        main(["bench", "parametrizations", "--parametrizations", "cayley", "--sizes", "4", "--json", str(place)]) == 2
    )
    assert main(["report", "--out", str(place)]) == 2
    assert (place.lstat().st_ino, place.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert [*tmp_path.iterdir()] == [place]
