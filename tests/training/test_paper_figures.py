"""Figures of the papers that are no curves: what they show of runs is what the runs are."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import small_data

from stiefelkit.figure import Figures
from stiefelkit.testing import seeds
from stiefelkit.training import data, train
from stiefelkit.training import plot as plotting
from stiefelkit.training.config import Config
from stiefelkit.training.plot import find_runs, plot
from stiefelkit.training.run_folder import RunFolder, by_kind


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


def test_generated_sequences_are_those_of_the_last_checkpoints(runs: Path, tmp_path: Path) -> None:
    with data.named(runs / "data"):
        drawn = plot(find_runs([runs]), tmp_path, Figures(dpi=40))
        assert [path.stem for path in drawn] == ["learning", "orthogonality", "generated"]
        for folder in map(RunFolder.open, find_runs([runs])):
            true, generated, error = map(np.array, plotting._sequences(folder) or ())
            assert np.array_equal(true, folder.config.build_task().held_out()[1][0])
            assert error == pytest.approx(by_kind(folder)["test"][-1]["loss"], rel=1e-4)
            assert ((generated - true) ** 2).mean() / true.var() == pytest.approx(error, rel=1e-4)


def test_without_checkpoints_or_data_nothing_is_generated(runs: Path, tmp_path: Path) -> None:
    for k in range(2):
        shutil.copytree(runs / "lstm-0", tmp_path / f"runs/{k}", ignore=shutil.ignore_patterns("checkpoints"))
    with data.named(runs / "data"):
        assert [path.stem for path in plot(find_runs([tmp_path / "runs"]), tmp_path)] == ["learning"]
    with data.named(tmp_path):
        assert [path.stem for path in plot([runs / "lstm-0"], tmp_path)] == ["learning"]
