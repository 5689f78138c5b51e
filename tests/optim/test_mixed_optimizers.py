"""Several optimizers in one run: each moves what the table gives it, and all of it resumes to the same bits."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import Killed, killed_at, small, weights
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

import stiefelkit as sk
from stiefelkit.errors import CheckpointError, OptimizerError, OptionError, UnknownNameError
from stiefelkit.testing import seeds
from stiefelkit.training import train
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import Option, Recipe, Settings
from stiefelkit.training.tasks import create

TENSORFLOWS: dict[str, Any] = {"alpha": 0.9, "eps": 1e-10, "init_acc": 1.0, "eps_inside": True}
TABLE: dict[str, dict[str, Any]] = {
    "skew": {"optimizer": "rmsprop", "lr": 1e-3, **TENSORFLOWS},
    "phase": {"optimizer": "adagrad", "lr": 1e-2, "initial_accumulator_value": 0.1},
}


def built(**changes: Any) -> torch.optim.Optimizer:
    config = small(**changes)
    return config.build_optimizer(config.build_model())


def stepped(optimizer: torch.optim.Optimizer, p: nn.Parameter, steps: int = 5) -> torch.Tensor:
    source = seeds.generator()
    for _ in range(steps):
        p.grad = torch.randn(p.shape, dtype=p.dtype, generator=source)
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.5, "centered": True}, {"weight_decay": 0.1, "maximize": True}, {"alpha": 0.9}]
)
def test_rmsprop_is_torchs_where_nothing_else_is_asked(options: dict[str, Any], dtype: torch.dtype) -> None:
    ours, theirs, inside = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(3))
    moved = stepped(torch.optim.RMSprop([theirs], lr=0.01, foreach=False, **options), theirs)
    assert torch.equal(stepped(sk.optim.RMSprop([ours], lr=0.01, foreach=False, **options), ours), moved)
    # with no epsilon it does not matter where it stands
    stepped(sk.optim.RMSprop([inside], lr=0.01, eps=0.0, eps_inside=True, **options), inside)
    assert torch.allclose(inside, moved, rtol=1e-4, atol=1e-5)


def test_hooks_of_a_step_run_once_and_copies_go_their_own_way() -> None:
    torch.optim.RMSprop([nn.Parameter(torch.ones(1))])  # torch puts hooks around the step of a class it has seen
    p = nn.Parameter(torch.ones(2))
    mixed = sk.optim.MixedOptimizer([sk.optim.RMSprop([p], lr=0.01, init_acc=1.0)])
    calls: list[int] = []
    for optimizer in (mixed, mixed.optimizers[0]):
        optimizer.register_step_post_hook(lambda *_: calls.append(1))
    stepped(mixed, p, 3)
    assert len(calls) == 6
    q, twin = copy.deepcopy((p, mixed))
    assert twin.param_groups[0]["params"][0] is q
    assert torch.equal(stepped(twin, q), stepped(mixed, p))


def test_a_gradient_that_stays_has_no_variance_and_gives_numbers_all_the_same() -> None:
    p = nn.Parameter(torch.ones(64))
    optimizer = sk.optim.RMSprop([p], lr=1e-6, alpha=0.9, eps=1e-10, centered=True, eps_inside=True)
    gradient = torch.linspace(0.1, 1, 64)
    for _ in range(400):
        p.grad = gradient
        optimizer.step()
    assert p.isfinite().all()


def test_rmsprop_of_tensorflow_is_its_formula() -> None:
    p, v, q = nn.Parameter(torch.ones(4, dtype=torch.float64)), torch.ones(4), torch.ones(4, dtype=torch.float64)
    settings: dict[str, Any] = {**TENSORFLOWS, "eps": 1e-2}
    optimizer = sk.optim.RMSprop([p], lr=0.01, **settings)
    source = seeds.generator()
    for _ in range(4):
        p.grad = torch.randn(4, dtype=torch.float64, generator=source)
        optimizer.step()
        v = 0.9 * v + 0.1 * p.grad**2
        q = q - 0.01 * p.grad / (v + 1e-2).sqrt()
    assert torch.allclose(p, q, rtol=1e-12)


def test_rmsprop_takes_the_state_of_torchs_and_refuses_what_is_out_of_range() -> None:
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    theirs = torch.optim.RMSprop([p])
    stepped(theirs, p)
    ours = sk.optim.RMSprop([q], init_acc=1.0)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.state[q]["square_avg"], theirs.state[p]["square_avg"])
    refused: list[dict[str, Any]] = [{"init_acc": -1.0}, {"eps_inside": True, "capturable": True}]
    for wrong in refused:
        with pytest.raises(OptionError, match="RMSprop needs"):
            sk.optim.RMSprop([q], **wrong)
        with pytest.raises(OptionError):
            sk.optim.RMSprop([{"params": [q], **wrong}])


def test_each_optimizer_of_the_table_moves_its_coordinate_alone() -> None:
    config = small(optimizers=TABLE, rates={"phase": 1e-3})
    model: Any = config.build_model()
    optimizer: Any = config.build_optimizer(model)
    plain, skew, phase = optimizer.optimizers
    assert [type(each) for each in optimizer.optimizers] == [torch.optim.Adam, sk.optim.RMSprop, torch.optim.Adagrad]
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-3, 1e-3]  # rates win over the table
    coordinates = sk.coordinates(model.rnn, "weight_hh_l0")
    assert [p.shape for p in skew.param_groups[0]["params"]] == [coordinates["skew"].shape]
    assert phase.param_groups[0]["params"][0] is coordinates["phase"]
    assert phase.state[coordinates["phase"]]["sum"].unique().item() == pytest.approx(0.1)
    assert not {id(p) for p in coordinates.values()} & {id(p) for p in plain.param_groups[0]["params"]}


@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize(
    ("model", "table", "optimizer"),
    [
        ("scurnn", TABLE, "adam"),
        ("full_urnn", {"stiefel": {"optimizer": "multiplicative_cayley", "lr": 1e-3}}, "rmsprop"),
    ],
)
def test_a_mixed_run_resumes_to_the_same_bits(
    model: str, table: dict[str, Any], optimizer: str, step: int, tmp_path: Path
) -> None:
    config = small(model=model, optimizers=table, optimizer=optimizer, schedule="cosine", clip_norm=1.0)
    train.train(config, tmp_path / "whole")
    with pytest.raises(Killed):
        train.train(config, tmp_path / "killed", killed_at(step))
    train.resume(tmp_path / "killed", {"optimizers": {name: {"lr": table[name]["lr"]} for name in table}})
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_the_state_of_one_optimizer_is_not_that_of_several() -> None:
    mixed = built(optimizers=TABLE)
    with pytest.raises(CheckpointError, match="3 optimizers"):
        mixed.load_state_dict(torch.optim.Adam([torch.ones(1)]).state_dict())
    with pytest.raises(OptionError, match="of their own"):
        sk.optim.MixedOptimizer([])
    with pytest.raises(OptionError, match="got another"):
        mixed.add_param_group({"params": [torch.ones(1)]})


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"optimizers": {"skew": {"lr": 1e-3}}}, OptionError, "table"),
        ({"optimizers": {"skew": {"optimizer": "rmspop"}}}, UnknownNameError, "rmsprop"),
        ({"optimizers": {"skew": {"optimizer": "rmsprop", "lr": 0.0}}}, OptionError, "optimizers.skew.lr"),
        ({"optimizers": {"skew": {"optimizer": "rmsprop", "alfa": 0.0}}}, OptionError, "alpha"),
        ({"optimizers": {"angle": {"optimizer": "rmsprop"}}}, OptionError, "'angle'"),
        ({"model": "full_urnn", "optimizers": {"stiefel": {"optimizer": "adam"}}}, OptimizerError, "keeps"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        built(**changes)


def test_a_recipes_table_gives_way_to_what_is_named() -> None:
    recipe = Recipe(Settings(optimizer="adam", optimizers=TABLE, rates={"skew": 1.0}))
    for name in ("sgd", "adam"):
        assert recipe.filled(Settings(optimizer=name)).optimizers == {}
    rated = recipe.filled(Settings(rates={"skew": 2e-4}))
    assert "lr" not in rated.optimizers["skew"]
    assert rated.optimizers["phase"] == TABLE["phase"]
    own: dict[str, Option] = {"optimizer": "adam"}
    assert recipe.filled(Settings(optimizers={"skew": own})).optimizers == {"skew": own, "phase": TABLE["phase"]}
    config = Config.resolve(create("copying"), "lstm", Settings(hidden_size=4))
    assert config.optimizers == {}
    config = Config.resolve(create("copying"), "lstm", Settings(hidden_size=4, optimizers={"skew": own}))
    with pytest.raises(OptionError, match="'skew'"):
        config.build_optimizer(config.build_model())


@pytest.mark.parametrize("cycled", [lambda o: OneCycleLR(o, 0.2, 9), lambda o: CyclicLR(o, 1e-3, 0.2)])
def test_schedulers_cycle_a_momentum_that_all_have(cycled: Any) -> None:
    p, w = nn.Parameter(torch.ones(1)), nn.Parameter(torch.eye(3))
    adams, sgds = (torch.optim.Adam, sk.optim.StiefelAdam), (torch.optim.SGD, sk.optim.CayleySGD)
    for (free, ours), key in ((adams, "betas"), (sgds, "momentum")):
        mixed, seen = sk.optim.MixedOptimizer([free([p], lr=0.1), ours(sk.optim.frames(w), lr=0.1)]), set()
        schedule = cycled(mixed)
        for _ in range(3):
            mixed.step()
            schedule.step()
            seen.add(tuple(torch.tensor(group[key]).flatten()[0].item() for group in mixed.param_groups))
        assert len(seen) == 3
        assert all(of_free == of_frames for of_free, of_frames in seen)
    with pytest.raises(ValueError, match="momentum"):
        cycled(sk.optim.MixedOptimizer([torch.optim.Adam([p]), torch.optim.SGD([w])]))


def test_its_groups_are_those_that_its_optimizers_have_now() -> None:
    p, q, r = (nn.Parameter(torch.ones(1)) for _ in range(3))
    first, second = torch.optim.SGD([p], lr=0.1), torch.optim.SGD([q], lr=0.1)
    mixed = sk.optim.MixedOptimizer([first, second])
    schedule = torch.optim.lr_scheduler.StepLR(mixed, 1, gamma=0.5)
    first.load_state_dict(first.state_dict())
    second.add_param_group({"params": [r]})
    p.grad = r.grad = torch.ones(1)
    mixed.step()
    schedule.step()
    mixed.zero_grad()
    assert p.grad is None
    assert r.grad is None
    assert [group["lr"] for group in mixed.param_groups] == [0.05, 0.05, 0.05]
    assert len(copy.deepcopy(mixed).param_groups) == 3
    with pytest.raises(OptionError, match="MixedOptimizer needs groups of its optimizers"):
        mixed.param_groups = [{"params": [p]}]
