"""The laws of a task, ours or another's."""

import copy
import dataclasses
import functools
import inspect
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit import models
from stiefelkit.testing import seeds
from stiefelkit.testing.failure import NamedCase, check_laws, laws_of, named
from stiefelkit.testing.require import require, require_within
from stiefelkit.training.config import Config
from stiefelkit.training.tasks import Task, create

Batch = tuple[Tensor, Tensor]
MANY = 20
"""Sequences of a batch at most, and steps of an epoch that are looked at."""
CLOSE = 1e-4


@dataclass(frozen=True)
class _Case(NamedCase):
    """A task by its name, with options."""

    @functools.cached_property
    def task(self) -> Any:
        return create(self.name, copy.deepcopy(dict(self.options)))

    @property
    def size(self) -> int:
        return min(MANY, self.task.sequences)

    def batch(self, step: int, seed: int = 0) -> Batch:
        return self.task.batch(step, self.size, seeds.seed(seed))

    def epoch(self) -> Iterable[Batch]:
        return (self.batch(step) for step in range(min(MANY, self.task.batches_per_epoch(self.size))))

    def details(self) -> str:
        """Returns what the batches are, as far as the task gives any."""
        try:
            x, y = self.batch(0)
        except Exception as error:
            return f"options {dict(self.options)}, no batch: {type(error).__name__}"
        return (
            f"options {dict(self.options)}, batches of x {tuple(x.shape)} in {x.dtype}, y {tuple(y.shape)} in {y.dtype}"
        )


class _Constant(nn.Module):
    """Answers the same whatever it reads."""

    def __init__(self, answer: Tensor):
        super().__init__()
        self.answer = nn.Parameter(answer)

    def forward(self, x: Tensor, last_only: bool = False) -> Tensor:
        return self.answer.expand(*((len(x),) if last_only else x.shape[:2]), -1)


def law_options(case: _Case) -> None:
    """The options are JSON, say what they are, make the same task again, and are what it knows of them."""
    task, cls = case.task, type(case.task)
    require(task.name == case.name, f"its name is {task.name!r}, and it is registered as {case.name!r}")
    written = json.loads(json.dumps(task.options()))
    require(cls(**written) == task, f"{written} make another task")
    words = inspect.getdoc(cls) or ""
    for option in dataclasses.fields(cls):
        require(f"{option.name}: " in words, f"its docstring does not say what {option.name} is, for help")
    before = hash(task)
    case.batch(0)
    require(hash(task) == before and cls(**written) == task, "a batch changes its options")


def law_shapes(case: _Case) -> None:
    """Batches and the held-out set are x (B, T, input_size), with B targets; losses are numbers with a gradient."""
    task = case.task
    sizes = {"input_size": task.input_size, "output_size": task.output_size}
    for key, value in sizes.items():
        require(isinstance(value, int) and value > 0, f"{key} is {value!r}")
    sets = {"a batch": case.batch(0), "the held-out set": task.held_out(), "the validation set": task.validation()}
    for what, examples in sets.items():
        if examples is None:
            continue
        x, y = examples
        require(x.dim() == 3 and x.shape[-1] == task.input_size, f"{what} has x of shape {tuple(x.shape)}")
        require(x.is_floating_point() and bool(torch.isfinite(x).all()), f"{what} has x in {x.dtype}, or not finite")
        require(len(x) == len(y), f"{what} has {len(x)} sequences and {len(y)} targets")
    x, y = sets["a batch"]  # type: ignore[misc]
    require(len(x) == case.size, f"a batch of {case.size} has {len(x)} sequences")
    lead = (len(x),) if task.last_only else tuple(x.shape[:2])
    output = torch.randn(*lead, task.output_size, requires_grad=True)
    loss = task.loss(output, y)
    require(loss.dim() == 0 and bool(torch.isfinite(loss)), f"a loss of {loss}")
    (gradient,) = torch.autograd.grad(loss, output)
    require(bool(torch.isfinite(gradient).all()) and bool(gradient.any()), "the loss has no finite gradient, or 0")
    accuracy = task.accuracy(output.detach(), y)
    require(accuracy is None or 0 <= float(accuracy) <= 1, f"an accuracy of {accuracy}")


