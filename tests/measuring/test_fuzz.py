"""Random lives of models end without a silent error; what is wrong is caught, and made small."""

import itertools
import json
from typing import Any

import pytest
import torch

import stiefelkit as sk
from benchmarks.fuzz import events
from benchmarks.fuzz.events import EVENTS, Event
from benchmarks.fuzz.plan import draw
from benchmarks.fuzz.run import carry_out, shrink
from stiefelkit.optim.batch import Bucket
from stiefelkit.parametrizations import Cayley, Rebased
from stiefelkit.testing import seeds
from stiefelkit.weights.coordinate_list import CoordinateList

SLOW = {"traced"}
"""Kinds of events that take seconds."""


def layer(kind: str = "linear", sizes: Any = (4, 4), name: str = "cayley", **options: Any) -> dict[str, Any]:
    drawn = {"through_model": False, "complex": options.pop("complex", False), "bias": True, "seed": 1, "groups": 1}
    drawn["activation"] = "identity"
    return {"kind": kind, "sizes": list(sizes), "map": name, "options": options, **drawn}


def case(
    layers: Any, *happens: Any, tied: bool = False, precision: str = "float32", frames: str = "cayley_sgd"
) -> dict[str, Any]:
    optimizer = {"free": ["sgd", {}], "frames": [frames, {}], "metric": "canonical", "mixed": True, "lr": 0.01}
    lives = [{"seed": 7 + i, **happening} for i, happening in enumerate(happens)]
    rates = ["StepLR", {"step_size": 2}]
    of_all = {"seed": 3, "tied": tied, "precision": precision, "layers": layers, "scheduler": rates}
    return {**of_all, "optimizer": optimizer, "events": lives}


def happening(name: str, **options: Any) -> dict[str, Any]:
    return {"do": name, **{key: values[0] for key, values in EVENTS[name].options.items()}, **options}


