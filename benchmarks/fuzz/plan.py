"""Cases as plain data, each drawn from one number."""

import random
from typing import Any

import stiefelkit as sk
from benchmarks.fuzz.events import EVENTS
from benchmarks.fuzz.layers import KINDS

Case = dict[str, Any]

PRECISIONS = {"float32": 4, "float64": 3, "bfloat16": 1, "float16": 1}
COMPLEX = [name for name, kind in KINDS.items() if kind.is_complex]
VIEWS = ("out_by_rest", "in_by_rest", "per_tap")
FREE = {
    "sgd": ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"maximize": True}),
    "adam": ({}, {"amsgrad": True}, {"foreach": False}, {"fused": True}),
    "adamw": ({"weight_decay": 0.0}, {"weight_decay": 0.1}),
    "adagrad": ({},),
    "rmsprop": ({}, {"momentum": 0.5}),
}
SCHEDULERS = {
    "StepLR": {"step_size": 2},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "OneCycleLR": {"max_lr": 0.05, "total_steps": 99},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.05, "step_size_up": 2, "cycle_momentum": False},
    "LinearLR": {},
    "ReduceLROnPlateau": {"patience": 0},
}
WHOLE = ("block_diagonal", "fourier", "hadamard")
"""Maps of weights without blocks."""


def draw(seed: int) -> Case:
    """Draws a case from one number: layers, optimizer, scheduler, events."""
    rng = random.Random(seed)
    frames = [name for name, cls in sk.optim.available().items() if getattr(cls, "moves_frames", False)]
    free, of_frames, scheduler = rng.choice(sorted(FREE)), rng.choice(frames), rng.choice(sorted(SCHEDULERS))
    options: Any = rng.choice(sk.optim.available()[of_frames].examples)  # type: ignore[attr-defined]
    layers = [_layer(rng) for _ in range(rng.choice((1, 1, 2, 2, 3, 4)))]
    precision = rng.choices(list(PRECISIONS), list(PRECISIONS.values()))[0]
    if precision == "float16" and any(layer["complex"] and layer["kind"].startswith("own_") for layer in layers):
        precision = "float32"
    if is_tied := rng.random() < 0.1:
        first = _layer(rng, "embedding")
        layers = [first, *layers, {**first, "kind": "linear", "sizes": first["sizes"][::-1]}]
    return {
        "seed": seed,
        "tied": is_tied,
        "precision": precision,
        "layers": layers,
        "optimizer": {
            "free": [free, rng.choice(FREE[free])],
            "frames": [of_frames, {key: list(v) if isinstance(v, tuple) else v for key, v in options.items()}],
            "metric": rng.choice(("canonical", "euclidean")),
            "mixed": rng.random() < 0.5,
            "lr": rng.choice((1e-3, 0.01, 0.1)),
        },
        "scheduler": [scheduler, SCHEDULERS[scheduler]],
        "events": [_event(rng) for _ in range(rng.randint(2, 9))],
    }


def _event(rng: random.Random) -> dict[str, Any]:
    name = rng.choices(list(EVENTS), [event.weight for event in EVENTS.values()])[0]
    drawn = {key: rng.choice(values) for key, values in EVENTS[name].options.items()}
    return {"do": name, "seed": rng.randrange(10**6), **drawn}


def _layer(rng: random.Random, only: str | None = None) -> dict[str, Any]:
    kind, maps = only or rng.choice(list(KINDS)), sk.available()
    name = rng.choice([name for name in sorted(maps) if only is None or name != "fourier"])
    complex_ = only is None and (name == "fourier" or rng.random() < 0.3)
    kind = rng.choice(COMPLEX) if complex_ and kind not in COMPLEX else kind
    a, b = (rng.randint(1, 7) for _ in range(2))
    examples = [(shape[-2:], given) for shape, given in maps[name].examples() if max(shape) < 10]
    shape, options = rng.choice(examples)
    a, b = rng.sample(shape, 2) if options else (a, b)
    options: dict[str, Any] = dict(options)
    a = 4 if name == "hadamard" and a > 2 else a
    b = a if name in ("fourier", "hadamard") or (not options and rng.random() < 0.4) else b
    blocks: Any = KINDS[kind].blocks
    view, dim = None, None
    if kind.startswith(("conv", "transposed")):
        view = rng.choice(VIEWS) if rng.random() < 0.7 else f"group_{rng.choice(VIEWS)}"
    elif kind in ("linear", "own_linear", "bare") and name not in WHOLE and rng.random() < 0.2:
        blocks, dim = rng.choice((2, 3, [1, 2], [2, 1, 1])), rng.choice((0, 1))
        size = blocks * rng.randint(1, 3) if isinstance(blocks, int) else sum(blocks)
        a, b = (a, size) if dim == 0 else (size, b)
    layer: dict[str, Any] = {
        "kind": kind,
        "sizes": [a, b],
        "complex": complex_,
        "bias": rng.random() < 0.7,
        "map": name,
        "options": options,
        "seed": rng.randrange(10**6),
        "through_model": rng.random() < 0.3,
        "groups": rng.choice((2, 3)) if view and view.startswith("group_") else 1,
        "activation": rng.choice(("identity", "modrelu") if complex_ else ("tanh", "modrelu", "identity")),
    }
    if not kind.startswith("own_") and rng.random() < 0.4:
        options["init"] = rng.choice(("haar", "identity", "project"))
    if kind not in ("own_rnn", "own_cell"):
        given = {"view": view, "blocks": blocks, "dim": dim}
        options |= {key: value for key, value in given.items() if value is not None}
        options |= {} if rng.random() < 0.7 else {"gain": rng.choice((0.5, 2.0, "learned"))}
    if "precision" not in options and rng.random() < 0.2 and "fast" in maps[name].precisions:
        options["precision"] = "fast"
    return layer
