"""The laws of tasks."""

import copy
import dataclasses
import inspect
import itertools
import json
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit import models
from stiefelkit.testing import seeds
from stiefelkit.training.config import Config
from stiefelkit.training.tasks import Task, create

Batch = tuple[Tensor, Tensor]
MAX_STEPS = MAX_BATCH = 20


def size(task: Task) -> int:
    return min(MAX_BATCH, task.sequences)


def batch_of(task: Task, step: int, seed: int = 0) -> Batch:
    return task.batch(step, size(task), seeds.seed(seed))


class Constant(nn.Module):
    """Answers the same, whatever it reads."""

    def __init__(self, answer: Tensor):
        super().__init__()
        self.answer = nn.Parameter(answer)

    def forward(self, x: Tensor, last_only: bool = False) -> Tensor:
        return self.answer.expand(*((len(x),) if last_only else x.shape[:2]), -1)


def law_options(task: Any) -> None:
    """The options are JSON, are described for help, and make the same task again, before a batch and after."""
    cls, written, before = type(task), json.loads(json.dumps(dataclasses.asdict(task))), hash(task)
    assert cls(**written) == task
    for option in dataclasses.fields(cls):
        assert f"{option.name}: " in (inspect.getdoc(cls) or "")
    batch_of(task, 0)
    assert hash(task) == before
    assert cls(**written) == task


def law_shapes(task: Task) -> None:
    """Batches and the held-out set are x (B, T, input_size), with B targets; losses are numbers with a gradient."""
    assert min(task.input_size, task.output_size) > 0
    x, y = batch = batch_of(task, 0)
    for examples in (batch, task.held_out(), task.validation()):
        if examples is not None:
            assert examples[0].dim() == 3
            assert examples[0].shape[-1] == task.input_size
            assert examples[0].is_floating_point()
            assert torch.isfinite(examples[0]).all()
            assert len(examples[0]) == len(examples[1])
    assert len(x) == size(task)
    lead = (len(x),) if task.last_only else tuple(x.shape[:2])
    output = torch.randn(*lead, task.output_size, requires_grad=True)
    loss = task.loss(output, y)
    assert loss.dim() == 0
    assert torch.isfinite(loss)
    (gradient,) = torch.autograd.grad(loss, output)
    assert torch.isfinite(gradient).all()
    assert gradient.any()
    accuracy = task.accuracy(output.detach(), y)
    assert accuracy is None or 0 <= float(accuracy) <= 1


def law_pure(task: Any) -> None:
    """A batch depends on step, size and seed alone, and torch's own generator stays where it was."""
    before = torch.get_rng_state()
    first = batch_of(task, 1)
    task.held_out()
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    batch_of(task, 2)
    assert is_same(first, batch_of(dataclasses.replace(task), 1))
    assert is_same(task.held_out(), dataclasses.replace(task).held_out())


def law_epochs(task: Task) -> None:
    """Batches of an epoch differ, from each other and from the held-out set; other seeds have others, if they may."""
    epoch = [batch_of(task, step) for step in range(min(MAX_STEPS, task.batches_per_epoch(size(task))))]
    assert not any(is_same(one, other) for one, other in itertools.combinations(epoch, 2))
    x, y = task.held_out()
    assert not any(is_same(batch, (x[: size(task)], y[: size(task)])) for batch in epoch)
    assert not all(is_same(epoch[0], batch_of(task, 0, seed)) for seed in range(1, 4))


def law_scores(task: Task) -> None:
    """Scores have the keys of the baseline, the headline among them, for any chunk; the model's mode is restored."""
    model = Constant(torch.linspace(-1, 1, task.output_size)).train()
    whole, parts = task.evaluate(model, chunk=10_000), task.evaluate(model, chunk=7)
    assert model.training
    assert task.headline in whole
    assert set(whole) == set(task.baseline)
    for key, value in whole.items():
        assert abs(value - parts[key]) <= 1e-4 * max(1.0, abs(value))


def law_baseline(task: Task) -> None:
    """A constant answer does not beat the baseline by more than chance lets it."""
    _, y = task.held_out()
    chance, ones = 4 / math.sqrt(len(y)), torch.ones(task.output_size)
    for answer in (0 * ones, ones, torch.randn(task.output_size)):
        scores = task.evaluate(Constant(answer))
        assert "loss" not in scores or scores["loss"] >= task.baseline["loss"] * (1 - chance)
        assert "accuracy" not in scores or scores["accuracy"] <= task.baseline["accuracy"] + chance


def law_recipes(task: Task) -> None:
    """Each recipe is of a known model, with settings that a run can begin with."""
    for model in task.recipes:
        assert model in models.names()
        batch_size = task.recipe(model).settings.batch_size
        if batch_size is None or batch_size <= task.sequences:
            Config.resolve(task, model)


LAWS = {name.removeprefix("law_"): law for name, law in vars().copy().items() if name.startswith("law_")}


def check_task(name: str, laws: Iterable[str] = tuple(LAWS), **options: Any) -> None:
    """Runs laws on a registered task."""
    for law in laws:
        seeds.reseed()
        LAWS[law](create(name, copy.deepcopy(options)))


def is_same(one: Batch, other: Batch) -> bool:
    return all(map(torch.equal, one, other))
