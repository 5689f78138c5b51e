"""The laws of the command line: user errors are one sentence with exit code 2, and leave nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import stiefelkit
from stiefelkit.cli import main
from stiefelkit.measuring.moved_frames import own_optimizers, peer_optimizers
from stiefelkit.testing import seeds
from stiefelkit.training import checkpoint
from stiefelkit.training.config import optimizers
from stiefelkit.training.session import Session

SMALL = (
    f"--seed {seeds.seed()} --T 2 --train-size 30 --test-size 20 --hidden-size 5 --steps 6 --batch-size 8"
    " --eval-every 3 --log-every 2"
)
TRAIN = f"train copying --model scornn {SMALL}"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "run"
    assert main([*TRAIN.split(), "--out", str(path)]) == 0
    return path


def config(path: str) -> dict[str, Any]:
    return json.loads(Path(path, "config.json").read_text())["config"]


def refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command that must fail, and returns its one sentence."""
    before = sorted(Path().rglob("*"))
    capsys.readouterr()
    assert main(words.split()) == 2
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert len(lines) == 1, output.err
    assert lines[0].startswith("Error: ")
    assert "Traceback" not in output.err
    assert sorted(Path().rglob("*")) == before
    return lines[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("trian digits", "train"),
        ("train digit --model scornn", 'did you mean "digits"'),
        ("train digits --model scorn", 'did you mean "scornn"'),
        ("train --model scornn", "needs a task"),
        ("train digits", "--model"),
        ("train digits --model", "--model"),
        ("train digits --model scornn --stepz 5", "--steps"),
        ("train digits --model scornn --steps 0", "steps"),
        ("train digits --model scornn --steps -3", "steps"),
        ("train digits --model scornn --steps ten", "ten"),
        ("train digits --model scornn --steps 2.5", "2.5"),
        ("train digits --model scornn --lr -1e-3", "lr"),
        ("train digits --model scornn --lr nan", "lr"),
        ("train digits --model scornn --lr fast", "fast"),
        ("train digits --model scornn --hidden-size 0", "hidden_size"),
        ("train digits --model scornn --batch-size 5000", "1437"),
        ("train digits --model scornn --train-size 0", "train_size"),
        ("train digits --model scornn --optimizer adm", 'did you mean "adam"'),
        ("train digits --model scornn --rates.skw 1", 'did you mean "skew"'),
        ("train digits --model scornn --rates.lr 1", "coordinate"),
        ("train digits --model scornn --options.negativ 3", 'did you mean "negative"'),
        ("train digits --model scornn --options.negative 1000", "negative"),
        ("train digits --model scornn --optimizer-options.alpa 1", 'did you mean "alpha"'),
        ("train digits --model scornn --device gpu", "device"),
        ("train digits --model scornn --T 5", "--T"),
        ("train digits --model scornn extra", "extra"),
        ("train copying --model scornn --T 0", "T"),
        ("train adding --model scornn --T 1", "T"),
        ("train digits --resume --model scornn", "does not exist"),
        ("train digits --resume --out nowhere", "does not exist"),
        ("train digits --config none.toml --model scornn", "none.toml"),
        ("compare digits --models scornn,lsmt", 'did you mean "lstm"'),
        ("compare digits --models scornn,scornn", "different"),
        ("compare digits --models ,", "models"),
        ("compare digits", "--models"),
        ("compare digits --models scornn,lstm --options.negative 3", "negative"),
        ("plot nowhere", "does not exist"),
        ("plot", "none"),
        ("plot .", "no run"),
        ("drift --steps 0", "steps"),
        ("drift --methods cayly", 'did you mean "cayley"'),
        ("drift --sizes 0", "size"),
        ("drift --sizes big", "big"),
        ("drift --dtype float23", 'did you mean "float32"'),
        ("drift --optimizer adm", 'did you mean "adam"'),
    ],
)
def test_an_error_of_the_user_is_one_sentence(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(words, capsys)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps = ", "TOML"),
        ("stepz = 5", 'did you mean "steps"'),
        ("steps = 0", "steps"),
        ('steps = "many"', "many"),
        ("steps = 2.5", "2.5"),
        ("T = 5", "T"),
        ("[rates]\nskw = 1", "skew"),
        ("drift = 1", "drift"),
        ("train = 1", "train"),
        ("digits = 1", "digits"),
        ("help = 1", "help"),
        ("[steps]\na = 1", "steps"),
        ("rates = 3", "rates"),
        ("steps = [1, 2]", "steps"),
        ("[rates]\nskew = [1, 2]", "rates.skew"),
        ('[rates]\nskew = "much"', "much"),
    ],
)
def test_an_error_in_a_file_is_one_sentence(text: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text(text)
    assert says in refused("train digits --model scornn --config my.toml", capsys)


def test_the_command_line_wins_over_the_file_and_the_file_over_the_recipe() -> None:
    Path("my.toml").write_text(
        'model = "scurnn"\nT = 3\nhidden_size = 6\nbatch-size = 9\nlr = 0.5\noptimizer = "sgd"\n'
        "train_size = 30\ntest-size = 20\nclip_norm = 1\n[rates]\nskew = 0.25\nphase = 3\n[options]\nbandwidth = 2\n"
        "[optimizer_options]\nnesterov = true\nmomentum = 0.5\n"
    )
    assert main("train copying --config my.toml --steps 2 --lr 0.125 --rates.phase 0.75 --out run".split()) == 0
    found = config("run")
    assert (found["model"], found["hidden_size"], found["batch_size"]) == ("scurnn", 6, 9)
    assert (found["lr"], found["optimizer"], found["rates"]) == (0.125, "sgd", {"skew": 0.25, "phase": 0.75})
    assert found["options"] == {"bandwidth": 2}
    assert found["optimizer_options"] == {"nesterov": True, "momentum": 0.5}
    assert found["task_options"] == {"T": 3, "train_size": 30, "test_size": 20}


def test_numbers_of_options_are_kept_as_they_are() -> None:
    options = "--optimizer rmsprop --optimizer-options.alpha 0.9 --optimizer-options.centered true --options.negative 3"
    assert main(f"{TRAIN} --out run {options}".split()) == 0
    assert config("run")["optimizer_options"] == {"alpha": 0.9, "centered": True}
    assert config("run")["options"] == {"negative": 3}


def test_an_existing_run_is_refused_and_a_finished_one_left_alone(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()}
    assert "--resume" in refused(f"{TRAIN} --out {finished}", capsys)
    assert main(["train", "copying", "--out", str(finished), "--resume"]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main([*TRAIN.split(), "--out", str(finished), "--resume"]) == 0
    assert "hidden_size" in refused(f"train copying --out {finished} --resume --hidden-size 7", capsys)
    assert "task" in refused(f"train digits --out {finished} --resume", capsys)
    assert "T = 2" in refused(f"train copying --out {finished} --resume --T 3", capsys)
    assert {path: path.read_bytes() for path in finished.rglob("*") if path.is_file()} == before


def test_a_damaged_run_is_refused_in_one_sentence(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(finished, "run")
    for path in checkpoint.checkpoints(Path("run/checkpoints")):
        (path / checkpoint.STATE).unlink()
    assert "missing" in refused("train copying --out run --resume", capsys)
    Path("run/log.jsonl").write_text("garbage\n")
    assert "line 1" in refused("plot run", capsys)
    Path("run/log.jsonl").unlink()
    assert "log.jsonl" in refused("plot run", capsys)
    Path("run/config.json").write_text("{")
    assert "config.json" in refused("plot run", capsys)
    assert "config.json" in refused("train copying --out run --resume", capsys)


def test_a_place_that_cannot_be_written_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("mine")
    for words in (f"{TRAIN} --out file/run", "compare copying --models lstm --out file"):
        assert "file" in refused(words, capsys)
    assert "file" in refused("drift --steps 1 --sizes 2 --methods cayley --out file", capsys)


def test_a_loss_that_is_not_finite_ends_with_advice(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{TRAIN} --out run --optimizer sgd --lr 1e38 --options.negative 0".split()
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "--lr" in error
    assert "Traceback" not in error
    assert len(error.splitlines()) == 1


def test_errors_of_the_program_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Session) -> None:
        raise IndexError("a bug")

    monkeypatch.setattr(Session, "advance", broken)
    with pytest.raises(IndexError, match="a bug"):
        main(f"{TRAIN} --out run".split())


def test_compare_trains_prints_draws_and_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"compare copying --models scornn,lstm {SMALL} --out runs".split()
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "scornn" in table
    assert [line for line in table.splitlines() if "lstm" in line][-1].rstrip(" │").endswith("-")
    names = {path.name for path in Path("runs").iterdir()}
    assert names == {"scornn", "lstm", "learning.png", "orthogonality.png", "summary.json"}
    assert "--resume" in refused(" ".join(words), capsys)
    shutil.rmtree("runs/lstm")
    assert main([*words, "--resume"]) == 0
    again = capsys.readouterr().out
    assert "scornn is finished" in again
    assert "lstm" in again
    assert main("plot runs --out plots".split()) == 0
    assert {path.name for path in Path("plots").iterdir()} == {"learning.png", "orthogonality.png"}
    assert main("plot runs/lstm".split()) == 0
    assert Path("runs/lstm/learning.png").exists()


def test_runs_of_different_tasks_are_not_drawn_together(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = "--T 4 --train-size 30 --test-size 20"
    words = f"train adding --seed {seeds.seed()} --model lstm {data} --hidden-size 5 --steps 2 --batch-size 8"
    assert main([*words.split(), "--out", "other"]) == 0
    assert "one task" in refused(f"plot {finished} other", capsys)


def test_drift_prints_draws_and_overwrites_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    words = "drift --steps 12 --sizes 3,4 --out drift"
    assert main(words.split()) == 0
    table = capsys.readouterr().out
    assert "cayley" in table
    assert "unconstrained" in table
    record = json.loads(Path("drift/drift.json").read_text())
    assert record["curves"][0]["steps"][-1] == 12
    assert Path("drift/drift.png").read_bytes().startswith(b"\x89PNG")
    assert "drift.json" in refused(words, capsys)
    assert main("drift --steps 3 --sizes 3 --dtype complex128 --methods cayley --out complex".split()) == 0


def test_list_names_every_parametrization_optimizer_model_and_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    for name in [
        *stiefelkit.available(),
        *optimizers.names(),
        "scornn",
        "scurnn",
        "lstm",
        "digits",
        "copying",
        "adding",
    ]:
        assert name in shown
    rows = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│")}
    assert "frames, and all other parameters as RMSprop does" in rows["multiplicative_cayley"]
    assert "all parameters but frames" in rows["adam"]


def test_help_of_drift_says_what_methods_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drift", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for name in (*own_optimizers(), *peer_optimizers.names(), "multiplicative_cayley:fast", '"unconstrained"'):
        assert name in shown
    assert "drift.json is replaced after each method" in shown


@pytest.mark.parametrize("option", ["gradient reference", "side right", "precondition rmsprop", "precision fast"])
def test_options_for_frames_are_refused_where_there_are_none(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = f"{TRAIN} --optimizer multiplicative_cayley --optimizer-options.{option}"
    assert f"needs a frame to act on for {option.split()[0]}, got 'scornn'" in refused(words, capsys)


def test_the_full_capacity_urnn_learns_to_add(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--T 5 --hidden-size 16 --steps 300 --eval-every 150 --test-size 200 --out run"
    assert main(["train", "adding", "--model", "full_urnn", *words.split()]) == 0
    assert config("run")["rates"] == {"stiefel": 1e-3}
    lines = [json.loads(line) for line in Path("run/log.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "test"]
    assert losses[-1] < 1 / 12, losses


@pytest.mark.parametrize("words", ["--version", "-v"])
def test_version(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([words]) == 0
    assert capsys.readouterr().out.strip() == stiefelkit.__version__


@pytest.mark.parametrize("words", ["", "--help", "train --help", "train digits --help", "compare copying --help"])
def test_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    shown = capsys.readouterr()
    assert "Usage: stiefelkit" in shown.out
    assert not shown.err


def test_help_loads_neither_torch_nor_matplotlib() -> None:
    package = Path(stiefelkit.__file__).parent
    program = f"""
import sys, types
sys.modules["stiefelkit"] = package = types.ModuleType("stiefelkit")
package.__path__ = [{str(package)!r}]
from stiefelkit.cli import main
assert main(["--help"]) == 0
assert not {{"torch", "matplotlib", "sklearn", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


def test_ctrl_c_ends_with_130_and_tells_how_to_resume() -> None:
    words = f"{TRAIN} --out run --checkpoint-every 100000".replace("--steps 6", "--steps 100000").split()
    environment = os.environ | {"PYTHONPATH": str(Path(stiefelkit.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-m", "stiefelkit", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    log = Path("run/log.jsonl")
    while process.poll() is None and not (log.exists() and log.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert err == ""
    assert out.splitlines()[-1].endswith("stiefelkit train copying --out run --resume")
    step, _ = checkpoint.load(checkpoint.checkpoints(Path("run/checkpoints"))[-1])
    assert step > 0
    assert f"step {step}" in out


def test_the_negative_of_a_switch_is_no_key_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_text("no-permuted = true")
    words = ["train", "digits", "--model", "lstm", "--config", str(tmp_path / "c.toml"), "--out", str(tmp_path / "r")]
    assert main(words) == 2
    assert "no-permuted" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    "bad",
    [
        ["--device", "meta"],
        ["--threads", "1000000"],
        ["--seed", "99999999999999999999999"],
        ["--hidden-size", "100000000"],
        ["--optimizer-options.alpha", "abc"],
        ["--optimizer-options.differentiable", "true"],
        ["--options.input_size", "3"],
    ],
)
def test_what_cannot_be_built_is_refused_before_the_folder_appears(
    bad: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "digits", "--model", "scornn", "--steps", "1", "--out", str(tmp_path / "r"), *bad]) == 2
    error = capsys.readouterr().err
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert not (tmp_path / "r").exists()


def test_a_run_resumes_to_no_fewer_steps_and_holds_no_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["train", "digits", "--model", "lstm", "--hidden-size", "4", "--schedule", "constant"]
    assert main([*run, "--steps", "3", "--out", str(tmp_path / "r")]) == 0
    before = (tmp_path / "r" / "config.json").read_bytes()
    assert main([*run, "--steps", "2", "--out", str(tmp_path / "r"), "--resume"]) == 2
    assert "step 3" in capsys.readouterr().err
    assert main(["compare", "digits", "--models", "lstm", "--resume", "--out", str(tmp_path / "r")]) == 2
    assert (tmp_path / "r" / "config.json").read_bytes() == before
    assert not (tmp_path / "r" / "lstm").exists()


def test_drift_writes_json_that_any_reader_takes_and_tells_of_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "drift",
        "--sizes",
        "2",
        "--steps",
        "3",
        "--methods",
        "unconstrained",
        "--lr",
        "1e300",
        "--dtype",
        "float64",
    ]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert "from step" in capsys.readouterr().out
    assert "NaN" not in (tmp_path / "drift.json").read_text()


def test_log_ticks_between_powers_of_ten_say_so() -> None:
    from stiefelkit.training.figure import _number

    assert [_number(value) for value in (1e-3, 1e-4, 2e-4, 1e31, 5e31)] == [
        "0.001",
        "$10^{-4}$",
        r"$2 \cdot 10^{-4}$",
        "$10^{31}$",
        r"$5 \cdot 10^{31}$",
    ]
