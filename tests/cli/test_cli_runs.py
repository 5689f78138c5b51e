"""What commands do: they train, compare, draw, stop and resume, and tell what they did."""

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from tiny_runs import SMALL, TRAIN

import stiefelkit
from stiefelkit.cli import main
from stiefelkit.training import checkpoint
from stiefelkit.training.display import Terminal

Refused = Callable[[str], str]


def test_a_damaged_run_is_refused_in_one_sentence(finished: Path, refused: Refused) -> None:
    shutil.copytree(finished, "run")
    for path in checkpoint.checkpoints(Path("run/checkpoints")):
        (path / checkpoint.STATE).unlink()
    assert "damaged" in refused("train copying --out run --resume")
    Path("run/log.jsonl").write_text("garbage\n")
    assert "line 1" in refused("plot run")
    Path("run/log.jsonl").unlink()
    assert "log.jsonl" in refused("plot run")
    Path("run/config.json").write_text("{")
    assert "config.json" in refused("plot run")
    assert "config.json" in refused("train copying --out run --resume")


@pytest.mark.slow
def test_compare_trains_prints_draws_and_resumes(capsys: pytest.CaptureFixture[str], refused: Refused) -> None:
    words = f"compare copying --models scornn,lstm {SMALL} --out runs".split()
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "scornn" in table
    assert [line for line in table.splitlines() if "lstm" in line][-1].rstrip(" │").endswith("-")
    names = {path.name for path in Path("runs").iterdir()}
    assert names == {"scornn", "lstm", "learning.png", "orthogonality.png", "summary.json"}
    assert "--resume" in refused(" ".join(words))
    shutil.rmtree("runs/lstm")
    assert main([*words, "--resume"]) == 0
    again = capsys.readouterr().out
    assert "scornn is finished" in again
    assert "lstm" in again
    assert main("plot runs --out plots".split()) == 0
    assert {path.name for path in Path("plots").iterdir()} == {"learning.png", "orthogonality.png"}
    assert main("plot runs/lstm".split()) == 0
    assert Path("runs/lstm/learning.png").exists()


ENDLESS = f"{TRAIN} --out run --checkpoint-every 100000".replace("--steps 6", "--steps 100000").split()
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(stiefelkit.__file__).parents[1])}


def has_begun() -> bool:
    return Path("run/log.jsonl").exists() and bool(Path("run/log.jsonl").stat().st_size)


def saved_step() -> int:
    step, _ = checkpoint.load(checkpoint.checkpoints(Path("run/checkpoints"))[-1])
    assert step > 0
    return step


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)])
def test_a_signal_ends_with_128_and_its_number_and_tells_how_to_resume(name: str) -> None:
    number = signal.Signals[name]
    command, pipe = [sys.executable, "-m", "stiefelkit", *ENDLESS], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)
    while process.poll() is None and not has_begun():
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 128 + number, err
    assert err == ""
    assert out.splitlines()[-1].endswith("--checkpoint-every 100000 --resume")
    assert f"step {saved_step()}" in out


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="there are no terminals here")
def test_a_terminal_that_is_closed_leaves_a_run_that_is_saved() -> None:
    outside, inside = os.openpty()
    take = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
    command = [sys.executable, "-c", take, sys.executable, "-m", "stiefelkit", *ENDLESS]
    process = subprocess.Popen(
        command, stdin=inside, stdout=inside, stderr=inside, env=ENVIRONMENT, start_new_session=True
    )
    os.close(inside)
    while process.poll() is None and not has_begun():
        os.read(outside, 2**16)  # or its bar would wait for a reader
    os.close(outside)
    assert process.wait() in (2, 128 + signal.SIGHUP)  # 2 where its last words had nowhere to go
    saved_step()


def test_a_run_resumes_to_no_fewer_steps_and_holds_no_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train", "digits", "--model", "lstm", "--hidden-size", "4", "--schedule", "constant"]
    assert main([*run, "--steps", "3", "--out", str(tmp_path / "r")]) == 0
    before = (tmp_path / "r" / "config.json").read_bytes()
    assert main([*run, "--steps", "2", "--out", str(tmp_path / "r"), "--resume"]) == 2
    assert "--steps 3" in capsys.readouterr().err
    assert main(["compare", "digits", "--models", "lstm", "--resume", "--out", str(tmp_path / "r")]) == 2
    assert (tmp_path / "r" / "config.json").read_bytes() == before
    assert not (tmp_path / "r" / "lstm").exists()


def test_drift_writes_json_that_any_reader_takes_and_tells_of_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "drift --sizes 2 --steps 3 --methods unconstrained --lr 1e300 --dtype float64"
    assert main([*words.split(), "--out", str(tmp_path)]) == 0
    assert "nan" in capsys.readouterr().out
    assert "NaN" not in (tmp_path / "drift.json").read_text()


def test_the_bar_of_a_terminal_has_loss_and_scores_and_stays() -> None:
    screen = io.StringIO()
    shown = Terminal(Console(file=screen, force_terminal=True, width=80))
    shown.begin("[task] model", 2, 5)
    shown.stepped(5, 0.25)
    shown.record({"kind": "test", "step": 5, "loss": 0.5, "accuracy": 0.125})
    shown.note("a note")
    shown.end()
    *_, bar, _ = screen.getvalue().splitlines()
    assert all(part in bar for part in ("[task] model", "5/5", "loss 0.25", "test 0.5000, 12.5%"))


def test_commands_that_train_refuse_several_processes(monkeypatch: pytest.MonkeyPatch, refused: Refused) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for words in ("train copying --model scornn", "compare copying --models scornn", "sweep file.toml"):
        assert "torchrun" in refused(words)
    assert main(["list"]) == 0
