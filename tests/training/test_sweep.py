"""Sweeps: every combination is a run as `train` makes it, resumed as it is, and seeds are a spread."""

import json
import multiprocessing
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from unittest import mock

import pytest

from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.testing import seeds
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import tables_of
from stiefelkit.training.run_folder import RunFolder, is_run, summarise
from stiefelkit.training.sweep import _answer, runs_of

ONE, TWO = seeds.seed(1), seeds.seed(2)
FILE = f"""
task = "adding"
model = "scornn"
T = 4
train-size = 40
test-size = 20
hidden-size = 4
batch-size = 10
steps = 4
eval-every = 2
checkpoint-every = 2
[vary]
lr = [1e-3, 1e-2]
seed = [{ONE}, {TWO}]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "small.toml").write_text(FILE)
    return tmp_path / "small.toml"


@pytest.mark.slow
def test_each_combination_is_the_run_of_its_line_and_seeds_are_a_spread(file, tmp_path, capsys):
    out = tmp_path / "runs"
    assert main(["sweep", str(file), "--out", str(out), "--jobs", "2"]) == 0
    assert "+-" in capsys.readouterr().out
    assert main(["sweep", str(file), "--out", str(tmp_path / "alone"), "--commands"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    words = shlex.split(lines[-1])
    name = Path(words[words.index("--out") + 1]).name
    assert main(words[1:]) == 0
    assert RunFolder.open(out / name).config == RunFolder.open(tmp_path / "alone" / name).config
    assert summarise(out / name).test == summarise(tmp_path / "alone" / name).test

    table = json.loads((out / "sweep.json").read_text())
    assert [cell["name"] for cell in table] == ["lr=0.001", "lr=0.01"]
    for cell in table:
        losses = [summarise(out / run).test["loss"] for run in cell["runs"]]
        assert len(losses) == 2
        assert cell["scores"]["loss"] == [statistics.fmean(losses), statistics.stdev(losses)]


def test_the_line_of_a_run_reads_lists_of_an_optimizer_back():
    table = {"optimizer": "adam", "lr": 1e-4, "betas": [0.9, 0.99], "amsgrad": True}
    (run,) = runs_of({"task": "adding", "model": "scornn", "optimizers": {"skew": table}})
    words = shlex.split(run.command(Path("runs")))
    assert tables_of({"skew": words[words.index("--optimizers.skew") + 1]}) == {"skew": table}


@pytest.mark.slow
def test_a_sweep_goes_on_where_it_was(file, tmp_path, capsys):
    out = tmp_path / "runs"
    run = runs_of({"task": "adding", "model": "scornn"})[0]
    assert run.name == "scornn"
    assert main(["sweep", str(file), "--out", str(out)]) == 0
    whole = (out / "sweep.json").read_text()
    assert main(["sweep", str(file), "--out", str(out)]) == 2
    assert "add --resume" in capsys.readouterr().err
    before = json.loads(whole)
    assert main(["sweep", str(file), "--out", str(out), "--resume"]) == 0
    assert json.loads((out / "sweep.json").read_text()) == before
    file.write_text(FILE.replace("steps = 4", "steps = 6"))
    assert main(["sweep", str(file), "--out", str(out), "--resume"]) == 0
    assert {summarise(path).step for path in out.iterdir() if is_run(path)} == {6}
    file.write_text(FILE.replace("T = 4", "T = 5"))
    whole = (out / "sweep.json").read_text()
    assert main(["sweep", str(file), "--out", str(out), "--resume"]) == 2
    assert "task_options.T = 4" in " ".join(capsys.readouterr().err.split())
    assert (out / "sweep.json").read_text() == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["rates.skew = 3e-4", "options.gain = 0.5", "optimizers.skew = {optimizer = 'rmsprop', lr = 1e-4}"]
)
def test_runs_that_were_begun_with_an_option_do_not_go_on_without_it(file, tmp_path, capsys, line):
    command = ["sweep", str(file), "--out", str(tmp_path / "runs"), "--jobs", "2"]
    file.write_text(f"{line}\n{FILE}")
    assert main(command) == 0
    capsys.readouterr()
    file.write_text(FILE)
    assert main([*command, "--resume"]) == 2
    assert "to resume as it began" in capsys.readouterr().err


@pytest.mark.slow
def test_a_damaged_run_is_named_and_the_others_stay(file, tmp_path, capsys):
    out = tmp_path / "runs"
    assert main(["sweep", str(file), "--out", str(out)]) == 0
    for path in (out / f"lr=0.001,seed={ONE}" / "log.jsonl", out / f"lr=0.01,seed={ONE}" / "config.json"):
        path.write_text(path.read_text() + "junk\n")
    capsys.readouterr()
    assert main(["sweep", str(file), "--out", str(out), "--resume"]) == 1
    assert " ".join(capsys.readouterr().out.split()).count("damaged") >= 2
    table = json.loads((out / "sweep.json").read_text())
    assert [(len(cell["runs"]), len(cell["failed"])) for cell in table] == [(1, 1), (1, 1)]


@pytest.mark.slow
def test_what_is_finished_comes_first_so_that_a_stop_leaves_it_in_the_table(file, tmp_path, capsys):
    command = ["sweep", str(file), "--out", str(tmp_path / "runs")]
    file.write_text(FILE.replace(f"seed = [{ONE}, {TWO}]", f"seed = [{TWO}]"))
    assert main(command) == 0
    file.write_text(FILE)
    capsys.readouterr()
    assert main([*command, "--resume"]) == 0
    noted = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line[:3] in ("1/4", "2/4", "3/4")]
    assert noted == [f"lr=0.001,seed={TWO}:", f"lr=0.01,seed={TWO}:", f"lr=0.001,seed={ONE}:"]


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_go_on(file, tmp_path, capsys):
    file.write_text(FILE.replace("lr = [1e-3, 1e-2]", 'lr = [1e-3, 1e30]\noptimizer = ["sgd"]'))
    assert main(["sweep", str(file), "--out", str(tmp_path / "runs")]) == 1
    table = json.loads((tmp_path / "runs" / "sweep.json").read_text())
    assert [(len(cell["runs"]), len(cell["failed"])) for cell in table] == [(2, 0), (0, 2)]
    assert "needs finite numbers" in " ".join(capsys.readouterr().out.split())


def test_a_process_that_was_killed_is_a_run_that_failed():
    ours, theirs = multiprocessing.Pipe(duplex=False)
    theirs.close()
    assert _answer(ours, mock.Mock(exitcode=-9)) == "its process ended with -9"
    ours, theirs = multiprocessing.Pipe(duplex=False)
    with theirs:
        theirs.send(None)
        assert _answer(ours, mock.Mock(exitcode=0)) is None


@pytest.mark.slow
def test_a_signal_has_the_runs_save_and_stop(file, tmp_path):
    file.write_text(FILE.replace("steps = 4", "steps = 1000000").replace("lr = [1e-3, 1e-2]", "lr = [1e-3]"))
    out = tmp_path / "runs"
    words = [sys.executable, "-m", "stiefelkit", "sweep", str(file), "--out", str(out), "--jobs", "2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "200"})
    while not all((path / "log.jsonl").exists() for path in [out / f"lr=0.001,seed={seed}" for seed in (ONE, TWO)]):
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate()
    assert process.returncode == 130
    assert "Stopped and saved; resume with: stiefelkit sweep" in printed
    for path in out.glob("lr=*"):
        assert is_run(path)
        assert any((path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("steps = 4", "stepz = 4"), "did you mean"),
        (('model = "scornn"', 'model = "scorn"'), "No model is named 'scorn'"),
        (('model = "scornn"', ""), 'needs task = "..." and model'),
        (("lr = [1e-3, 1e-2]", "lr = 1e-3"), "needs a list of values for vary.lr"),
        (("lr = [1e-3, 1e-2]", "lr = [1e-3, 1e-3]"), "needs different values for vary.lr"),
        (("lr = [1e-3, 1e-2]", "lr = []"), "needs a list of values for vary.lr"),
        (("lr = [1e-3, 1e-2]", 'lr = [1e-3, "fast"]'), "needs a finite lr > 0, got 'fast'"),
        (("lr = [1e-3, 1e-2]", 'rates.skew = ["slow"]'), "needs a finite rates.skew >= 0, got 'slow'"),
        (("lr = [1e-3, 1e-2]", "rates.phase = [1e-3]"), "no coordinate 'phase'"),
        (("[vary]", "[vary"), "needs valid TOML"),
    ],
)
def test_what_a_file_has_wrong_is_said_before_anything_runs(file, tmp_path, capsys, change, sentence):
    file.write_text(FILE.replace(*change))
    assert main(["sweep", str(file), "--out", str(tmp_path / "runs")]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_more_runs_than_anybody_waits_for_are_refused_with_their_count(file, tmp_path, capsys):
    lists = "".join(f"{key} = {[*range(1, 1001)]}\n" for key in ("steps", "hidden-size", "batch-size"))
    file.write_text(f'task = "adding"\nmodel = "scornn"\n[vary]\n{lists}')
    for more in ([], ["--commands"]):
        assert main(["sweep", str(file), "--out", str(tmp_path / "runs"), *more]) == 2
        assert "needs 10,000 combinations at most, got 1,000,000,000" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_jobs_are_a_number_from_one_on(file, tmp_path, capsys):
    assert main(["sweep", str(file), "--jobs", "0"]) == 2
    assert "an integer jobs >= 1, got 0" in capsys.readouterr().err
    assert main(["sweep", str(tmp_path / "none.toml")]) == 2
    assert "needs a readable file" in capsys.readouterr().err


@pytest.mark.parametrize("fresh", [True, False])
def test_the_line_of_a_run_is_that_run(file, tmp_path, capsys, fresh):
    dashed = 'optimizers.skew = {optimizer = "rmsprop", lr = 1e-4, eps-inside = true}'
    file.write_text(f"fresh = {str(fresh).lower()}\n{dashed}\n{FILE}")
    out = tmp_path / "alone"
    assert main(["sweep", str(file), "--out", str(out), "--commands"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert main(shlex.split(line)[1:]) == 0
    run = runs_of(tomllib.loads(file.read_text()))[0]
    assert RunFolder.open(out / run.name).config == run.config
    assert run.config.task_options["fresh"] == fresh
    assert run.config.optimizers["skew"]["eps_inside"]


def test_lines_of_runs_that_cannot_be_are_not_printed(file, tmp_path, capsys):
    file.write_text(f'options.parametrization = "exponential"\n{FILE}')
    assert main(["sweep", str(file), "--commands"]) == 2
    shown = capsys.readouterr()
    assert "exponential" in shown.err
    assert "stiefelkit train" not in shown.out


def test_damaged_data_are_said_before_anything_runs(tmp_path, capsys):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(b"junk")
    (tmp_path / "digits.toml").write_text('task = "mnist"\nmodel = "irnn"\nhidden-size = 4\n[vary]\nseed = [1, 2]\n')
    out = tmp_path / "runs"
    assert main(["sweep", str(tmp_path / "digits.toml"), "--out", str(out), "--data", str(tmp_path)]) == 2
    assert "train-images-idx3-ubyte" in capsys.readouterr().err
    assert not out.exists()


def test_tables_of_a_file_are_those_of_train():
    own = {"skew": {"optimizer": "rmsprop", "lr": 1e-4, "eps_inside": True}}
    tables = {"rates": {"phase": 1e-4}, "options": {"trainable_h0": True}, "optimizers": own}
    (run,) = runs_of({"task": "copying", "model": "scurnn", **tables})
    assert run.settings.given() == tables
    assert '--optimizers.skew "rmsprop lr=0.0001 eps_inside=true"' in run.command(Path("x")).replace("'", '"')
    with pytest.raises(errors.OptionError, match="a table"):
        runs_of({"task": "adding", "model": "scornn", "vary": 3})
    (run,) = runs_of({"task": "adding", "model": "scornn", "vary": {"rates": {"skew": [1e-4]}}})
    assert isinstance(run.config, Config)
    assert run.config.rates["skew"] == 1e-4


@pytest.mark.slow
def test_examples_set_apart_are_what_to_choose_by_and_data_lie_where_they_are_named(tmp_path, capsys):
    texts, file, out = tmp_path / "texts", tmp_path / "text.toml", tmp_path / "runs"
    texts.mkdir()
    (texts / "a.txt").write_text("to be or not to be, that is the question. " * 50)
    file.write_text(
        f'task = "chars"\nmodel = "lstm"\nT = 8\nhidden-size = 4\nsteps = 2\neval-every = 2\nseed = {ONE}\n'
        "[vary]\nlr = [1e-3, 1e-2]\n"
    )
    command = ["sweep", str(file), "--out", str(out), "--data", str(texts)]
    assert main([*command, "--commands"]) == 0
    assert all(f"--data {texts}" in line for line in capsys.readouterr().out.splitlines())
    file.write_text("batch-size = 9999\n" + (whole := file.read_text()))
    assert main(command) == 2
    assert "needs a batch size between 1 and" in capsys.readouterr().err
    assert not out.exists()
    file.write_text(whole)
    assert main(command) == 0
    assert "valid" in capsys.readouterr().out
    for cell in json.loads((out / "sweep.json").read_text()):
        summary = summarise(out / cell["runs"][0])
        assert cell["validation"] == {name: [score, None] for name, score in summary.validation.items()}
        assert cell["validation"].keys() == cell["scores"].keys()
        assert cell["validation"] != cell["scores"]
