"""The laws of the command line: user errors are one sentence with exit code 2, and leave nothing behind."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_runs import TRAIN

import stiefelkit
from stiefelkit.cli import main
from stiefelkit.cli.about import tables
from stiefelkit.measuring.moved_frames import own_optimizers, peer_optimizers
from stiefelkit.training.session import Session

Refused = Callable[[str], str]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("train digit --model scornn", '"digits"'),
        ("train digits", "--model"),
        ("train digits --model scornn --stepz 5", "--steps"),
        ("train digits --model scornn --schedule linear", "schedule"),
        ("train digits --model scornn --optimizer pogo --optimizer-options.base up", "base"),
        ("train digits --model scornn --optimizer adam --optimizer-options.eps -1", "refuses"),
        ("train digits --model lstm --optimizer-options.amsgrad no", "amsgrad"),
        ("train digits --model scornn --optimizer-options.eps 1e400", "eps"),
        ("train digits --model scornn --batch-size 5000", "1437"),
        ("train digits --model scornn --optimizer adm", '"adam"'),
        ("train digits --model scornn --rates.skw 1", '"skew"'),
        ("train digits --model scornn --options.negativ 3", '"negative"'),
        ("train digits --model scornn --options.input_size 3", "input_size"),
        ("train digits --model rotrnn --options.decay [0.1,0.9", "list"),
        ("train digits --model scornn --device gpu", "device"),
        ("train digits --model scornn --hidden-size 100000000", "memory"),
        ("train digits --resume --out nowhere", "does not exist"),
        ("train digits --config none.toml --model scornn", "none.toml"),
        ("compare digits --models scornn --format gif", "png"),
        ("plot nowhere", "does not exist"),
        ("plot .", "no run"),
        ("bench parametrizations --parametrizations cayly", 'did you mean "cayley"'),
        ("bench parametrizations --sizes 4x8", "got 4 x 8"),
        ("bench parametrizations --device cuda:99", "99"),
        ("bench parametrizations --json nowhere/rows.json", "nowhere"),
        ("bench optimizers --optimizers cayley_sdg", 'did you mean "cayley_sgd"'),
        ("bench optimizers --optimizers geoopt_sgd", "geoopt_sgd_"),
        ("bench scan --cases H", "known: A, B, C, D, E, F, G"),
        ("bench scan --case T=3", "T=784"),
        ("bench scan --case T=0,n=2,B=2", "T >= 1"),
        ("bench scan --activation tanh --cases D", "'tanh'"),
        ("drift --methods geoopt_sgd", "geoopt_sgd_"),
        ("drift --look-every 0", "look_every"),
        ("drift --optimizer torch.nn:Linear", "subclass of Optimizer"),
        ("drift --map no_such_module:Map", "'no_such_module:Map' to import"),
        ("report --sections drifts", "drifts"),
        ("report --out nowhere/report.html", "existing folder"),
        ("train copying --model lstm --out run --T 1000000000000", "memory"),
        ("train adding --model lstm --out run --hidden-size 1e30", "memory"),
        (f"train copying --model lstm --T 2 --train-size 30 --batch-size 8 --steps 1 --out {'x' * 300}", "too long"),
        (f"report --out {'x' * 300}", "too long"),
        ("drift --methods cayly", '"cayley"'),
        ("list cayly", '"cayley"'),
    ],
)
def test_an_error_of_the_user_is_one_sentence(words: str, says: str, refused: Refused) -> None:
    assert says in refused(words)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("steps = ", "my.toml"),
        ("lr = " + "[" * 20_000 + "]" * 20_000, "my.toml"),
        ("stepz = 5", "--steps"),
        ("[rates]\nskw = 1", "skew"),
        ("[rates]\nskew = [1, 2]", "skew"),
    ],
)
def test_an_error_in_a_file_is_one_sentence(text: str, says: str, refused: Refused) -> None:
    Path("my.toml").write_bytes(text.encode(errors="surrogateescape"))
    assert says in refused("train digits --model scornn --config my.toml")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of POSIX")
def test_a_reader_that_has_gone_is_no_mistake_of_a_plugin() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run([sys.executable, "-m", "stiefelkit", "list", "cayley"], stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert b"cayley" not in done.stderr


def test_a_place_that_cannot_be_written_is_refused(refused: Refused) -> None:
    Path("file").write_text("mine")
    for words in (f"{TRAIN} --out file/run", "drift --steps 1 --sizes 2 --methods cayley --out file"):
        assert "file" in refused(words)


def test_errors_of_the_program_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Session) -> None:
        raise IndexError("a bug")

    monkeypatch.setattr(Session, "advance", broken)
    with pytest.raises(IndexError, match="a bug"):
        main(f"{TRAIN} --out run".split())


def test_list_names_all_that_has_a_name_and_of_a_name_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    rows = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("│")}
    for registry in tables().values():
        for name in registry.names():
            assert str(registry.origin(name)) in rows[name]
            assert main(["list", name]) == 0
            assert capsys.readouterr().out.startswith(f"{name}: ")
    for name, words in (("cayley", ("bandwidth", "References")), ("digits", ("permuted", "scornn", "rates.skew"))):
        assert main(["list", name]) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words)


def test_help_of_drift_says_what_methods_there_are_and_what_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == stiefelkit.__version__
    assert main(["drift", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for name in (*own_optimizers(), *peer_optimizers, "multiplicative_cayley:fast", '"unconstrained"'):
        assert name in shown


@pytest.mark.skipif(sys.platform == "win32", reason="bash of POSIX")
def test_a_shell_completes_tasks_and_their_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main("--install-completion --shell bash".split()) == 0
    (script,) = tmp_path.rglob("completions/stiefelkit")
    cut = "source $0; COMP_WORDS=(stiefelkit train copying --at); COMP_CWORD=3; _stiefelkit; echo ${COMPREPLY[@]}"
    assert "--at-marker" in subprocess.run(["bash", "-c", cut, script], capture_output=True, text=True).stdout
