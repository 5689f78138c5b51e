"""Spoilt optimizer states: none loads silently, none ends in a traceback, none leaves an optimizer half loaded.

STIEFELKIT_MUTATIONS=2000 pytest tests/optim/test_mutations_of_optimizer_states.py -s   # prints the tally
"""

import collections
import copy
import math
import os
import random
from typing import Any

import pytest
import torch
from optimizers_at_hand import OPTIMIZERS, STATEFUL
from torch import nn

import stiefelkit as sk
from stiefelkit.errors import NonFiniteError, StiefelkitError
from stiefelkit.metrics import orthogonality_error, permitted_error
from stiefelkit.testing.optimizer_cases import equal, snapshot
from stiefelkit.testing.seeds import seed

COUNT = int(os.environ.get("STIEFELKIT_MUTATIONS", "120"))


def model() -> nn.Module:
    return nn.Sequential(
        sk.orthogonal(nn.Linear(4, 4), "weight", "stiefel"),
        sk.orthogonal(nn.Linear(4, 6, dtype=torch.complex64), "weight", "stiefel"),
        sk.orthogonal(nn.Linear(4, 4), "weight", "cayley"),
    )


def trained(name: str, steps: int) -> Any:
    net = model()
    optimizer = OPTIMIZERS[name](sk.optim.parameter_groups(net, lr=0.01), **STATEFUL[name])
    walk(optimizer, steps)
    return optimizer


