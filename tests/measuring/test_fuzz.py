"""Random lives of models end without a silent error; what is wrong is caught, and made small."""

import json
from typing import Any

import pytest

from benchmarks.fuzz import events
from benchmarks.fuzz.events import EVENTS, Event
from benchmarks.fuzz.plan import draw
from benchmarks.fuzz.run import carry_out, shrink
from stiefelkit.parametrizations import Cayley
from stiefelkit.testing import seeds

SLOW = {"traced"}
"""Kinds of events that take seconds."""


def layer(kind: str = "linear", sizes: Any = (4, 4), name: str = "cayley", **options: Any) -> dict[str, Any]:
    drawn = {"through_model": False, "complex": options.pop("complex", False), "bias": True, "seed": 1}
    return {"kind": kind, "sizes": list(sizes), "map": name, "options": options, **drawn}


def case(layers: Any, *happens: Any, tied: bool = False, precision: str = "float32") -> dict[str, Any]:
    optimizer = {"free": ["sgd", {}], "frames": ["cayley_sgd", {}], "metric": "canonical", "mixed": True, "lr": 0.01}
    lives = [{"seed": 7 + i, **happening} for i, happening in enumerate(happens)]
    rates = ["StepLR", {"step_size": 2}]
    return {
        "seed": 3,
        "tied": tied,
        "precision": precision,
        "layers": layers,
        "optimizer": optimizer,
        "scheduler": rates,
        "events": lives,
    }


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
    "tied weights are made on the meta device": case(PAIR, happening("loaded", how="meta_assign"), tied=True),
}


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_once_stays_mended(what):
    assert carry_out(FOUND[what]).failure is None


@pytest.mark.parametrize("number", range(24))
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
        happening("grouped"),
        {"do": "spoil"},
        happening("step"),
        happening("pickled"),
    )
    assert "has changed by" in str(carry_out(long).failure)
    small = shrink(long)
    assert [happens["do"] for happens in small["events"]] == ["spoil"]
    assert len(small["layers"]) == 1
    assert small["layers"][0]["options"] == {}


def test_a_map_that_gives_no_frames_is_caught(monkeypatch):
    forward = Cayley.forward
    monkeypatch.setattr(Cayley, "forward", lambda self, *coordinates: 1.01 * forward(self, *coordinates))
    assert "promised" in str(carry_out(case([layer()])).failure)


def test_a_refusal_that_leaves_something_written_is_caught(monkeypatch):
    def half(world: Any) -> str:
        from stiefelkit.errors import OptionError

        next(world.net.parameters()).data.add_(1.0)
        raise OptionError("half needs more, got less.")

    monkeypatch.setitem(events.EVENTS, "half", Event(half, 1.0, ("half needs",), {}))
    assert "a refused event has written to" in str(carry_out(case([layer()], {"do": "half"})).failure)
