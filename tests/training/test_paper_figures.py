"""Figures of the papers that are no curves: what they show of runs is what the runs are."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_data

from stiefelkit.figure import Figures
from stiefelkit.testing import seeds
from stiefelkit.training import data, train
from stiefelkit.training import plot as plotting
from stiefelkit.training.config import Config
from stiefelkit.training.plot import Curve, find_runs, plot
from stiefelkit.training.run_folder import RunFolder, by_kind


@pytest.fixture
def axes_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """The panels of each figure by its name."""
    seen: dict[str, list[Any]] = {}
    figure = plotting.figure

    class Kept:
        def __init__(self, path: Path, *sizes: Any, **rest: Any):
            self.name, self.drawing = path.stem, figure(path, *sizes, **rest)

        def __enter__(self) -> list[Any]:
            seen[self.name] = self.drawing.__enter__()
            return seen[self.name]

        def __exit__(self, *error: Any) -> None:
            self.drawing.__exit__(*error)

    monkeypatch.setattr(plotting, "figure", Kept)
    return seen


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two models on two excerpts, one of them with two numbers of reflectors."""
    folder = tmp_path_factory.mktemp("runs")
    small_data.write(folder / "data" / "tone.wav", 0.5 * np.sin(np.arange(400) ** 1.2 / 9))
    common = {"task": "waveform", "steps": 4, "batch_size": 1, "eval_every": 2, "hidden_size": 4, "lr": 1e-2}
    with data.named(folder / "data"):
        for excerpt in (0, 1):
            task = {"T": 20, "excerpt": excerpt}
            for model, options in (("lstm", {}), ("ornn", {"reflections": 1}), ("ornn", {"reflections": 4})):
                config = Config(**common, model=model, options=options, task_options=task, seed=seeds.seed(1))
                train.train(config, folder / f"{model}{options.get('reflections', '')}-{excerpt}")
    return folder


def test_runs_that_differ_by_excerpt_alone_are_one_box_and_what_is_drawn_is_what_they_scored(
    runs: Path, axes_of: dict[str, list[Any]], tmp_path: Path
) -> None:
    with data.named(runs / "data"):
        drawn = plot(find_runs([runs]), tmp_path, Figures(dpi=40))
    assert [path.stem for path in drawn] == ["learning", "orthogonality", "boxes", "reflections", "generated"]
    best = {
        path.name: min(record["loss"] for record in by_kind(RunFolder.open(path))["test"]) for path in find_runs([runs])
    }
    (axes,) = axes_of["boxes"]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["lstm 4", "ornn 4\nreflections=1", "ornn 4\nreflections=4"]
    medians = [line.get_ydata()[0] for line in axes.lines[5::7]]  # box, whiskers, caps, median, outliers
    means = [(best[f"{name}-0"] + best[f"{name}-1"]) / 2 for name in ("lstm", "ornn1", "ornn4")]
    assert medians == pytest.approx(means)
    (axes,) = axes_of["reflections"]
    line = axes.get_lines()[0]
    assert list(line.get_xdata()) == [1, 4]
    assert list(line.get_ydata()) == pytest.approx(means[1:])
    for axes, name in zip(axes_of["generated"], ("lstm", "ornn1", "ornn4"), strict=True):
        chosen = RunFolder.open(min((runs / f"{name}-{k}" for k in (0, 1)), key=lambda path: best[path.name]))
        with data.named(runs / "data"):
            target = chosen.config.build_task().held_out()[1][0].numpy()
        true, generated = (np.array(line.get_ydata()) for line in axes.lines)
        assert np.array_equal(true, target)
        last = by_kind(chosen)["test"][-1]["loss"]
        assert ((generated - true) ** 2).mean() / true.var() == pytest.approx(last, rel=1e-4)
        assert axes.get_title().endswith(f": {last:.3g}")


def test_without_checkpoints_or_data_nothing_is_generated_and_a_seed_is_no_box(runs: Path, tmp_path: Path) -> None:
    for k in range(2):
        shutil.copytree(runs / "lstm-0", tmp_path / f"runs/{k}", ignore=shutil.ignore_patterns("checkpoints"))
    with data.named(runs / "data"):
        assert [path.stem for path in plot(find_runs([tmp_path / "runs"]), tmp_path)] == ["learning"]
    with data.named(tmp_path):
        assert [path.stem for path in plot([runs / "lstm-0"], tmp_path)] == ["learning"]


def test_accuracies_are_drawn_against_the_number_of_reflectors_in_a_report(
    axes_of: dict[str, list[Any]], tmp_path: Path
) -> None:
    runs = []
    for count, accuracy in ((2, 0.5), (8, 0.75)):
        config = Config("digits", "ornn", hidden_size=8, options={"reflections": count})
        records: Any = {"test": [{"step": 1, "accuracy": accuracy}, {"step": 2, "accuracy": 0.1}]}
        runs.append(Curve("", RunFolder(tmp_path, config, 1, {}), records))
    assert list(plotting.draw_scores(runs, tmp_path, Figures(dpi=40), "mnist-")) == ["reflections"]
    ((axes,),) = axes_of.values()
    assert list(axes.get_lines()[0].get_ydata()) == [0.5, 0.75]
    assert plotting.draw_scores([runs[1], runs[1]], tmp_path, Figures(dpi=40)) == {}
