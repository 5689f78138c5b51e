"""Tasks keep the laws of tasks, each law catches a task that breaks it, and what is no task is refused."""

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from task_laws import LAWS, check_task

from stiefelkit import errors
from stiefelkit.testing import seeds
from stiefelkit.training import tasks as room
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import Recipe, Settings
from stiefelkit.training.session import Session
from stiefelkit.training.tasks import Task, create
from stiefelkit.training.tasks.task import generator


@dataclass(frozen=True)
class First(Task):
    """Reads T numbers, and must give the first at the last step.

    Args:
        T: how many.
        train_size: training sequences.
    """

    T: int = 4
    train_size: int = 60
    name: ClassVar[str] = "mine"
    input_size: ClassVar[int] = 1
    output_size: ClassVar[int] = 1
    last_only: ClassVar[bool] = True
    headline: ClassVar[str] = "loss"
    loss_label: ClassVar[str] = "mean squared error"
    recipes: ClassVar[dict[str, Recipe]] = {"scornn": Recipe(Settings(hidden_size=6, batch_size=20))}

    @property
    def baseline(self):
        return {"loss": 1 / 12}

    def batch(self, step, batch_size, seed):
        return self._drawn(batch_size, generator(seed, 0, step % self.batches_per_epoch(batch_size)))

    def held_out(self):
        return self._drawn(300, generator(0, 1))

    def loss(self, output, y):
        return (output.squeeze(-1) - y).square().mean()

    def accuracy(self, output, y):
        return None

    def _drawn(self, count, source):
        x = torch.rand(count, self.T, 1, generator=source)
        return x, x[:, 0, 0]


@dataclass(frozen=True)
class Unsaid(First):
    """Reads T numbers.

    Args:
        T: how many.
    """


class Broadcasting(First):
    """Compares (B, 1) with (B), of which torch makes (B, B), and leaves a target for each."""

    def held_out(self):
        x, y = super().held_out()
        return x.squeeze(-1), y


class Undifferentiable(First):
    def loss(self, output, y):
        return ((output.squeeze(-1) - y).square().mean() > 0).float() + 0 * output.sum()


class Drawing(First):
    """Asks torch's own generator."""

    def batch(self, step, batch_size, seed):
        seeds.reseed(step)
        return self._drawn(batch_size, None)


class Tiring(First):
    """Has one batch."""

    def batch(self, step, batch_size, seed):
        return super().batch(0, batch_size, seed)


class Peeping(First):
    """Trains on what is held out."""

    def batch(self, step, batch_size, seed):
        x, y = self.held_out()
        return x[step * batch_size : (step + 1) * batch_size], y[step * batch_size : (step + 1) * batch_size]


class Seedless(First):
    def batch(self, step, batch_size, seed):
        return super().batch(step, batch_size, 0)


class Misheaded(First):
    headline: ClassVar[str] = "accuracy"


class Summing(First):
    """Adds up where it should average, so that chunks tell."""

    def totals(self, output, y):
        return {"loss": (float(self.loss(output, y)), 1)}


class Modest(First):
    """Gives a baseline that anything beats."""

    @property
    def baseline(self):
        return {"loss": 10.0}


class Sure(First):
    """Scores what is right anyway."""

    @property
    def baseline(self):
        return {"loss": 1 / 12, "accuracy": 0.1}

    def accuracy(self, output, y):
        return torch.tensor(0.9)


class Unknown(First):
    recipes: ClassVar[dict[str, Recipe]] = {"scorn": Recipe()}


@pytest.fixture(autouse=True)
def _own_table(monkeypatch):
    for held in ("_targets", "_loaded", "_origins"):
        monkeypatch.setattr(room.tasks, held, dict(vars(room.tasks)[held]))


def registered(cls, name="mine"):
    if "__dataclass_fields__" not in vars(cls):
        cls = dataclass(frozen=True)(cls)
        cls.__doc__ = First.__doc__
    room.tasks.register(name, cls)
    return cls


def test_a_task_of_ones_own_keeps_the_laws():
    registered(First)
    check_task("mine")
    check_task("mine", T=2, train_size=41)


class Counting(First):
    """Gives its accuracy as a number of Python's."""

    @property
    def baseline(self):
        return {"loss": 1 / 12, "accuracy": 0.5}

    def accuracy(self, output, y):
        return ((output.squeeze(-1) > 0.5) == (y > 0.5)).float().mean().item()


def test_an_accuracy_may_be_a_number_and_a_run_logs_it():
    registered(Counting)
    check_task("mine")
    session = Session.start(Config.resolve(create("mine"), "scornn"))
    session.advance()
    assert 0 < session.window.correct <= 1


SABOTEURS = [
    (Unsaid, "options"),
    (Broadcasting, "shapes"),
    (Undifferentiable, "shapes"),
    (Drawing, "pure"),
    (Tiring, "epochs"),
    (Peeping, "epochs"),
    (Seedless, "epochs"),
    (Misheaded, "scores"),
    (Summing, "scores"),
    (Modest, "baseline"),
    (Sure, "baseline"),
    (Unknown, "recipes"),
]


@pytest.mark.parametrize(("cls", "law"), SABOTEURS, ids=lambda value: getattr(value, "__name__", value))
def test_the_law_catches_its_saboteur(cls, law):
    registered(cls)
    with pytest.raises(AssertionError):
        check_task("mine", [law], T=3)


def test_every_law_has_a_saboteur():
    assert {law for _, law in SABOTEURS} == set(LAWS)


def test_a_task_under_another_name_is_refused():
    registered(First, "yours")
    with pytest.raises(errors.OptionError, match="yours"):
        create("yours")


def without(part) -> Any:
    kept = {name: value for name, value in vars(First).items() if not name.startswith("__") and name != part}
    kept["__annotations__"] = {key: kind for key, kind in First.__annotations__.items() if key != part}
    return dataclass(frozen=True)(type("Mine", (Task,), kept))


class Bare(First):
    pass


@pytest.mark.parametrize(
    ("cls", "word"),
    [
        (int, "dataclass"),
        (Bare, "dataclass"),
        *((without(part), part) for part in ("last_only", "recipes", "train_size")),
    ],
)
def test_what_lacks_a_part_is_refused_and_left_out_of_lists(cls, word):
    room.tasks.register("mine", cls)
    with pytest.raises(errors.OptionError, match=word):
        create("mine")
    with pytest.warns(UserWarning, match="'mine' is left out"):
        assert "mine" not in room.tasks.available()
