"""A model, a task and a contender of a race cost one new file and one line, which registers what the file holds."""

import copy
import importlib
import sys
from pathlib import Path

import pytest

import stiefelkit as sk
from stiefelkit import models
from stiefelkit.cli import main
from stiefelkit.measuring import frames, scan
from stiefelkit.measuring.implementations import peers
from stiefelkit.measuring.moved_frames import peer_optimizers
from stiefelkit.measuring.plans import OptimizerRace, ParametrizationRace, ScanCase, ScanRace
from stiefelkit.measuring.recurrences import recurrence_peers
from stiefelkit.testing import seeds
from stiefelkit.training import train
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import create, tasks

TASK = '''
"""Say at the end what came first."""
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from stiefelkit.training.recipes import Recipe, Settings
from stiefelkit.training.tasks.task import Task, generator

@dataclass(frozen=True)
class First(Task):
    """Reads T bits, and must give the first at the last step."""
    T: int = 3
    train_size: int = 40
    name: ClassVar[str] = "first"
    input_size: ClassVar[int] = 1
    output_size: ClassVar[int] = 1
    last_only: ClassVar[bool] = True
    headline: ClassVar[str] = "loss"
    loss_label: ClassVar[str] = "mean squared error"
    recipes: ClassVar[dict[str, Recipe]] = {"scornn": Recipe(Settings(hidden_size=4, batch_size=5))}

    @property
    def baseline(self):
        return {"loss": 0.25}
    def batch(self, step, batch_size, seed):
        return self._bits(batch_size, generator(seed, 0, step % self.batches_per_epoch(batch_size)))
    def held_out(self):
        return self._bits(10, generator(0, 1))
    def loss(self, output, y):
        return (output.squeeze(-1) - y).square().mean()
    def accuracy(self, output, y):
        return None
    def _bits(self, count, source):
        import torch
        x = torch.randint(2, (count, self.T, 1), generator=source).float()
        return x, x[:, 0, 0]
'''

MODEL = '''
"""Turns without an input gate."""
from torch import nn
from stiefelkit.models.sequence import SequenceModel
from stiefelkit.nn import OrthogonalRNN

def turner(input_size, hidden_size, output_size, *, parametrization="matrix_exp", **options):
    """Turns its state, and forgets nothing."""
    rnn = OrthogonalRNN(input_size, hidden_size, parametrization=parametrization, batch_first=True, **options)
    nn.init.zeros_(rnn.bias_l0)
    return SequenceModel(rnn, nn.Linear(hidden_size, output_size))
'''

CONTENDERS = '''
"""Others who do the same."""
import torch
from stiefelkit.measuring.moved_frames import MovedFrame, PeerOptimizer
from stiefelkit.measuring.implementations import Entry, Implementation
from stiefelkit.measuring.recurrences import SequenceEntry

def _enter(problem):
    w = problem.frame().requires_grad_()
    return Entry(lambda: w * 1, [w])

def _keep(frame, lr):
    w = torch.nn.Parameter(frame)
    return MovedFrame(w, torch.optim.SGD([w], lr=0.0))

def sum_of_inputs(drawn):
    u = drawn.u.clone().requires_grad_()
    return SequenceEntry(len(u), u.dtype, [u], lambda: (drawn.x @ u.mT).cumsum(0), lambda: drawn.x.sum(0) @ u.mT)

still = Implementation("cayley", _enter)
keeper = PeerOptimizer(_keep)
'''


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes the one new file, where Python finds it."""
    monkeypatch.syspath_prepend(tmp_path)
    for registry in (models._models, tasks):
        for part in ("_targets", "_loaded"):
            monkeypatch.setattr(registry, part, copy.copy(getattr(registry, part)))
    yield lambda name, content: (tmp_path / f"{name}.py").write_text(content)
    for name in ("my_model", "my_task", "my_contenders"):
        sys.modules.pop(name, None)


def test_a_model_is_one_file_and_one_line(file, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file("my_model", MODEL)
    models.register("turner", "my_model:turner")

    assert set(sk.drift(models.create("turner", 2, 4, 3, init="identity"))) == {"rnn.weight_hh_l0"}
    words = f"train copying --T 2 --model turner --hidden-size 5 --steps 2 --seed {seeds.seed()}"
    sizes = "--batch-size 5 --train-size 20 --test-size 20"
    assert main([*words.split(), *sizes.split(), "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    assert main(["list", "turner"]) == 0
    assert "Turns its state, and forgets nothing." in capsys.readouterr().out


def test_a_task_is_one_file_and_one_line(file, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file("my_task", TASK)
    tasks.register("first", "my_task:First")

    config = Config.resolve(create("first"), "scornn", Settings(steps=2, seed=seeds.seed()))
    assert (config.hidden_size, config.batch_size) == (4, 5)
    assert train.train(config, tmp_path / "run").step == 2
    assert main(["list", "first"]) == 0
    assert "Reads T bits" in capsys.readouterr().out


QUICK = {"repeats": 2, "seconds": 1e-3, "seed": seeds.seed(), "peers": True}
SIZE = {"sizes": ((4, 4),), **QUICK}


@pytest.mark.slow
def test_a_contender_of_each_race_is_one_entry_and_one_line(file, monkeypatch) -> None:
    file("my_contenders", CONTENDERS)
    mine = importlib.import_module("my_contenders")
    monkeypatch.setitem(peers, "still", mine.still)
    monkeypatch.setitem(peer_optimizers, "keeper", mine.keeper)
    monkeypatch.setitem(recurrence_peers, "sum_of_inputs", mine.sum_of_inputs)

    (of_maps,) = frames.races(
        ParametrizationRace(parametrizations=("cayley",), operations=("forward_backward",), **SIZE)
    )
    (of_steps,) = frames.races(OptimizerRace(optimizers=("cayley_sgd", "keeper"), **SIZE))
    (of_scans,) = scan.races(ScanRace(cases=(ScanCase("tiny", T=3, n=2, B=2),), backends=("inplace",), **QUICK))
    for race, name in ((of_maps, "still"), (of_steps, "keeper"), (of_scans, "sum_of_inputs")):
        assert name in [row.name for row in race.rows], race.left_out