PAIR = [layer("embedding", (5, 3)), layer("linear", (3, 5))]
FOUND = {
    "a gradient of one complex row is clipped": case(
        [layer("linear", (7, 1), "stiefel", complex=True)], happening("step", k=1, clip="torch")
    ),
    "a base that was cast up is saved as it is read": case(
        [layer(name="rebased")], happening("cast", to="double"), happening("loaded", how="itself")
    ),
    "a chart in another memory format is looked at": case(
        [layer("bare", (7, 3), "matrix_exp", complex=True)],
        happening("move", how="channels"),
        happening("bad_state", what="missing"),
    ),
    "a state that was cast is one that loads": case(
        [layer("linear", (4, 7), "stiefel")],
        happening("step", k=1),
        happening("cast", to="double", keeps=True),
        happening("cast", to="half", keeps=True),
    ),
    "a description alone is no weight": case(
        [layer("embedding", (2, 1), "stiefel")], happening("bad_state", what="missing")
    ),
    "a tied weight has its coordinates after functional_call": case(
        PAIR, happening("functional", how="call"), happening("step", k=2), tied=True
    ),
    "a step that was refused leaves a state that loads": case(
        [layer(name="stiefel")],
        happening("bad_gradient"),
        happening("cast", to="float", keeps=True),
        frames="stiefel_adam",
    ),
    "tied weights are made on the meta device": case(PAIR, happening("loaded", how="meta_assign"), tied=True),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_once_stays_mended(what):
    assert carry_out(FOUND[what]).failure is None


@pytest.mark.parametrize("number", range(10))
def test_lives_end_without_a_silent_error(number):
    drawn = draw(seeds.seed(number))
    drawn["events"] = [happens for happens in drawn["events"] if happens["do"] not in SLOW]
    outcome = carry_out(drawn)
    assert outcome.failure is None, f"{outcome.failure}\npython -m benchmarks.fuzz --case {seeds.seed(number)}"


def test_a_case_is_plain_data_and_one_number_is_one_case():
    assert json.loads(json.dumps(draw(5))) == json.loads(json.dumps(draw(5)))
    assert draw(5) != draw(6)


def test_an_event_that_moves_a_weight_in_silence_is_caught_and_made_small(monkeypatch):
    def spoil(world: Any) -> str:
        world.weight().coordinate_list.original0.data.add_(0.1)
        return "same"

    monkeypatch.setitem(events.EVENTS, "spoil", Event(spoil, 1.0, (), {}))
    long = case(
        [layer(gain=2.0), layer("embedding", (5, 3))],
        happening("move", how="group"),
        {"do": "spoil"},
        happening("step"),
        happening("copied"),
    )
    assert "has changed by" in str(carry_out(long).failure)
    small = shrink(long)
    assert [happens["do"] for happens in small["events"]] == ["spoil"]
    assert len(small["layers"]) == 1
    assert small["layers"][0]["options"] == {}


def test_a_refusal_that_leaves_something_written_is_caught(monkeypatch):
    def half(world: Any) -> str:
        from stiefelkit.errors import OptionError

        next(world.net.parameters()).data.add_(1.0)
        raise OptionError("half needs more, got less.")

    monkeypatch.setitem(events.EVENTS, "half", Event(half, 1.0, ("half needs",), {}))
    assert "a refused event has changed" in str(carry_out(case([layer()], {"do": "half"})).failure)


class Longer(torch.autograd.Function):
    """The identity with a gradient that is 1 % too long."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:  # type: ignore[override]
        return 1.01 * g


def around(cls: Any, name: str, how: Any) -> tuple[Any, str, Any]:
    """What a method is replaced by: `how` is given the method, then what that is called with."""
    method = getattr(cls, name)
    return cls, name, lambda *args, **kwargs: how(method, *args, **kwargs)


def saves_no_chart(save: Any, self: Any, to: Any, prefix: str, keep_vars: bool) -> None:
    save(self, to, prefix, keep_vars)
    to.update({key: torch.eye(*t.shape) for key, t in to.items() if key.startswith(prefix) and key.endswith(".base")})


def loses_digits(apply: Any, self: Any, *args: Any) -> Any:
    apply(self, *args)
    for c in self.coordinates.values():
        c.data = c.data.bfloat16().to(c.dtype) if not c.is_complex() else c.data
    return self


def steps_short(step: Any, self: Any) -> None:
    rates = [group["lr"] for group in self.param_groups]
    for group, rate in zip(self.param_groups, rates, strict=True):
        group["lr"] = 0.99 * rate
    step(self)
    for group, rate in zip(self.param_groups, rates, strict=True):
        group["lr"] = rate


def forgets(commit: Any, self: Any, before: Any) -> None:
    for key in {"momentum_buffer", "exp_avg"} & self._staged.keys():
        self._staged[key] = 0.99 * self._staged[key]
    commit(self, before)


def has_map(name: str) -> Any:
    return lambda drawn: any(one["map"] == name for one in drawn["layers"])


def steps(drawn: dict[str, Any]) -> bool:
    return any(happens["do"] == "step" for happens in drawn["events"])


SABOTEURS: dict[str, tuple[tuple[Any, str, Any], Any]] = {
    "a map gives no frames": (around(Cayley, "forward", lambda f, self, *c: 1.01 * f(self, *c)), has_map("cayley")),
    "a gradient is 1 % too long": (
        around(Cayley, "forward", lambda f, self, *c: f(self, *map(Longer.apply, c))),
        has_map("cayley"),
    ),
    "a gradient is missing": (around(Cayley, "forward", lambda f, self, *c: f(self, *c).detach()), has_map("cayley")),
    "a base is not saved": (around(Rebased, "_save_to_state_dict", saves_no_chart), has_map("rebased")),
    "a cast loses digits": (around(CoordinateList, "_apply", loses_digits), lambda drawn: True),
    "a copy is the original": (
        (CoordinateList, "__deepcopy__", lambda self, memo: self),
        lambda drawn: any(happens["do"] == "copied" for happens in drawn["events"]),
    ),
    "steps of coordinates are 1 % short": (
        around(sk.optim.RMSprop, "step", steps_short),
        lambda drawn: steps(drawn) and drawn["optimizer"]["mixed"] and drawn["optimizer"]["free"][0] == "rmsprop",
    ),
    "momentum loses 1 %": (
        around(Bucket, "_commit", forgets),
        lambda drawn: steps(drawn) and has_map("stiefel")(drawn),
    ),
}


def lives(holds: Any, most: int) -> Any:
    """The first lives drawn of which something holds, without what takes seconds."""
    drawn = map(draw, range(seeds.seed(0), seeds.seed(0) + 10**4))
    for one in itertools.islice(filter(holds, drawn), most):
        yield {**one, "events": [happens for happens in one["events"] if happens["do"] not in SLOW]}


@pytest.mark.parametrize("what", SABOTEURS)
def test_a_fault_is_caught_within_ten_lives(monkeypatch, what):
    planted, holds = SABOTEURS[what]
    monkeypatch.setattr(*planted, raising=False)
    assert any(carry_out(one).failure is not None for one in lives(holds, 10))


@pytest.mark.parametrize("name", [name for name, cls in sk.optim.available().items() if hasattr(cls, "moves_frames")])
def test_each_optimizer_steps_by_its_formula_and_one_that_is_1_percent_short_is_caught(monkeypatch, name):
    cls: Any = sk.optim.available()[name]
    for options, metric in zip(cls.examples, itertools.cycle(("canonical", "euclidean"))):
        shapes = [((5, 3), False), ((3, 6), False), ((4, 4), True)]
        drawn = case([layer(sizes=s, name="stiefel", complex=c) for s, c in shapes], happening("step", k=3))
        drawn["optimizer"] |= {"frames": [name, dict(options)], "metric": metric, "lr": 0.05}
        assert carry_out(drawn).failure is None
        with monkeypatch.context() as planted:
            planted.setattr(*around(cls, "step", steps_short))
            assert "a step of shape" in str(carry_out(drawn).failure)
