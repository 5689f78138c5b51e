"""The laws of options: each field of a plan is one, a file gives them too, and the command line overrides it."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import SMALL, TRAIN

import stiefelkit as sk
from stiefelkit.cli import main
from stiefelkit.measuring.plans import DriftPlan, OptimizerRace, ParametrizationRace, ReportPlan, ScanRace
from stiefelkit.training.tasks import tasks

Refused = Callable[[str], str]
Config = Callable[[str], dict[str, Any]]
PLANS = {
    "drift": DriftPlan,
    "report": ReportPlan,
    "bench optimizers": OptimizerRace,
    "bench parametrizations": ParametrizationRace,
    "bench scan": ScanRace,
} | {f"train {name}": tasks.get(name) for name in tasks.names()}
HIDDEN = ("named_peers",)


@pytest.mark.parametrize("command", PLANS)
def test_every_field_is_an_option_with_words_of_its_own(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--help"]) == 0
    shown = capsys.readouterr().out
    rows = [line.strip("│ ") for line in shown.splitlines() if line.startswith("│ --")]
    words = {name: row for row in rows for name in row.split() if name.startswith("--")}
    for field in dataclasses.fields(PLANS[command]):
        if field.name not in HIDDEN:
            assert "  " in words[f"--{field.name.replace('_', '-')}"]


def test_numbers_and_lists_of_options_are_kept_as_they_are(config: Config) -> None:
    options = "--optimizer rmsprop --optimizer-options.alpha 0.9 --optimizer-options.centered true --options.negative 3"
    assert main(f"{TRAIN} --out run {options} --batch-size 1e1".replace("--batch-size 8", "").split()) == 0
    found = config("run")
    assert found["optimizer_options"] == {"alpha": 0.9, "centered": True}
    assert (found["options"], found["batch_size"]) == ({"negative": 3}, 10)
    words = f"{TRAIN} --optimizer adam --optimizer-options.betas".split()
    for given, run in (("0.8,0.9", "commas"), ("[0.8, 0.9]", "brackets")):
        assert main([*words, given, "--out", run]) == 0
        assert config(run)["optimizer_options"] == {"betas": [0.8, 0.9]}


def test_the_command_line_wins_over_the_file_and_the_file_over_the_recipe(config: Config) -> None:
    Path("my.toml").write_text(
        'model = "scurnn"\nT = 3\nhidden_size = 6\nbatch-size = 9\nlr = 0.5\noptimizer = "sgd"\nsteps = 7\n'
        "train_size = 30\ntest-size = 20\nclip_norm = 1\n[rates]\nskew = 0.25\nphase = 3\n[options]\nbandwidth = 2\n"
        "[optimizer_options]\nnesterov = true\nmomentum = 0.5\n[copying]\nhidden_size = 5\n[adding]\nlr = 7\n"
        '[copying.optimizers]\nphase = {optimizer = "adam", betas = [0.8, 0.9]}\n',
        encoding="utf-8-sig",
    )
    assert main("train copying --config my.toml --steps 2 --lr 0.125 --rates.phase 0.75 --out run".split()) == 0
    found = config("run")
    assert (found["model"], found["hidden_size"], found["batch_size"]) == ("scurnn", 5, 9)
    assert (found["lr"], found["optimizer"], found["rates"]) == (0.125, "sgd", {"skew": 0.25, "phase": 0.75})
    assert (found["options"], found["steps"]) == ({"bandwidth": 2}, 2)
    assert found["optimizer_options"] == {"nesterov": True, "momentum": 0.5}
    assert found["optimizers"] == {"phase": {"optimizer": "adam", "betas": [0.8, 0.9]}}
    assert found["task_options"] == {"T": 3, "train_size": 30, "test_size": 20, "fresh": False, "at_marker": False}
    words = "train copying --config my.toml --steps 2 --out other --optimizers.skew"
    assert main([*words.split(), "rmsprop lr=1e-3"]) == 0
    assert config("other")["rates"] == {"phase": 3}
    assert config("other")["optimizers"]["skew"]["lr"] == 1e-3


def test_a_list_in_a_file_is_the_words_with_commas_of_the_command_line() -> None:
    Path("my.toml").write_text('models = ["scornn", "lstm"]\nsteps = 1\nbatch-size = 4\nT = 2\n')
    assert main("compare copying --config my.toml --out both".split()) == 0
    assert sorted(path.name for path in Path("both").iterdir() if path.is_dir()) == ["lstm", "scornn"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (f"{TRAIN} --rates.phase 1e-3", "'phase'"),
        (f"compare copying --models scornn,lstm {SMALL} --rates.phase 1", "'phase'"),
        (f"{TRAIN} --options.parametrization householder --rates.skew 1", "reflectors"),
        ("train copying --model scurnn --rates.u 1 --rates.u.skew 1e-3", "'u'"),
    ],
)
def test_a_rate_of_a_coordinate_that_is_not_there_is_refused(words: str, says: str, refused: Refused) -> None:
    assert says in refused(words)


def test_a_rate_goes_to_the_models_of_a_comparison_that_have_the_coordinate(config: Config) -> None:
    words = f"compare copying --models scornn,margin_rnn,lstm {SMALL} --rates.skew 1e-3 --rates.spectrum 1e-2"
    assert main([*words.split(), "--out", "runs"]) == 0
    rates = {model: config(f"runs/{model}")["rates"] for model in ("scornn", "margin_rnn", "lstm")}
    assert rates == {"scornn": {"skew": 1e-3}, "margin_rnn": {"skew": 1e-3, "spectrum": 1e-2}, "lstm": {}}
    assert main([*words.split(), "--out", "runs", "--resume"]) == 0


def test_rates_of_a_recipe_are_for_its_own_coordinates(config: Config) -> None:
    assert main(f"{TRAIN} --options.parametrization householder --options.reflections 2 --out run".split()) == 0
    assert config("run")["rates"] == {}
    assert main(f"{TRAIN} --options.parametrization matrix_exp --out other".split()) == 0
    assert config("other")["rates"] == {"skew": 2e-4}


@pytest.mark.slow
def test_every_figure_is_written_in_the_format_asked_for_and_the_same_each_time() -> None:
    heads = {"png": b"\x89PNG", "pdf": b"%PDF-", "svg": b"<?xml"}
    assert main(f"compare copying --models scornn {SMALL} --out runs --format svg".split()) == 0
    for kind in heads:
        assert main(f"plot runs --out plots --format {kind} --dpi 50".split()) == 0
    assert main("drift --steps 2 --sizes 2 --methods cayley --out drift --format pdf".split()) == 0
    files = [f"plots/{name}.{kind}" for kind in heads for name in ("learning", "orthogonality")]
    for file in [*files, "drift/drift.pdf"]:
        assert Path(file).read_bytes().startswith(heads[file[-3:]]), file
    assert Path("runs/learning.svg").read_bytes() == Path("plots/learning.svg").read_bytes()


TINY = ["--T", "1", "--train-size", "2", "--test-size", "2", "--hidden-size", "2", "--batch-size", "2", "--steps", "1"]


def test_a_run_begins_within_two_thousand_calls(tmp_path):
    home, calls = str(Path(sk.__file__).parent), Counter()

    def count(frame, event, argument):
        code = frame.f_code
        begun = code.co_name == "advance" and code.co_filename.endswith("session.py")
        if event == "call" and not calls["begun"] and code.co_name != "<module>" and code.co_filename.startswith(home):
            calls["begun" if begun else "before"] += 1

    for name in ("one", "two"):  # the first imports what it needs
        calls.clear()
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            assert main(["train", "copying", "--model", "scornn", *TINY, "--out", str(tmp_path / name)]) == 0
        finally:
            sys.setprofile(before)
    assert calls["begun"] == 1
    assert calls["before"] <= 2000
