"""Experiments of papers: their rows are as the papers have them, and a run of one goes on, and tells what came."""

import dataclasses
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

import stiefelkit.training.reproduce as again
from stiefelkit import models
from stiefelkit.cli import main
from stiefelkit.errors import RunError, UnknownNameError
from stiefelkit.figure import Figures
from stiefelkit.machine import processor
from stiefelkit.testing import seeds
from stiefelkit.training import papers, train
from stiefelkit.training.papers import Row
from stiefelkit.training.recipes import Settings
from stiefelkit.training.reproduce import Score, finding, opened, reproduce, write_page
from stiefelkit.training.run_folder import RunFolder, read_log

ROWS = papers.rows()


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that takes no time: epochs of 4 steps, 3 of them in the paper."""
    often: Any = {"eval_every": 2, "log_every": 2, "checkpoint_every": 3}
    settings = Settings(hidden_size=4, steps=12, batch_size=5, seed=seeds.seed(3), **often)
    row = Row("tiny-copying-2", "copying", "scornn", settings, "Nobody 2001", 0.1, {"T": 2, "train_size": 20}, "a note")
    monkeypatch.setattr(papers, "rows", lambda: (*ROWS, row))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_row_is_a_config_and_its_name_says_model_task_and_size(row: Row) -> None:
    config = row.config()
    assert row.name.startswith(f"{row.model}-{row.task}-".replace("_", "-"))
    assert str(row.task_options.get("T", config.hidden_size)) == row.name.rpartition("-")[2]
    assert config.seed == 5544
    assert config.steps % row.epoch == 0 or config.task_options.get("fresh")
    assert papers.find(row.name) == row


def test_names_of_rows_are_names_of_one_row() -> None:
    assert len({row.name for row in ROWS}) == len({(row.group, row.label) for row in ROWS}) == len(ROWS) == 160
    with pytest.raises(UnknownNameError, match='did you mean "scornn-mnist-170"'):
        papers.find("scornn-mnist-17")


TENSORFLOW = {"alpha": 0.9, "eps": 1e-10, "init_acc": 1, "eps_inside": True}


def test_rows_have_the_settings_of_the_papers() -> None:
    scornn = papers.find("scornn-pmnist-360").config()
    assert (scornn.steps, scornn.batch_size, scornn.optimizer, scornn.lr) == (77_000, 50, "rmsprop", 1e-3)
    assert (scornn.rates, scornn.options, scornn.optimizer_options) == ({"skew": 1e-5}, {"negative": 180}, TENSORFLOW)
    assert papers.find("scornn-mnist-170").config().options == {"negative": 17}
    scurnn = papers.find("scurnn-mnist-250").config()
    assert (scurnn.optimizer, scurnn.lr, scurnn.rates) == ("adam", 1e-3, {})
    assert [scurnn.optimizers[name]["optimizer"] for name in ("skew", "phase")] == ["rmsprop", "adagrad"]
    assert [scurnn.optimizers[name]["lr"] for name in ("skew", "phase")] == [1e-5, 1e-4]
    copying = papers.find("scurnn-copying-2000").config()
    assert (copying.steps, copying.batch_size, copying.optimizer) == (10_000, 20, "rmsprop")
    sizes = {"T": 2000, "train_size": 20_000, "test_size": 1_000}
    assert copying.task_options == {**sizes, "fresh": False, "at_marker": False}
    exprnn = papers.find("exprnn-copying-1000").config()
    assert (exprnn.lr, exprnn.rates, exprnn.batch_size, exprnn.steps) == (2e-4, {"skew": 2e-5}, 128, 4_000)
    assert exprnn.task_options["at_marker"]
    assert exprnn.optimizer_options == {}
    adding = papers.find("scornn-adding-750").config()
    assert (adding.options, adding.steps, adding.task_options["test_size"]) == ({"negative": 119}, 20_000, 10_000)
    assert papers.find("scurnn-adding-200").config().options["arc"] == pytest.approx(6.2832, rel=1e-4)


def counted(row: Row, parameters: int) -> int:
    """The parameters of a model as its paper counts them."""
    n = row.settings.hidden_size or 0
    if (row.model, row.task) == ("eurnn", "adding"):  # no imaginary part of the 2 columns of U, no read-out
        return parameters - 3 * n - 1
    if row.model == "eurnn":  # a first state, which their script makes and does not use
        return parameters + 2 * n
    return parameters


IN_FULL = {
    **{"restricted-urnn-speech-158": 83_237, "restricted-urnn-speech-378": 198_957},
    **{"scurnn-mnist-116": 16_482, "scurnn-pmnist-250": 69_010, "scurnn-copying-1000": 22_369},
    **{"scurnn-adding-200": 14_617, "scurnn-speech-128": 83_073, "scurnn-speech-258": 200_853},
    **{"scornn-adding-200": 15_046, "ornn-adding-200": 2_569, "ornn-mnist-256": 11_034},
}


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.parameters or row.name in IN_FULL], ids=lambda row: row.name
)
def test_models_of_rows_have_as_many_parameters_as_the_papers_print(row: Row) -> None:
    printed, task = row.parameters or 0, row.build_task()
    in_thousands = 500 if printed % 1000 == 0 else 50
    with torch.device("meta"):
        model = models.create(
            row.model, task.input_size, row.settings.hidden_size or 0, task.output_size, **row.settings.options
        )
    found = counted(row, models.count_parameters(model))
    assert abs(found - printed) <= max(0.035 * printed, in_thousands) or not printed
    assert models.count_parameters(model) == IN_FULL.get(row.name, models.count_parameters(model))


def test_rows_of_papers_say_how_many_parameters_or_why_not() -> None:
    assert all(row.parameters or row.note for row in ROWS if row.in_paper)
    assert not any(row.parameters for row in ROWS if not row.in_paper)


ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
RUNS = [path.parent for path in RESULTS.glob("papers/**/config.json")]


@pytest.mark.skipif(not RUNS, reason="runs are part of a checkout")
@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.name)
def test_experiments_of_runs_that_are_kept_mean_what_they_meant(path: Path) -> None:
    opened(path, papers.find(path.name))


needs_runs = pytest.mark.skipif(not RUNS, reason="runs are part of a checkout")


@needs_runs
def test_results_are_what_the_command_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(papers, "rows", lambda: ROWS)
    page = ROOT / "docs/results.md"
    assert page.read_text() == again.page_of(RESULTS, page)
    readme, line = (ROOT / "README.md").read_text(), again.summary(again.findings(RESULTS)[0])
    assert readme == again.marked(readme, line) != again.marked(readme, "other")
    assert line in page.read_text()
    means = [line.split("|") for line in page.read_text().splitlines() if "mnist-170, " in line and "mean" in line]
    assert means
    assert all(0 < float(mean[8].split()[0]) < 1 for mean in means)


@needs_runs
def test_words_about_results_have_no_number_that_is_not_of_a_log_and_nothing_is_bold() -> None:
    """Names and settings stand in backticks, figures of a log are expressions; conditions of runs differ."""
    words = re.sub(r"{{.*?}}|{%.*?%}|`[^`]*`|!?\[[^]]*\]\([^)]*\)", "", (RESULTS / "words.md").read_text())
    assert not re.findall(r"[^\n]*\d[^\n]*", words)
    assert not re.findall(r"\*\*[^*\n]*\d[^*\n]*\*\*", (ROOT / "docs/results.md").read_text().replace("`T = 750`", ""))


@needs_runs
def test_every_run_says_at_which_commit_it_was_made_or_that_it_is_lost() -> None:
    git = lambda *words: subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)  # noqa: E731
    made = {p.parent: json.loads((p.parent / again.MADE).read_text())["made_by"] for p in RESULTS.rglob("config.json")}
    assert all(made.values())
    if git("rev-parse", "--is-shallow-repository").stdout.strip() == "false":
        commits = {one["commit"] for sessions in made.values() for one in sessions} - {None}
        assert not [commit for commit in commits if git("merge-base", "--is-ancestor", commit, "HEAD").returncode]


def test_a_reproduction_stops_goes_on_and_is_finished(tmp_path: Path) -> None:
    row, path = papers.find("tiny-copying-2"), tmp_path / "run"
    assert reproduce(row, path, epochs=1).step == 4
    assert reproduce(row, path).step == 12
    assert reproduce(row, path).already
    assert reproduce(row, path, epochs=1).already
    train.train(row.config(), tmp_path / "whole")
    scores = [read_log(each / "log.jsonl")[-1]["loss"] for each in (path, tmp_path / "whole")]
    assert scores[0] == scores[1]
    assert RunFolder.open(path).config == row.config()
    with pytest.raises(RunError, match="seed"):
        reproduce(row, path, epochs=4, named=Settings(seed=4))


def test_both_ways_to_choose_an_epoch_are_told_apart(tmp_path: Path) -> None:
    path, row = tmp_path / "run", papers.find("lstm-pmnist-128")
    RunFolder.create(path, row.config(Settings(steps=2200)), 5)
    (path / "log.jsonl").touch()
    with pytest.raises(RunError, match="evaluation"):
        finding(path, row)
    of_test, of_validation = (0.5, 0.9, 0.8), (0.6, 0.7, 0.75)
    records = [
        {"kind": kind, "step": step, "loss": 1.0, "accuracy": accuracy}
        for kind, scores in (("test", of_test), ("validation", of_validation))
        for step, accuracy in zip((550, 1100, 2200), scores, strict=True)
    ]
    (path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found, last = finding(path, row), Score(0.8, 2200)
    assert (found.best_test, found.best_validation, found.last) == (Score(0.9, 1100), last, last)
    assert found.epochs == 2.0


def test_the_command_ends_with_both_figures_and_the_report_says_how_they_were_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"reproduce tiny-copying-2 --out {tmp_path} --epochs"
    report = f"reproduce --report --out {tmp_path} --dpi 40"
    assert main(report.split()) == 2
    assert "got none" in capsys.readouterr().err
    assert main(f"{run} 1".split()) == 0
    said = capsys.readouterr().out
    for part in ("1 of 3", "as papers report it", "Nobody 2001", "│   0.1 │", "Note: a note."):
        assert part in said
    assert main(f"{run} 2".split()) == 0
    assert main(f"reproduce --list --out {tmp_path}".split()) == 0
    assert "tiny-copying-2" in capsys.readouterr().out
    assert main(report.split()) == 0
    page = (tmp_path / "report" / "report.md").read_text()
    for part in ("## copying T=2", "|tiny-copying-2|", "2 of 3", "|0.1|", "a note", f"|{seeds.seed(3)}|"):
        assert part in page
    assert page.count(processor("cpu")) == 1
    for name in ("learning", "orthogonality"):
        assert f"(copying-2-{name}.png)" in page
        assert (tmp_path / "report" / f"copying-2-{name}.png").stat().st_size > 1000


def test_a_report_names_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = papers.find("tiny-copying-2")
    other = dataclasses.replace(row, name="tiny-other", settings=Settings(lr=0.5).with_defaults(row.settings))
    alone = dataclasses.replace(row, name="tiny-alone", task_options={**row.task_options, "T": 3})
    known = (row, other, dataclasses.replace(row, name="tiny-cut"), alone)
    monkeypatch.setattr(papers, "rows", lambda: known)
    for each in known:
        reproduce(row, tmp_path / each.name, epochs=1)
    (tmp_path / "tiny-cut" / "log.jsonl").write_text("junk\n")
    write_page(tmp_path, tmp_path / "page.md", Figures(dpi=40))
    text = (tmp_path / "page.md").read_text()
    shown, _, left_out = text.partition("## Left out")
    assert "|tiny-copying-2|" in shown
    assert not any(word in shown.split("## Not run")[0] for word in ("tiny-other", "tiny-cut", "T=3"))
    assert "- copying T=3: tiny-alone" in shown
    for words in ("A run of tiny-other needs lr = 0.5, got 0.001", "- tiny-cut: ", "- tiny-alone: "):
        assert words in left_out


def test_runs_of_an_archive_go_on_and_seeds_have_a_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row, there = papers.find("tiny-copying-2"), tmp_path / "there"
    for seed in (7, 8):
        reproduce(row, there / f"seed-{seed}" / row.name, epochs=1, named=Settings(seed=seed))
    shutil.copytree(there, here := tmp_path / "here")
    reproduce(row, there / "seed-7" / row.name)
    with tarfile.open(archive := tmp_path / "runs.tar.gz", "w:gz") as tar:
        tar.add(there, "")
    assert main(f"reproduce --add {archive} --out {here}".split()) == 0
    assert capsys.readouterr().out.count("Run: ") == 2
    assert reproduce(row, here / "seed-7" / row.name).already
    table = again.page_of(here, here / "page.md")
    assert table.count("|tiny-copying-2|") == 2
    # seed 7 has gone on for three epochs: both are compared after one
    (mean,) = (line for line in table.splitlines() if line.startswith("|tiny-copying-2, 2 seeds: mean, range|"))
    ends = [read_log(here / f"seed-{seed}" / row.name / "log.jsonl") for seed in (7, 8)]
    first = [next(line["loss"] for line in log if (line["kind"], line["step"]) == ("test", 4)) for log in ends]
    assert mean.split("|")[4] == "1"
    assert row.said(sum(first) / 2) in mean.split("|")[-6]
    (there / "seed-8" / row.name / "log.jsonl").write_text((there / "seed-7" / row.name / "log.jsonl").read_text())
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(there, "")
    for broken in (archive, tmp_path / "here" / "seed-7" / row.name / "config.json"):
        with pytest.raises(RunError, match=r"seed-8|config"):
            again.add(broken, here)


def test_what_a_run_was_begun_with_stays_and_a_refusal_makes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"reproduce tiny-copying-2 --out {tmp_path} --epochs"
    assert main(f"{run} 1 --seed 7".split()) == 0
    for words in ("1 --seed 8", "2 --seed 8"):
        assert main(f"{run} {words}".split()) == 2
        assert "needs seed = " in capsys.readouterr().err
    assert main(f"{run} 2".split()) == 0
    assert RunFolder.open(tmp_path / "tiny-copying-2").config.seed == 7
    row = papers.find("tiny-copying-2")
    falling = dataclasses.replace(row, settings=Settings(schedule="cosine").with_defaults(row.settings))
    reproduce(falling, tmp_path / "falling", epochs=1)
    with pytest.raises(RunError, match="rates"):
        reproduce(falling, tmp_path / "falling")


@pytest.mark.parametrize(
    ("words", "said"),
    [("", "--list"), ("none-3", "none-3"), ("--list --report", "--report"), ("--report --epochs 3", "runs")],
)
def test_words_that_name_no_one_thing_are_refused(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
