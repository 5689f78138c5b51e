"""Several processes train as one: the same steps up to rounding, one log, one end, and on from the same bits."""

import contextlib
import functools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_data
import tiny_runs
import torch
import torch.distributed as dist
from tiny_runs import Killed, Watching, content, killed_at
from two_ranks import on_two_ranks, under_torchrun

from stiefelkit.cli import main
from stiefelkit.errors import NonFiniteError, OptionError, RunError
from stiefelkit.testing import seeds
from stiefelkit.training import checkpoint, data
from stiefelkit.training.config import Config
from stiefelkit.training.ranks import VARIABLES, Ranks
from stiefelkit.training.run_folder import MEASURED, read_log
from stiefelkit.training.train import resume, train


def ranks() -> Ranks:
    return Ranks(dist.get_rank(), dist.get_world_size())


def small(**changes: Any) -> Config:
    """An odd batch, so that the shares differ, and an epoch of four steps."""
    own = {"skew": {"optimizer": "rmsprop", "lr": 1e-4}, "phase": {"optimizer": "adagrad", "lr": 1e-3}}
    sizes = {"seed": seeds.seed(), "hidden_size": 5, "steps": 8, "batch_size": 7, "optimizers": own}
    every = {"eval_every": 4, "log_every": 2, "checkpoint_every": 3}
    return tiny_runs.small(**{**sizes, **every, **changes})


FRAMES = {"model": "full_urnn", "optimizer": "multiplicative_cayley", "rates": {"stiefel": 1e-3}, "clip_norm": 0.5}
LINES = {"task": "chars", "task_options": {"reset": "line"}, "model": "scornn", "optimizer": "rmsprop"}
CASES = [{}, {**FRAMES, "optimizers": {}}, {**LINES, "optimizers": {}}]
"""Mixed optimizers; complex frames with clipping; targets of which one rank has more than the other."""


def last_state(path: Path) -> dict[str, Any]:
    return checkpoint.load(checkpoint.checkpoints(path / "checkpoints")[-1])[1]


def numbers(path: Path) -> list[float]:
    """The numbers in lines of a log, but for times and memory."""
    pairs = [pair for line in read_log(path) for pair in line.items() if pair[0] not in MEASURED]
    return [value for _, value in pairs if isinstance(value, int | float)]


def run_as_one(folder: Path, rank: int) -> None:
    for k, case in enumerate(CASES):
        config = small(**case)
        with data.named(folder / "data"):
            train(config, folder / f"two{k}", ranks=ranks())
            if rank:
                continue
            train(config, folder / f"one{k}")
        two, one = (last_state(folder / f"{name}{k}")["model"] for name in ("two", "one"))
        for key, value in two.items():
            if value.is_floating_point() or value.is_complex():
                assert torch.allclose(value, one[key], rtol=0, atol=1e-6), (case, key)
        lines = [numbers(folder / f"{name}{k}/log.jsonl") for name in ("two", "one")]
        assert lines[0] == pytest.approx(lines[1], rel=1e-4, abs=1e-6)


def run_resumed(folder: Path, rank: int) -> None:
    train(small(), folder / "whole", ranks=ranks())
    killed, stopped = folder / "killed", folder / "stopped"
    with pytest.raises(Killed):
        train(small(), killed, killed_at(5), ranks=ranks())
    dist.barrier()
    assert resume(killed, ranks=ranks()).step == 8
    assert resume(killed, ranks=ranks()).already

    def interrupt(step: int) -> None:
        if (rank, step) == (1, 3):
            signal.raise_signal(signal.SIGINT)

    outcome = train(small(), stopped, Watching(interrupt), ranks=ranks())
    assert (outcome.step, outcome.signal) == (4, signal.SIGINT)
    assert resume(stopped, ranks=ranks()).signal is None
    if rank == 0:
        assert content(killed) == content(stopped) == content(folder / "whole")


def run_failing(folder: Path, rank: int) -> None:
    def failing(step: int) -> None:
        if (rank, step) == (1, 5):
            raise NonFiniteError("Nothing is finite here")

    expected = [(RunError, "Rank 1 of 2 has failed: Nothing .* step 3 is kept"), (NonFiniteError, "^Nothing")][rank]
    with pytest.raises(expected[0], match=expected[1]):
        train(small(), folder / "run", Watching(failing), ranks=ranks())
    assert resume(folder / "run", ranks=ranks()).step == 8

    with pytest.raises(RunError, match="data on each"):
        ranks().same("data", rank)
    for sentence, changes in (("a sequence for each", {"batch_size": 1}), ("a GPU of each", {"device": "cpu:0"})):
        with pytest.raises((OptionError, RunError)[rank], match=f"^Training on .*{sentence}"):
            train(small(**changes), folder / "none", ranks=ranks())
    assert not (folder / "none").exists()

    if rank == 0:
        (folder / "run" / "checkpoints").rename(folder / "elsewhere")
    with pytest.raises(RunError, match="needs a checkpoint"):
        resume(folder / "run", {"steps": 12}, ranks=ranks())


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_as_one, run_resumed, run_failing])
def test_two_ranks_train_as_one_process_does(run: Callable[[Path, int], None], tmp_path: Path) -> None:
    small_data.text(tmp_path / "data" / "words.txt")
    assert on_two_ranks(functools.partial(run, tmp_path), tmp_path / "store") == [0, 0]


def test_shares_are_all_of_a_batch() -> None:
    batch = torch.arange(7)
    assert torch.equal(torch.cat([Ranks(rank, 3).share(batch) for rank in range(3)]), batch)
    assert Ranks().share(batch) is batch


@pytest.mark.parametrize("rank", [0, 1])
def test_other_commands_are_refused_and_the_first_process_says_so(
    rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in zip(VARIABLES, (str(rank), "2", "localhost", "1"), strict=True):
        monkeypatch.setenv(name, value)
    for words in ("compare copying --models scornn", "reproduce scornn-mnist-170", "sweep file.toml"):
        assert main(words.split()) == 2
        said = capsys.readouterr().err
        assert said == ("" if rank else f"Error: stiefelkit {words.split()[0]} needs one process, got several of "
                        "torchrun; start it without.\n")  # fmt: skip
    assert main(["list"]) == 0


def run_command(folder: Path, code: int, rank: int) -> None:
    os.chdir(folder)
    options = "--T 2 --train-size 30 --test-size 20 --hidden-size 5 --steps 4 --batch-size 7 --eval-every 2"
    words = f"train copying --model full_urnn {options} --out run".split()
    with open(f"said{rank}", "a") as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        assert main(words) == code


@pytest.mark.slow
def test_the_command_trains_once_and_one_process_speaks(tmp_path: Path) -> None:
    for code in (0, 2):  # each in processes of its own: a second group would find the store of the first
        assert under_torchrun(functools.partial(run_command, tmp_path, code)) == [0, 0]
    assert (tmp_path / "said1").read_text() == ""
    said = (tmp_path / "said0").read_text().splitlines()
    assert [line.split()[0] for line in said] == ["copying", "copying", "Finished", "Error:"]
    assert [line["step"] for line in read_log(tmp_path / "run" / "log.jsonl") if line["kind"] == "test"] == [2, 4]
