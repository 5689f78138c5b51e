"""Carrying a case out, and the smallest form of one that fails."""

import copy
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.fuzz.events import EVENTS
from benchmarks.fuzz.world import Ended, Finding, World, equal, require
from stiefelkit.errors import StiefelkitError

TORCHS = (RuntimeError, TypeError, ValueError, NotImplementedError)


@dataclass
class Outcome:
    """What became of a case.

    Attributes:
        failure: what went wrong, in one line, or None.
        trace: where.
        events: how often each has been done.
        refusals: how often each sentence was said, without its figures.
    """

    failure: str | None = None
    trace: str = ""
    events: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)


def carry_out(case: dict[str, Any]) -> Outcome:
    """Lives the life of a case, and checks everything after every event."""
    outcome, doing = Outcome(), "the start"
    case = copy.deepcopy(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="Casting complex values")
        try:
            world = World(case)
            outcome.refusals.update(map(_sentence, world.refused))
            world.check({}, "any")
            for n, drawn in enumerate(case["events"]):
                doing = f"event {n}, {drawn['do']}"
                _happen(world, drawn, outcome)
        except Ended:
            outcome.refusals["(a plain parameter has overflowed, as torch lets it)"] += 1
        except Exception as error:
            kind = "" if isinstance(error, Finding) else f"{type(error).__name__}: "
            outcome.failure = f"{doing}: {kind}{str(error).strip()}"
            outcome.trace = traceback.format_exc()
    return outcome


def _happen(world: World, drawn: dict[str, Any], outcome: Outcome) -> None:
    kind = EVENTS[drawn["do"]]
    outcome.events[drawn["do"]] += 1
    weights, bits = world.weights(), world.bits()
    try:
        world.generator.manual_seed(drawn["seed"])
        expectation = kind.act(world, **{key: drawn[key] for key in kind.options})
    except (StiefelkitError, *TORCHS) as error:
        if not any(part in str(error) for part in kind.may_refuse) or _is_raw(error, kind):
            raise
        outcome.refusals[_sentence(f"{drawn['do']}: {error}")] += 1
        _unchanged(bits, world.bits())
        expectation = "same"
    world.check(weights, expectation)


def _is_raw(error: Exception, kind: Any) -> bool:
    return not isinstance(error, StiefelkitError) and not any(
        part in str(error) for part in kind.may_refuse if part != "needs"
    )


def _unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    require(before["tensors"].keys() == after["tensors"].keys(), "a refused event leaves other tensors behind")
    for key, t in before["tensors"].items():
        require(equal(t, after["tensors"][key]), f"a refused event has written to {key}")
    for key in ("trains", "modes", "classes"):
        require(before[key] == after[key], f"a refused event has changed {key}")
    require(_same(before["state"], after["state"]), "a refused event has changed the optimizer")


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and equal(a, b)
    if isinstance(a, dict):
        a, b = ({key: v for key, v in t.items() if not _is_nothing(v)} for t in (a, b))
        return a.keys() == b.keys() and all(_same(v, b[key]) for key, v in a.items())
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def _is_nothing(value: Any) -> bool:
    """Whether a state is that before the first step: moments of zero."""
    if isinstance(value, dict):
        return all(map(_is_nothing, value.values()))
    return isinstance(value, torch.Tensor) and not bool(value.any())


def _sentence(text: str) -> str:
    """A refusal without its figures, so that those of one kind are counted together."""
    return "".join("#" if c.isdigit() else c for c in text.splitlines()[0])[:70]


def shrink(case: dict[str, Any], budget: int = 60) -> dict[str, Any]:
    """Returns the smallest case found that fails as this one does, by leaving out events, layers and options.

    Args:
        case: one that fails.
        budget: how many cases are tried at most.
    """
    wanted = _shape(carry_out(case).failure)
    improved = True
    while improved and budget > 0:
        improved = False
        for smaller in _smaller(case):
            budget -= 1
            failure = carry_out(smaller).failure
            if failure is not None and _shape(failure) == wanted:
                case, improved = smaller, True
                break
            if budget <= 0:
                break
    return case


def _shape(failure: str | None) -> str:
    """What a failure is, without its figures and its place."""
    text = (failure or "").partition(": ")[2]
    return "".join(c for c in text.splitlines()[0] if not c.isdigit())[:40] if text else ""


def _smaller(case: dict[str, Any]) -> Any:
    """Cases with one thing less, large pieces first."""
    events, layers = case["events"], case["layers"]
    for size in sorted({len(events) // 2, 1} - {0}, reverse=True):
        for start in range(len(events) - 1, -1, -size):
            left = events[: max(0, start - size + 1)] + events[start + 1 :]
            yield {**case, "events": left}
    if case["tied"]:
        yield {**case, "tied": False}
        yield {**case, "layers": [layers[0], layers[-1]]}
    elif len(layers) > 1:
        for i in range(len(layers)):
            yield {**case, "layers": layers[:i] + layers[i + 1 :]}
    for i, layer in enumerate(layers):
        for key in layer["options"]:
            options = {k: v for k, v in layer["options"].items() if k != key}
            changed = [{**one, "options": options} if one["seed"] == layer["seed"] else one for one in layers]
            yield {**case, "layers": changed}
        for key, value in (("bias", False), ("through_model", False), ("complex", False), ("kind", "linear")):
            if layer[key] != value and not case["tied"]:
                yield {**case, "layers": [*layers[:i], {**layer, key: value}, *layers[i + 1 :]]}
    plain = {"free": ["sgd", {}], "frames": [case["optimizer"]["frames"][0], {}]}
    for key, value in plain.items():
        if case["optimizer"][key] != value:
            yield {**case, "optimizer": {**case["optimizer"], key: value}}
    for i, drawn in enumerate(events):
        if drawn.get("k", 1) > 1:
            yield {**case, "events": [*events[:i], {**drawn, "k": 1}, *events[i + 1 :]]}
    if case["precision"] != "float32":
        yield {**case, "precision": "float32"}
