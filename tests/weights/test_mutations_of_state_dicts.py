"""Spoilt state dicts: none loads silently, none ends in a traceback, none leaves a model half written.

STIEFELKIT_MUTATIONS=2000 pytest tests/weights/test_mutations_of_state_dicts.py -s   # prints the tally
"""

import collections
import contextlib
import copy
import json
import os
import random
from typing import Any

import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit.errors import StiefelkitError
from stiefelkit.metrics import frame_tolerance, orthogonality_error
from stiefelkit.testing.seeds import reseed, seed
from stiefelkit.weights.find import orthogonal_weights

COUNT = int(os.environ.get("STIEFELKIT_MUTATIONS", "120"))


def make() -> nn.Module:
    """Maps of every kind of coordinate and chart, between plain layers."""
    complex_ = torch.complex64
    return nn.Sequential(
        nn.Linear(3, 4),
        sk.orthogonal(nn.Linear(4, 4), "weight", "cayley", negative=1),
        sk.orthogonal(nn.Linear(4, 4, dtype=complex_), "weight", "cayley"),
        nn.BatchNorm1d(4),
        sk.orthogonal(nn.Conv1d(2, 5, 3), "weight", "householder", view="out_by_rest"),
        sk.orthogonal(nn.Linear(5, 5), "weight", "givens"),
        sk.orthogonal(nn.Linear(3, 6), "weight", "matrix_exp"),
        sk.orthogonal(nn.Linear(3, 6, dtype=complex_), "weight", "matrix_exp"),
        sk.orthogonal(nn.Linear(4, 4, dtype=complex_), "weight", "fourier"),
        sk.orthogonal(nn.Linear(6, 3), "weight", "stiefel"),
        sk.orthogonal(nn.Linear(4, 4), "weight", "margin", margin=0.05, v="householder"),
        sk.orthogonal(nn.Linear(4, 4), "weight", "rebased", inner="cayley"),
        sk.orthogonal(nn.Linear(4, 4, dtype=torch.complex128), "weight", "rebased"),
        nn.ModuleDict({"rnn": sk.nn.OrthogonalRNN(2, 4, field="complex"), "out": nn.Linear(4, 2)}),
    )


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def one_of(draw: random.Random, state: dict[str, Any], ours: bool = True) -> str:
    keys = sorted(key for key in state if isinstance(key, str) and ("parametrizations" in key) == ours)
    return draw.choice(keys or sorted(map(str, state)))


def deep(depth: int) -> bytes:
    return b'{"map": ' + b"[" * depth + b"]" * depth + b"}"


