"""The laws of tasks: stateless batches, epochs without repeats, the papers' definitions and baselines."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import small_data
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from task_laws import Constant, check_task
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit import models
from stiefelkit.errors import OptionError
from stiefelkit.testing import seeds
from stiefelkit.training import data
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task, create, tasks
from stiefelkit.training.tasks.task import evaluating, generator
from stiefelkit.training.tasks.words import GROUPS, products

TASKS: list[tuple[str, dict[str, Any]]] = [
    ("digits", {}),
    ("digits", {"permuted": True, "train_size": 100}),
    ("copying", {"T": 7, "train_size": 60, "test_size": 40}),
    ("copying", {"T": 1, "train_size": 60, "test_size": 40}),
    ("adding", {"T": 11, "train_size": 60, "test_size": 400}),
    ("adding", {"T": 3, "train_size": 60, "test_size": 400}),
    ("speech", {"validation_speakers": 2}),
    ("speech", {"validation_speakers": 2, "train_size": 60, "standardized": False}),
    ("chars", {"T": 20}),
    ("chars", {"reset": "line", "ahead": 5, "train_size": 100}),
    ("words", {"group": "S3", "T": 5, "test_T": 17, "train_size": 60, "test_size": 40}),
    ("words", {"T": 9, "rise": 3, "test_T": 40, "train_size": 60, "test_size": 20, "fresh": False}),
]


@pytest.fixture(autouse=True, scope="module")
def _data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every task finds its data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(data.VARIABLE, str(small_data.every(tmp_path_factory.mktemp("data"))))
        yield


def rows(x: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


@pytest.mark.parametrize(("name", "options"), TASKS, ids=str)
def test_every_task_keeps_the_laws(name: str, options: dict[str, Any]) -> None:
    check_task(name, **options)


def test_keys_have_streams_of_their_own() -> None:
    numbers = (0, 1, 5, 2**32 - 1, 2**32, 2**33, 2**32 + 1, 2**63 - 1)
    keys = [(a, b, c) for a in numbers for b in numbers for c in numbers]
    assert len({generator(*key).initial_seed() for key in keys}) == len(keys)


@pytest.mark.parametrize("name", ["copying", "adding"])
def test_a_synthetic_training_set_comes_again_in_order_and_fresh_sequences_never_do(name: str) -> None:
    fixed, fresh = (
        [create(name, {"train_size": 65, "fresh": fresh}).batch(step, 20, seeds.seed(5))[0] for step in range(6)]
        for fresh in (False, True)
    )
    assert all(map(torch.equal, fixed, [*fixed[3:], *fixed[:3]]))
    assert all(map(torch.equal, fixed[:3], fresh[:3]))
    assert (len(rows(torch.cat(fixed))), len(rows(torch.cat(fresh)))) == (60, 120)


def test_an_epoch_of_digits_visits_every_image_once_in_an_order_of_its_own() -> None:
    task = create("digits", {"train_size": 96})
    epochs = [torch.cat([task.batch(4 * epoch + k, 24, seeds.seed())[0] for k in range(4)]) for epoch in range(2)]
    assert not torch.equal(*epochs)
    assert rows(epochs[0]) == rows(epochs[1])
    assert len(rows(epochs[0])) == 96


# Copying draws ten symbols out of eight: two of its 8^10 sequences may well be equal by chance.
@pytest.mark.parametrize("task", [create("digits"), create("adding", {"train_size": 2000})], ids=lambda t: t.name)
def test_held_out_data_is_not_in_the_training_set(task: Task) -> None:
    train = torch.cat([task.batch(step, 20, seeds.seed())[0] for step in range(task.batches_per_epoch(20))])
    assert not rows(train) & rows(task.held_out()[0])


def test_baselines_are_what_guessing_scores() -> None:
    task = create("copying", {"T": 30, "test_size": 50})
    _, y = task.held_out()
    output = torch.full((*y.shape, 9), -50.0)
    output[:, :-10, 0] = 50.0
    output[:, -10:, 1:] = 0.0
    assert task.loss(output, y).item() == pytest.approx(task.baseline["loss"], rel=1e-5)
    assert task.baseline["loss"] == pytest.approx(10 * math.log(8) / 50)
    adding = create("adding", {"T": 20, "test_size": 20_000})
    assert adding.evaluate(Constant(torch.ones(1)))["loss"] == pytest.approx(1 / 6, rel=0.03)
    digits = create("digits").evaluate(Constant(torch.zeros(10)))
    assert (digits["loss"], digits["accuracy"]) == (pytest.approx(math.log(10)), pytest.approx(0.1, abs=0.01))


@pytest.mark.parametrize("at_marker", [False, True])
@settings(max_examples=10)
@given(delay=st.integers(1, 40))
def test_copying_is_the_papers_sequence(at_marker: bool, delay: int) -> None:
    x, y = create("copying", {"T": delay, "at_marker": at_marker}).batch(0, 6, seeds.seed())
    symbols, marker = x.argmax(-1), delay + 9 + at_marker
    assert x.shape == (6, delay + 20, 10)
    assert torch.equal(x.sum(-1), torch.ones(6, delay + 20))
    assert set(symbols[:, :10].unique().tolist()) <= set(range(1, 9))
    assert (symbols[:, marker] == 9).all()
    blanks = torch.cat([symbols[:, 10:marker], symbols[:, marker + 1 :]], dim=1)
    assert not blanks.any()
    assert not y[:, : delay + 10].any()
    assert torch.equal(y[:, delay + 10 :], symbols[:, :10])


@settings(max_examples=10)
@given(length=st.integers(3, 60))
def test_adding_marks_one_number_in_each_half(length: int) -> None:
    x, y = create("adding", {"T": length}).batch(0, 50, seeds.seed())
    numbers, markers = x.unbind(-1)
    half = (length - 1) // 2
    assert x.shape == (50, length, 2)
    assert (markers[:, :half].sum(1) == 1).all()
    assert (markers[:, half:].sum(1) == 1).all()
    assert ((numbers >= 0) & (numbers < 1)).all()
    assert torch.allclose(y, (numbers * markers).sum(1))


@pytest.mark.parametrize("group", GROUPS)
def test_words_are_products_of_a_group_whose_length_grows_and_accuracy_is_told_by_position(group: str) -> None:
    table = products(group)
    size, commutes = len(table), torch.equal(table, table.mT)
    assert (size, commutes) == ({"S5": 120, "S3": 6}.get(group, 60), group == "Z60")
    assert torch.equal(table[table], table[:, table])
    assert all(torch.equal(lines.sort(1).values, torch.arange(size).expand(size, -1)) for lines in (table, table.mT))
    task = create("words", {"group": group, "T": 8, "rise": 4, "test_T": 40, "test_size": 30})
    assert [task.batch(step, 3, 0)[0].shape[1] for step in range(6)] == [2, 3, 4, 6, 8, 8]
    x, y = task.held_out()
    assert torch.equal(y[:, 0], x[:, 0].argmax(-1))
    assert torch.equal(y[:, 1:], table[y[:, :-1], x[:, 1:].argmax(-1)])
    scores = task.totals(torch.eye(size)[torch.where(torch.arange(40) < 32, y, (y + 1) % size)], y)
    assert [scores[f"accuracy_at_{steps}"] for steps in (16, 32, 40)] == [(30, 30), (30, 30), (0, 30)]


def test_digits_are_split_evenly_over_the_classes_and_permuted_ones_have_the_same_pixels() -> None:
    plain, mixed = create("digits").held_out(), create("digits", {"permuted": True}).held_out()
    counts = plain[1].bincount()
    assert (len(plain[1]), 34 <= counts.min(), counts.max() <= 38) == (360, True, True)
    assert not torch.equal(plain[0], mixed[0])
    assert torch.equal(plain[0].sort(dim=1).values, mixed[0].sort(dim=1).values)
    assert torch.equal(plain[1], mixed[1])
    assert (plain[0].min(), plain[0].max()) == (0, 1)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("copying", {"T": 0}),
        ("adding", {"T": 2}),
        ("digits", {"train_size": 1438}),
        ("mnist", {"shifts": 29}),
        ("chars", {"reset": "never"}),
        ("waveform", {"start": -0.5}),
        ("speech", {"validation_speakers": 0}),
        ("words", {"group": "A6"}),
    ],
)
def test_options_out_of_range_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        create(name, options)


def test_a_recipes_options_are_those_of_the_models_own_parametrization() -> None:
    task = create("digits")
    assert Config.resolve(task, "scornn", Settings(hidden_size=50)).options == {"negative": 5}
    for chosen in ("householder", "none"):
        config = Config.resolve(task, "scornn", Settings(options={"parametrization": chosen}))
        assert config.options == {"parametrization": chosen}
        config.build_optimizer(config.build_model())


@pytest.mark.parametrize("name", tasks.names())
def test_every_recipe_is_a_config_whose_model_can_be_built(name: str) -> None:
    task = create(name)
    for model in task.recipes:
        config = Config.resolve(task, model)
        optimizer = config.build_optimizer(config.build_model())
        assert all(group["lr"] > 0 for group in optimizer.param_groups)


def test_the_page_of_models_says_whose_recipe_has_an_orthogonal_weight():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    weights = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", page, re.MULTILINE))
    assert sorted(weights) == models.names()
    for name, words in weights.items():
        found = sk.drift(Config.resolve(create("digits"), name).build_model())
        assert bool(found) == words.startswith(("orthogonal", "unitary", "near-orthogonal"))


def test_evaluation_leaves_each_part_in_its_mode():
    """A part that was set to evaluate, as frozen ones are, is not set back to training."""
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3)))
    model[1].eval()
    with evaluating(model):
        assert not any(part.training for part in model.modules())
    assert [part.training for part in model.modules()] == [True, True, False, False, False]
