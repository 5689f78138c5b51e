"""Carrying a case out, and the smallest form of one that fails."""

import copy
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fuzz.events import EVENTS
from benchmarks.fuzz.world import Ended, Finding, World, require
from stiefelkit.errors import StiefelkitError
from stiefelkit.testing.optimizer_cases import equal

TORCHS = (RuntimeError, TypeError, ValueError, NotImplementedError)


@dataclass
class Outcome:
    """What became of a case: what went wrong, in a line, and where; how often what was drawn, done and refused."""

    failure: str | None = None
    trace: str = ""
    counts: dict[str, Counter[str]] = field(
        default_factory=lambda: {kind: Counter() for kind in ("events", "maps", "optimizers", "checks", "refusals")}
    )


def carry_out(case: dict[str, Any]) -> Outcome:
    """Lives the life of a case, and checks everything after every event."""
    outcome, doing = Outcome(), "the start"
    counts, case = outcome.counts, copy.deepcopy(case)
    counts["maps"].update(layer["map"] for layer in case["layers"])
    plan = case["optimizer"]
    counts["optimizers"].update([plan["frames"][0], *[plan["free"][0]] * plan["mixed"]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message="Casting complex values")
        try:
            world = World(case)
            counts["checks"] = world.checks
            counts["refusals"].update(map(_sentence, world.refused))
            world.check({}, "any")
            for n, drawn in enumerate(case["events"]):
                doing = f"event {n}, {drawn['do']}"
                _happen(world, drawn, counts)
        except Ended:
            counts["refusals"]["(a plain parameter has overflowed, as torch lets it)"] += 1
        except Exception as error:
            kind = "" if isinstance(error, Finding) else f"{type(error).__name__}: "
            outcome.failure = f"{doing}: {kind}{str(error).strip()}"
            outcome.trace = traceback.format_exc()
    return outcome


def _happen(world: World, drawn: dict[str, Any], counts: dict[str, Counter[str]]) -> None:
    kind = EVENTS[drawn["do"]]
    counts["events"][drawn["do"]] += 1
    weights, bits = {key: w.detach().clone() for key, w in world.net.weights().items()}, world.bits()
    try:
        world.generator.manual_seed(drawn["seed"])
        expectation = kind.act(world, **{key: drawn[key] for key in kind.options})
    except (StiefelkitError, *TORCHS) as error:
        said = [part for part in kind.may_refuse if part in str(error)]
        if not said or (not isinstance(error, StiefelkitError) and said == ["needs"]):
            raise
        counts["refusals"][_sentence(f"{drawn['do']}: {error}")] += 1
        expectation = "any" if drawn["do"] == "step" else "same"  # the first of some steps may have been made
        now = world.bits()
        changed = [key for key in bits.keys() | now.keys() if not equal(bits.get(key), now.get(key))]
        require(not changed or expectation == "any", f"a refused event has changed {', '.join(sorted(changed))}")
    world.check(weights, expectation)


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
    improved = wanted != ""  # or it does not fail twice, as what depends on memory that nothing has filled
    while improved and budget > 0:
        improved = False
        for smaller in _smaller(case):
            budget -= 1
            if _shape(carry_out(smaller).failure) == wanted:
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
            yield {**case, "events": events[: max(0, start - size + 1)] + events[start + 1 :]}
    if case["tied"]:
        yield {**case, "tied": False}
        yield {**case, "layers": [layers[0], layers[-1]]}
    for i in range(len(layers)) if len(layers) > 1 and not case["tied"] else ():
        yield {**case, "layers": layers[:i] + layers[i + 1 :]}
    for layer in layers:
        less = [{"options": {k: v for k, v in layer["options"].items() if k != key}} for key in layer["options"]]
        plain = {"bias": False, "through_model": False, "complex": False, "kind": "linear"}
        less += [{key: value} for key, value in plain.items() if layer[key] != value and not case["tied"]]
        for change in less:
            yield {**case, "layers": [{**one, **change} if one["seed"] == layer["seed"] else one for one in layers]}
    for key, value in {"free": ["sgd", {}], "frames": [case["optimizer"]["frames"][0], {}]}.items():
        if case["optimizer"][key] != value:
            yield {**case, "optimizer": {**case["optimizer"], key: value}}
    for i, drawn in enumerate(events):
        if drawn.get("k", 1) > 1:
            yield {**case, "events": [*events[:i], {**drawn, "k": 1}, *events[i + 1 :]]}
    if case["precision"] != "float32":
        yield {**case, "precision": "float32"}