def walk(optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn_like(p)
        optimizer.step()


MAY_BEGIN_ANEW = ("momentum_buffer", "square_avg", "lo", "wear")
"""Keys whose value may be missing, for which None stands."""


def spoil_value(draw: random.Random, value: Any) -> Any:
    """Something that the entry may not be."""
    if isinstance(value, torch.Tensor):
        t = value.clone()
        wrong = [
            None, "state", [1.0], {"value": t}, t.abs().to(torch.int64), t.abs().bool(), t * math.nan,
            torch.full_like(t, math.inf), torch.zeros(*t.shape, 2), t.to_sparse() if t.dim() else "state",
            t.to(torch.complex64) if not t.is_complex() else t.abs(),
        ]  # fmt: skip
        return draw.choice(wrong)
    return draw.choice([None, "2", [value], math.nan, -1, True, {}, torch.zeros(3)])


def spoil(draw: random.Random, state: dict[str, Any]) -> str:
    """Changes a state dict in one place, and says how."""
    groups, entries = state["param_groups"], state["state"]
    entry = entries[draw.choice(sorted(entries))]
    key = draw.choice(sorted(entry))
    group = draw.choice(groups)
    kinds = "drop rename entry setting ids groups top numbers".split()
    kind = draw.choice(["value"] * 4 + kinds)
    if kind in ("drop", "rename") and not ("exp_avg_sq" in entry and key in ("exp_avg", "exp_avg_sq", "step")):
        kind = "entry"
    if kind == "value":
        entry[key] = spoil_value(draw, entry[key])
        made = entry[key]
        is_of_sgd = key == "momentum_buffer" and getattr(made, "is_sparse", False) and len(entry) == 1
        if is_of_sgd or (made is None and key in MAY_BEGIN_ANEW):
            entry[key] = "state"
    elif kind == "drop":
        del entry[key]
    elif kind == "rename":
        entry[key + "_"] = entry.pop(key)
    elif kind == "entry":
        entries[draw.choice(sorted(entries))] = draw.choice([None, 3, [entry], "state", torch.zeros(2)])
    elif kind == "setting":
        wrong: dict[str, Any] = {
            "lr": draw.choice([-1.0, math.nan, "fast", None, [0.1]]),
            "manifold": draw.choice(["stiefel", 3, [], "sphere"]),
            "precision": draw.choice(["exakt", None, 2]),
            "weight_decay": draw.choice(["much", -1.0, math.nan]),
            "maximize": draw.choice(["no", 3]),
        }
        name = draw.choice(sorted(wrong))
        group[name] = wrong[name]
        kind = f"setting {name}"
    elif kind == "ids":
        group["params"] = draw.choice([None, [], [[]], group["params"] * 2, [99], "0", [True], [None]])
    elif kind == "groups":
        state["param_groups"] = draw.choice([None, [], groups[:-1], groups * 2, groups[0], [3] * len(groups), "groups"])
    elif kind == "top":
        name = draw.choice(["state", "param_groups"])
        state[name] = draw.choice([None, 3, "state", [entries]])
        if draw.random() < 0.5:
            del state[name]
    else:
        entries[draw.choice([77, "weight", -1, (0,), None])] = entry
    return kind


def everything(optimizer: Any) -> Any:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return copy.deepcopy(groups), snapshot(optimizer)[1]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", STATEFUL)
def test_a_spoilt_state_is_refused_in_a_sentence_and_nothing_of_it_is_loaded(name):
    good = trained(name, 3).state_dict()
    optimizer = trained(name, 2)
    before, tally = everything(optimizer), collections.Counter()
    for number in range(COUNT // len(STATEFUL)):
        draw = random.Random(f"{name} {seed(number)}")
        state = copy.deepcopy(good)
        kind = spoil(draw, state)
        try:
            optimizer.load_state_dict(state)
        except StiefelkitError as error:
            if "\n" in str(error):
                pytest.fail(f"draw {number} ({kind}) ends in more than a sentence: {error}")
            tally[f"{kind}: {type(error).__name__}"] += 1
        else:
            pytest.fail(f"draw {number} ({kind}) was loaded")
        assert equal(everything(optimizer), before), f"draw {number} ({kind}) left something"
    print(f"\n{name}: {dict(sorted(tally.items()))}")


@pytest.mark.parametrize("name", STATEFUL)
def test_a_whole_state_is_loaded_and_goes_on(name):
    source, optimizer = trained(name, 3), trained(name, 1)
    optimizer.load_state_dict(source.state_dict())
    assert equal(everything(optimizer), everything(source))
    fresh = trained(name, 0)
    optimizer.load_state_dict(fresh.state_dict())
    walk(optimizer, 3)
    for group in optimizer.param_groups:
        for p in group["params"] if group["manifold"] else ():
            factor = 1 if group["precision"] == "exact" else 30
            assert orthogonality_error(p).max() <= 2 * factor * permitted_error(p.shape[-1], p.dtype)


def test_a_state_of_before_may_lack_what_its_settings_do_not_make():
    optimizer = trained("CayleySGD", 2)
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry.pop("momentum_buffer", None)
        if "wear" in entry:
            entry["moved"] = entry["wear"]
    optimizer.load_state_dict(state)
    assert not any("momentum_buffer" in entry for entry in optimizer.state.values())
    walk(optimizer, 1)
    assert all("momentum_buffer" in entry for entry in optimizer.state.values())


def test_a_hook_may_mend_a_state_before_it_is_checked():
    optimizer = trained("CayleySGD", 2)
    good, before = copy.deepcopy(optimizer.state_dict()), snapshot(optimizer)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: {**state, "param_groups": good["param_groups"]})
    optimizer.load_state_dict({"state": good["state"], "param_groups": []})
    assert equal(snapshot(optimizer), before)


def test_the_momentum_of_sparse_gradients_is_loaded_if_it_is_finite():
    state = trained("CayleySGD", 2).state_dict()
    buffers = [entry["momentum_buffer"] for entry in state["state"].values() if "wear" not in entry]
    sparse = buffers[0].to_sparse()
    entry = next(e for e in state["state"].values() if e["momentum_buffer"] is buffers[0])
    entry["momentum_buffer"] = sparse
    trained("CayleySGD", 1).load_state_dict(state)
    entry["momentum_buffer"] = sparse * math.nan
    with pytest.raises(NonFiniteError, match="momentum_buffer"):
        trained("CayleySGD", 1).load_state_dict(state)