def law_pure(case: _Case) -> None:
    """A batch follows from step, size and seed alone, and torch's own generator is left where it was."""
    before = torch.get_rng_state()
    first = case.batch(1)
    case.task.held_out()
    require(torch.equal(before, torch.get_rng_state()), "it draws from torch's own generator")
    torch.rand(3)
    case.batch(2)
    again = dataclasses.replace(case.task).batch(1, case.size, seeds.seed(0))
    require(_same(first, again), "the same step gives another batch")
    require(_same(case.task.held_out(), dataclasses.replace(case.task).held_out()), "the held-out set is another")


def law_epochs(case: _Case) -> None:
    """Batches of an epoch differ, from each other and from the held-out set; other seeds have others, if they may."""
    epoch = list(case.epoch())
    for (i, one), (k, other) in itertools.combinations(enumerate(epoch), 2):
        require(not _same(one, other), f"steps {i} and {k} of an epoch have one batch")
    x, y = case.task.held_out()
    for k, batch in enumerate(epoch):
        require(not _same(batch, (x[: case.size], y[: case.size])), f"step {k} has the first held-out examples")
    others = [case.batch(0, seed) for seed in range(1, 4)]
    require(any(not _same(epoch[0], other) for other in others), "four seeds have one order")


def law_scores(case: _Case) -> None:
    """Scores have the keys of the baseline, the headline among them, for any chunk; the model's mode is restored."""
    task = case.task
    model = _Constant(torch.linspace(-1, 1, task.output_size)).train()
    whole, parts = task.evaluate(model, chunk=10_000), task.evaluate(model, chunk=7)
    require(model.training, "the model is left in evaluation mode")
    require(set(whole) == set(task.baseline), f"scores {sorted(whole)}, a baseline of {sorted(task.baseline)}")
    require(task.headline in whole, f"the headline {task.headline!r} is not a score")
    for key, value in whole.items():
        off = abs(value - parts[key])
        require_within(off, CLOSE * max(1.0, abs(value)), f"{key} in chunks of 7 is off by")


def law_baseline(case: _Case) -> None:
    """What answers the same whatever it reads does not beat the baseline by more than chance lets it."""
    task, (_, y) = case.task, case.task.held_out()
    chance = 4 / math.sqrt(len(y))
    ones = torch.ones(task.output_size)
    for answer in (0 * ones, ones, torch.randn(task.output_size)):
        scores = task.evaluate(_Constant(answer))
        least = task.baseline["loss"] * (1 - chance) if "loss" in scores else -math.inf
        loss = scores.get("loss", math.inf)
        require(loss >= least, f"{answer.tolist()} has a loss of {loss:.3g}, below the baseline", loss, least)
        if "accuracy" in scores:
            share, most = scores["accuracy"], task.baseline["accuracy"] + chance
            require_within(share, most, f"{answer.tolist()} has an accuracy above the baseline,")


def law_recipes(case: _Case) -> None:
    """Each recipe is one of a model that there is, and settings that a run can begin with."""
    for model in case.task.recipes:
        require(model in models.names(), f"a recipe for {model!r}, which no model is named")
        batch_size = case.task.recipe(model).settings.batch_size
        if batch_size is None or batch_size <= case.task.sequences:
            Config.resolve(case.task, model)


TASK_LAWS: dict[str, Callable[[Any], None]] = named(laws_of(__name__))
"""Name to law of tasks."""


def check_task(
    name: str,
    laws: Iterable[str] = tuple(TASK_LAWS),
    *,
    options: Mapping[str, Any] | None = None,
    offset: int | None = None,
) -> None:
    """Checks a registered task against laws of `TASK_LAWS`.

    Args:
        name: the task.
        laws: names in `TASK_LAWS`, all by default.
        options: of the task; a small one is checked faster.
        offset: shifts every seed; what `STIEFELKIT_SEED_OFFSET` says by default.

    Raises:
        LawBroken: lists every failure: the law, the task, what its batches are, figure and bound, seed, and a line that
            repeats it.
        UnknownNameError: no task or law has such a name.
        OptionError: it is no task, or lacks a part, or has no such option.
    """
    case = _Case(name, dict(options or {}))
    assert isinstance(case.task, Task)
    case.settle("check_task", TASK_LAWS, check_laws(laws, TASK_LAWS, " of tasks"), offset)


def _same(one: Batch, other: Batch) -> bool:
    return all(map(torch.equal, one, other))
