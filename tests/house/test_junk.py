"""Junk is refused at every door, by an error of ours or of torch's, and changes nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, functional
from stiefelkit.contract.table import option_names, registered
from stiefelkit.functional import _packing
from stiefelkit.optim import minimizers

REFUSED = pytest.raises((errors.StiefelkitError, TypeError, ValueError, RuntimeError))
JUNK: Any = object()


def frame() -> nn.Parameter:
    return nn.Parameter(sk.init.identity((4, 3)))


@pytest.mark.parametrize("name", registered.names())
def test_a_map_refuses_options_and_the_module_stays(name: str) -> None:
    for key in [*option_names(registered.find(name)), "init", "view", "blocks", "dim", "gain"]:
        layer = nn.Linear(4, 4)
        before = layer.weight
        with REFUSED:
            sk.orthogonal(layer, "weight", name, **{key: JUNK})
        assert layer.weight is before


DOORS: dict[str, Callable[[Any], Any]] = {
    "orthogonal": lambda junk: sk.orthogonal(junk, "weight"),
    "name": lambda junk: sk.orthogonal(nn.Linear(4, 4), junk),
    "map": lambda junk: sk.orthogonal(nn.Linear(4, 4), "weight", junk),
    "draw": lambda junk: sk.init.draw(junk, (3, 2)),
    "max_norm": lambda junk: sk.optim.clip_grad_norm_(nn.Linear(4, 4), junk),
    "groups": lambda junk: sk.optim.parameter_groups(junk, lr=0.1),
    "model": lambda junk: sk.models.create(junk, 3, 4, 2),
    "size of a layer": lambda junk: sk.nn.OrthogonalLinear(junk, 4),
    "backend": lambda junk: sk.nn.OrthogonalRNN(3, 4, backend=junk),
    "bake": sk.bake,
    "assign_": lambda junk: sk.assign_(sk.orthogonal(nn.Linear(4, 4), "weight"), "weight", junk),
}


@pytest.mark.parametrize("door", DOORS)
def test_junk_is_refused_at_every_door(door: str) -> None:
    with REFUSED:
        DOORS[door](JUNK)


@pytest.mark.parametrize("name", minimizers.available())
def test_a_minimizer_refuses_junk_and_the_frame_stays(name: str) -> None:
    w = frame()
    optimizer, before = minimizers.available()[name](sk.optim.frames(w)), w.detach().clone()
    for closure in (JUNK, lambda: JUNK):
        with REFUSED:
            optimizer.step(closure)
        assert torch.equal(w, before)


def test_a_mixed_optimizer_that_is_refused_a_state_is_as_it_was() -> None:
    optimizer, other = (
        sk.optim.MixedOptimizer([torch.optim.Adam([frame()], lr=lr), torch.optim.Adam([frame(), *extra], lr=lr)])
        for lr, extra in ((0.1, []), (0.2, [frame()]))
    )
    state: Any
    for state in (other.state_dict(), JUNK, {"optimizers": [JUNK] * 2}):
        with REFUSED:
            optimizer.load_state_dict(state)
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


@pytest.mark.parametrize("wrong", [16.0, np.float64(5)], ids=repr)
def test_a_size_that_no_function_takes_is_not_remembered_for_the_integer_that_is_equal(wrong: Any) -> None:
    n, v = int(wrong), torch.zeros(2 * int(wrong) ** 2)
    for call in (
        lambda size: functional.cayley(v[: n * (n - 1) // 2], size, size),
        lambda size: functional.unpack_trapezoid(v[: n * (n + 1) // 2], size, size, False),
        lambda size: functional.spread_band(v[: n - 1], size, size, False, 1),
        lambda size: functional.brickwall(torch.eye(n), v[: functional.mesh_size(n, n)], layers=size),
    ):
        with REFUSED:
            call(wrong)
        found = call(n)
        _packing._known.clear()
        torch.testing.assert_close(found, call(n), rtol=0, atol=0)