def as_bytes(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


def scaled(value: torch.Tensor, factor: float) -> torch.Tensor:
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return value.to(wide.get(value.dtype, value.dtype)) * factor


def with_entry(value: torch.Tensor, entry: float) -> torch.Tensor:
    if value.dtype in (torch.uint8, torch.bool) or not value.numel():
        return value
    inexact = value.is_floating_point() or value.is_complex()
    value = value.clone() if inexact else value.double()
    value.view(-1)[-1] = entry
    return value


VALUES: dict[str, Any] = {
    "another dtype": lambda d, v: v.to(
        d.choice([torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.float64, torch.complex64])
    ),
    "float64": lambda d, v: v.to(torch.complex128 if v.is_complex() else torch.float64),
    "bool": lambda d, v: v != 0,
    "one row more": lambda d, v: torch.cat([v, v]) if v.dim() else v.expand(2),
    "flattened": lambda d, v: v.reshape(1, -1),
    "a scalar": lambda d, v: torch.zeros((), dtype=v.dtype),
    "empty": lambda d, v: v.new_empty(0),
    "NaN": lambda d, v: with_entry(v, float("nan")),
    "infinity": lambda d, v: with_entry(v, float("-inf")),
    "huge": lambda d, v: scaled(v, d.choice([1e4, 1e8, 1e16, 1e30, 1e38, 1e60, 1e160, 1e300])),
    "one huge": lambda d, v: with_entry(scaled(v, 1.0), d.choice([1e6, 1e12, 1e30, 3e38, 1e200, 1e300])),
    "tiny": lambda d, v: scaled(v, d.choice([1e-8, 1e-20, 1e-44, 1e-160, 1e-320])),
    "zero": lambda d, v: torch.zeros_like(v),
    "negated": lambda d, v: -v.to(torch.int16) if v.dtype == torch.uint8 else -v,
    "a little off": lambda d, v: scaled(v, 1 + 10 ** d.uniform(-9, -1)),
    "reversed": lambda d, v: v.flip(0) if v.dim() else v,
    "not contiguous": lambda d, v: torch.stack([v, v], -1)[..., 0],
    "complex": lambda d, v: torch.complex(v.real.double(), v.real.double() * 0 + 1) if v.is_complex() else v + 0j,
    "conjugated": lambda d, v: v.conj() if v.is_complex() else v,
    "sparse": lambda d, v: v.to_sparse(),
    "on meta": lambda d, v: v.to("meta"),
    "requires grad": lambda d, v: v.clone().requires_grad_() if v.is_floating_point() or v.is_complex() else v,
    "quantized": lambda d, v: torch.quantize_per_tensor(v.real.float(), 0.1, 0, torch.qint8),
    "nested": lambda d, v: torch.nested.nested_tensor([v, v]),
    "uninitialized": lambda d, v: nn.UninitializedParameter(),
    "a string": lambda d, v: "weights",
    "None": lambda d, v: None,
    "a list": lambda d, v: v.tolist(),
    "an array": lambda d, v: v.detach().numpy(),
    "a number": lambda d, v: 1.0,
    "a dictionary": lambda d, v: {"value": v},
}

BYTES: dict[str, Any] = {
    "a bit flipped": lambda d, b: bytes(x ^ (1 << d.randrange(8)) if i == d.at else x for i, x in enumerate(b)),
    "cut short": lambda d, b: b[: d.randrange(len(b))],
    "doubled": lambda d, b: b + b,
    "no JSON": lambda d, b: bytes(d.randrange(256) for _ in range(40)),
    "deep": lambda d, b: deep(d.choice([50, 900, 5000, 100000])),
    "long": lambda d, b: b + b" " * (1 << 21),
    "a list": lambda d, b: json.dumps([[key, value] for key, value in json.loads(b).items()]).encode(),
    "a number": lambda d, b: b"7",
    "null": lambda d, b: b"null",
}

FIELDS: dict[str, list[Any]] = {
    "format": [True, 1.0, "1", None, 2, [], -1, 10**5000],
    "field": ["complex", "quaternion", 3, None, {}],
    "shape": [[4], [4, 4, 1], "44", None, [4.0, 4.0], [True, 4], {}, [10**30, 4]],
    "options": [[], None, {"reflections": 2}, {"margin": float("nan")}, "none", {"a": {"b": []}}],
    "coordinates": [["other"], [], None, "skew", {"skew": 1}, [["skew"]]],
    "map": [None, "cayley", [], {"class": 3}, {"name": "cayley", "version": True, "inner": 5}, {"inner": {"a": 1}}],
}
INSIDE: dict[str, list[Any]] = {
    "version": [True, 1.0, "1", 2, None, [1]],
    "inner": [5, None, {}, [[]], ["cayley"], [{"class": "x", "inner": [{"class": 4}]}], "ab", 0.5],
    "name": [None, 3, ["cayley"], "stiefel", ""],
    "class": [None, 3, {}, "elsewhere:Other"],
}


def spoil(draw: Any, state: dict[Any, Any]) -> tuple[str, bool]:
    """Changes a state dict in place; returns what was done, and whether tensors of plain layers were touched."""
    kind = draw.choice(["value", "value", "value", "plain value", "bytes", "field", "inside", "key"])
    if kind in ("value", "plain value"):
        ours = kind == "value"
        key = one_of(draw, state, ours)
        # torch itself does not get past these two in a plain layer.
        name = draw.choice(sorted(VALUES if ours else VALUES.keys() - {"nested", "uninitialized"}))
        try:
            state[key] = VALUES[name](draw, state[key])
        except (RuntimeError, TypeError, AttributeError, NotImplementedError):
            state[key] = name  # this change cannot be made of such an entry
        return f"{name}{'' if ours else ' in a plain layer'}", not ours
    extra = draw.choice(sorted(key for key in state if isinstance(key, str) and key.endswith("_extra_state")) or [None])
    if extra is None or not isinstance(state[extra], torch.Tensor) or state[extra].dtype != torch.uint8:
        return "nothing", False
    try:
        written = bytes(state[extra].flatten().tolist())
        described = json.loads(written)
        described["map"]["inner"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "nothing", False
    if kind == "bytes":
        draw.at = draw.randrange(len(written))
        name = draw.choice(sorted(BYTES))
        state[extra] = as_bytes(BYTES[name](draw, written))
        return f"{name} for a description", False
    if kind in ("field", "inside"):
        table, place = (FIELDS, described) if kind == "field" else (INSIDE, described["map"])
        name = draw.choice(sorted(table))
        if draw.random() < 0.2:
            del place[name]
        else:
            place[name] = draw.choice(table[name])
        text = json.dumps(described) if described.get("format") != 10**5000 else '{"format": ' + "1" * 5000 + "}"
        state[extra] = as_bytes(text.encode())
        return f"{name} of a description", False
    return spoil_keys(draw, state)


def spoil_keys(draw: Any, state: dict[Any, Any]) -> tuple[str, bool]:
    key, name = (
        one_of(draw, state),
        draw.choice(["drop", "rename", "swap", "plain", "plain drop", "no string", "alien"]),
    )
    if name == "drop":
        del state[key]
    elif name == "rename":
        state[key + "x"] = state.pop(key)
    elif name == "swap":
        other = one_of(draw, state)
        state[key], state[other] = state[other], state[key]
    elif name == "plain":
        host, _, rest = key.partition("parametrizations.")
        state[host + rest.partition(".")[0]] = torch.eye(4)
    elif name == "plain drop":
        del state[one_of(draw, state, ours=False)]
    elif name == "no string":
        state[draw.choice([3, None, ("a", "b"), b"weight"])] = torch.zeros(1)
    else:
        state[key.rpartition(".")[0] + ".stranger"] = torch.zeros(2)
    return f"keys: {name}", name in ("plain drop", "alien", "rename", "drop")


def require_sound(model: nn.Module, what: str) -> None:
    """Every orthogonal weight is finite and a frame, or as near to one as its map promises."""
    for name, coordinate_list in ((weight.qualified, weight.coordinate_list) for weight in orthogonal_weights(model)):
        w = coordinate_list.param(*coordinate_list.gathered()).detach()
        frames: Any = coordinate_list.param.frames(w)
        bound = max(
            coordinate_list.param.error_bound(*coordinate_list.gathered()),
            frame_tolerance(frames.shape[-1], frames.dtype),
        )
        assert torch.isfinite(w).all(), f"{what}: {name} is not finite"
        assert orthogonality_error(frames).max().item() <= bound, f"{what}: {name} is no frame"


def require_said(model: nn.Module, state: dict[Any, Any], what: str) -> None:
    """Every entry holds what the state dict says; a frame that was cast up is polished."""
    for key, value in model.state_dict().items():
        if key.endswith(("_extra_state", "num_batches_tracked")):
            continue
        said = state[key].detach().to(value.dtype)
        close = torch.allclose(value, said, rtol=1e-5, atol=1e-5, equal_nan=True)
        assert close, f"{what}: {key} is not what the state dict says"


def require_kept_or_said(model: nn.Module, before: dict[str, torch.Tensor], state: dict[Any, Any], what: str) -> None:
    """What torch itself refuses may leave plain layers half written, but each orthogonal weight all old or all new."""
    now = model.state_dict()
    for name, own in ((weight.qualified, weight.name) for weight in orthogonal_weights(model)):
        inside = f"{name.removesuffix(own)}parametrizations.{own}."
        keys = [key for key in now if key.startswith(inside) and not key.endswith("_extra_state")]
        old = all(torch.equal(now[key], before[key]) for key in keys)
        new = all(
            isinstance(state.get(key), torch.Tensor)
            and state[key].shape == now[key].shape
            and torch.allclose(now[key], state[key].detach().to(now[key].dtype), rtol=1e-5, atol=1e-5, equal_nan=True)
            for key in keys
        )
        assert old or new, f"{what}: {name} is half written"


def attempt(
    number: int, model: nn.Module, before: dict[str, Any], donor: dict[str, Any], tally: collections.Counter
) -> None:
    """Spoils a state dict, loads it, and requires one of the permitted outcomes; the model is as before afterwards."""
    draw: Any = random.Random(seed(number))
    state: dict[Any, Any] = {key: value.clone() for key, value in donor.items()}
    done = [spoil(draw, state) for _ in range(draw.choice([1, 1, 1, 2]))]
    assign, strict = draw.random() < 0.25, draw.random() < 0.75
    what = f"mutation {number} ({', '.join(name for name, _ in done)}; assign={assign}, strict={strict})"
    given = dict(state)
    target = copy.deepcopy(model) if assign else model
    try:
        target.load_state_dict(given, strict=strict, assign=assign)
    except StiefelkitError as error:
        text = str(error)
        assert "\n" not in text, f"{what}: {text}"
        assert len(text) < 2000, f"{what}: {text}"
        assert text.endswith("."), f"{what}: {text}"
        for key, value in [*target.named_parameters(), *target.named_buffers()]:
            assert torch.equal(value, before[key]), f"{what}: refused, and {key} written"
        outcome = "refused"
    except RuntimeError as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise AssertionError(f"{what}: {error!r}") from error
        require_kept_or_said(target, before, state, what)
        outcome = "refused by torch"
    else:
        if any(value.is_meta for value in target.state_dict().values()):
            with pytest.raises(sk.errors.UnfilledError):
                require_sound(target, what)
            outcome = "loaded without values, and says so when read"
        else:
            require_sound(target, what)
            if strict:
                require_said(target, state, what)
            outcome = "loaded, and is what the state dict says"
    for name, _ in done:
        tally[name, outcome] += 1
    tally["all", outcome] += 1
    if outcome != "refused":
        model.load_state_dict(before)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_no_mutation_is_silent_raw_or_half_written(capsys):
    reseed(1)
    model, donor = make(), tensors(make())
    before = tensors(model)
    tally: collections.Counter = collections.Counter()
    for number in range(COUNT):
        attempt(number, model, before, donor, tally)
    assert tally["all", "refused"] > COUNT // 3
    assert tally["all", "loaded, and is what the state dict says"] > 0
    with capsys.disabled() if "STIEFELKIT_MUTATIONS" in os.environ else contextlib.nullcontext():
        for (name, outcome), times in sorted(tally.items()):
            print(f"{name:40} {outcome:48} {times:5}")
