"""The laws of the command line: user errors are one sentence with exit code 2, and leave nothing behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stiefelkit
from stiefelkit.cli import main
from stiefelkit.measuring.moved_frames import own_optimizers, peer_optimizers
from stiefelkit.optim import minimizers, optimizers
from stiefelkit.scan import activations
from stiefelkit.testing import seeds
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
        ("train digits", "got none; name one of those that stiefelkit list shows, with --model"),
        ("train digits --model", "--model"),
        ("train digits --model scornn --stepz 5", "--steps"),
        ("train digits --model scornn --steps 0", "steps"),
        ("train digits --model scornn --steps -3", "steps"),
        ("train digits --model scornn --steps ten", "ten"),
        ("train digits --model scornn --steps 2.5", "2.5"),
        ("train digits --model scornn --lr -1e-3", "lr"),
        ("train digits --model scornn --lr nan", "lr"),
        ("train digits --model scornn --lr fast", "fast"),
        ("train digits --model lstm --optimizer-options.amsgrad no", "needs amsgrad to be true or false, got 'no'"),
        ("train digits --model scornn --optimizer-options.eps 1e400", "a finite optimizer_options.eps, got inf"),
        ("train digits --model scornn --hidden-size 0", "hidden_size"),
        ("train digits --model scornn --batch-size 5000", "1437"),
        ("train digits --model scornn --train-size 0", "train_size"),
        ("train digits --model scornn --optimizer adm", 'did you mean "adam"'),
        ("train digits --model scornn --rates.skw 1", 'did you mean "skew"'),
        ("train digits --model scornn --rates.lr 1", "coordinate"),
        ("train digits --model scornn --options.negativ 3", 'did you mean "negative"'),
        ("train digits --model scornn --options.negative 1000", "negative"),
        ("train digits --model rotrnn --options.decay [0.1,0.9", 'as in 0.1,0.9999 or "[0.1, 0.9999]", got'),
        ("train digits --model rotrnn --options.decay (0.1,0.9)", "A list needs numbers separated by commas"),
        ("train digits --model rotrnn --options.decay [0.1, 0.9]", "in quotes if they have blanks, got '0.9]'"),
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
        ("drift cayley", "stiefelkit drift needs options after --, in quotes if they have blanks, got 'cayley'"),
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
    assert found["task_options"] == {"T": 3, "train_size": 30, "test_size": 20, "fresh": False, "at_marker": False}


def test_numbers_of_options_are_kept_as_they_are() -> None:
    options = "--optimizer rmsprop --optimizer-options.alpha 0.9 --optimizer-options.centered true --options.negative 3"
    assert main(f"{TRAIN} --out run {options}".split()) == 0
    assert config("run")["optimizer_options"] == {"alpha": 0.9, "centered": True}
    assert config("run")["options"] == {"negative": 3}


def test_a_list_of_numbers_has_commas_or_brackets_and_is_an_array_in_a_file() -> None:
    words = f"{TRAIN} --optimizer adam --optimizer-options.betas".split()
    Path("lists.toml").write_text(
        '[optimizer_options]\nbetas = [0.8, 0.9]\n[optimizers]\nskew = {optimizer = "adam", betas = [0.8, 0.9]}\n'
    )
    for given, run in (("0.8,0.9", "commas"), ("[0.8, 0.9]", "brackets")):
        assert main([*words, given, "--out", run]) == 0
    assert main([*words[:-1], "--config", "lists.toml", "--out", "file"]) == 0
    assert all(config(run)["optimizer_options"] == {"betas": [0.8, 0.9]} for run in ("commas", "brackets", "file"))
    assert config("file")["optimizers"]["skew"]["betas"] == [0.8, 0.9]


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_reader_that_has_gone_is_no_mistake_of_a_plugin() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-m", "stiefelkit", "list", "cayley"], stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert b"cayley" not in done.stderr


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


def test_list_names_all_that_has_a_name_and_where_it_comes_from(capsys: pytest.CaptureFixture[str]) -> None:
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
        *minimizers.names(),
        *activations.names(),
    ]:
        assert name in shown
    rows = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│")}
    assert "frames, and all other parameters as RMSprop does" in rows["multiplicative_cayley"]
    assert "all parameters but frames" in rows["adam"]
    assert "n^3" in rows["cayley"]
    assert "real, complex" in rows["modrelu"]
    assert all(
        f"stiefelkit {stiefelkit.__version__}" in rows[name] for name in ("adam", "lbfgs", "tanh", "goru", "chars")
    )


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
for words in ("", "train adding", "compare", "drift", "bench", "bench growth", "report", "plot", "plot gradients"):
    assert main([*words.split(), "--help"]) == 0
assert not {{"torch", "matplotlib", "sklearn", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)


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
