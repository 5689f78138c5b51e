"""A number is what it says, whatever its kind: options of every member are Python's numbers once they are in."""

import contextlib
import dataclasses
import inspect
import io
import json
import math
import typing
from collections.abc import Callable, Iterator
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import stiefelkit as sk
from stiefelkit import errors, models
from stiefelkit.contract.table import option_names, registered
from stiefelkit.functional import msign, spectral_direction
from stiefelkit.measuring.plans import (
    DriftPlan,
    GrowthPlan,
    OptimizerRace,
    ParametrizationRace,
    ReportPlan,
    ScanCase,
    ScanRace,
)
from stiefelkit.numbers import Check, above, as_python_number, at_least, integer, one_of, optional, sizes
from stiefelkit.optim import minimizers, optimizers
from stiefelkit.testing import seeds
from stiefelkit.training.config import Config
from stiefelkit.training.figure import Figures
from stiefelkit.training.papers import Reproduction
from stiefelkit.training.tasks import tasks


class Index:
    """A count that is no number, as Python's own protocol has it."""

    def __init__(self, value: int):
        self.value = value

    def __index__(self) -> int:
        return self.value


class Measured:
    """The same of a float."""

    def __init__(self, value: float):
        self.value = value

    def __float__(self) -> float:
        return self.value


MAKERS: dict[str, tuple[Callable[[int], Any], Callable[[float], Any]]] = {
    "numpy": (np.int64, np.float64),
    "narrow": (lambda k: np.int16(k) if abs(k) < 2**15 else np.int32(k), np.float32),
    "array": (np.array, np.array),
    "tensor": (torch.tensor, torch.tensor),
    "protocol": (Index, Measured),
    "fraction": (int, Fraction),
    "decimal": (int, Decimal),
    "long": (np.uint64, np.longdouble),
}
"""Kind to what makes one of it of an int and of a float."""
PYTHONS = {int, float, bool, str, type(None)}
KIND = pytest.mark.parametrize("kind", MAKERS)


def of_kind(value: Any, kind: str) -> Any:
    """A number, or each of a tuple, a list or a dictionary, as one of another kind where that can hold it."""
    if isinstance(value, list | tuple):
        return type(value)(of_kind(item, kind) for item in value)
    if isinstance(value, dict):
        return {key: of_kind(item, kind) for key, item in value.items()}
    of_int, of_float = MAKERS[kind]
    if isinstance(value, bool):
        return {"numpy": np.bool_, "array": np.array, "tensor": torch.tensor}.get(kind, bool)(value)
    if type(value) is int:
        return of_int(value) if value >= 0 else int(value)
    return of_float(value) if type(value) is float and math.isfinite(value) else value


def as_python(value: Any, kind: str) -> Any:
    """What of_kind gives, rounded as that kind rounds, as Python's own."""
    if isinstance(value, list | tuple):
        return type(value)(as_python(item, kind) for item in value)
    if isinstance(value, dict):
        return {key: as_python(item, kind) for key, item in value.items()}
    return float(of_kind(value, kind)) if type(value) is float else value


def takes_a_number(annotation: Any) -> bool:
    """Whether an option is a number, or may be one, by its annotation."""
    words = annotation.split(" | ") if isinstance(annotation, str) else typing.get_args(annotation) or [annotation]
    return any(word in (int, float, "int", "float") for word in words)


def loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def kinds_in(value: Any) -> Iterator[type]:
    """The types of the leaves."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from kinds_in(item)
    else:
        yield type(value)


@KIND
def test_a_number_of_any_kind_is_the_same_of_python(kind: str) -> None:
    for value in (3, 0.25, (2, 0.5), [1], {"a": (4, None, "b")}):
        assert as_python_number(of_kind(value, kind)) == value
        assert {*kinds_in(as_python_number(of_kind(value, kind)))} <= {int, float, str, type(None)}


@pytest.mark.parametrize(
    "value",
    [True, "3", b"3", None, 1j, [], np.zeros(1), torch.zeros(1), torch.empty((), device="meta"), Decimal("sNaN")],
    ids=repr,
)
def test_what_is_no_number_stays_what_it_is(value: Any) -> None:
    assert type(as_python_number(value)) is type(value)
    for check in (integer(0), at_least(0), above(-1), optional(integer(0))):
        if value is not None or check.words.endswith("integer {key} >= 0"):
            with pytest.raises(errors.OptionError, match=r"^It needs .* got .*"):
                check.require("It", "size", value)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 10**400, Fraction(10**400)])
def test_a_number_that_no_float_holds_is_refused_where_a_finite_one_is_meant(number: Any) -> None:
    for check in (at_least(0), at_least(0, below=1), at_least(0, most=1), above(0), above(0, 9)):
        with pytest.raises(errors.OptionError, match=r"^It needs"):
            check.require("It", "rate", number)


@pytest.mark.parametrize("number", [16.0, np.float64(16), torch.tensor(16.0), Decimal(16), Fraction(16)])
def test_a_float_is_no_count_though_it_be_whole(number: Any) -> None:
    with pytest.raises(errors.OptionError, match=r"^It needs an integer size >= 1, got 16\.0; write 16\.$"):
        integer(1).require("It", "size", number)


def test_a_shape_is_a_tuple_of_integers() -> None:
    for shape in ((2, 3), [2, 3], torch.Size([2, 3]), np.array([2, 3]), torch.tensor([2, 3]), (np.int64(2), Index(3))):
        assert sizes(shape) == (2, 3)
        assert {*map(type, sizes(shape) or ())} == {int}
    for shape in (3, None, "ab", (2.0, 3.0), (True, 2), [[2, 3]]):
        assert sizes(shape) is None


MAPS = registered.names()


def numbers_of(cls: type, examples: list[dict[str, Any]]) -> dict[str, Any]:
    """Name to a value of each option that takes a number."""
    parameters = inspect.signature(cls.__init__).parameters
    named = {key: parameters[key] for key in option_names(cls) if takes_a_number(parameters[key].annotation)}
    given = {key: value for example in examples for key, value in example.items() if key in named}
    return {key: parameter.default for key, parameter in named.items()} | given


@KIND
@pytest.mark.parametrize("name", MAPS)
def test_a_map_has_the_options_and_the_shape_that_any_kind_of_number_says(name: str, kind: str) -> None:
    cls = registered.find(name)
    dtype = torch.complex64 if cls.supports((4, 4), torch.float32) else torch.float32
    examples = cls.examples()
    met = set()
    for shape, options in [*examples, (examples[-1][0], numbers_of(cls, []))]:
        if cls.supports(shape, dtype, **options) is not None:
            continue
        mine = cls(shape, dtype=dtype, **as_python(options, kind))
        other = cls(of_kind(shape, kind), dtype=dtype, **of_kind(options, kind))
        assert json.dumps(other.options()) == json.dumps(mine.options())
        assert (other.shape, other.coordinates) == (mine.shape, mine.coordinates)
        assert {*kinds_in((other.shape, other.options()))} <= {int, float, str, type(None)}
        met |= {key for key, value in options.items() if value is not None}
    assert {*numbers_of(cls, [])} <= met


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("wrong", [True, math.nan, math.inf, -3, "3", [2.5]], ids=repr)
def test_what_is_no_number_for_a_map_is_refused_in_a_sentence(name: str, wrong: Any) -> None:
    cls = registered.find(name)
    for shape, options in cls.examples():
        dtype = torch.complex64 if cls.supports(shape, torch.float32, **options) else torch.float32
        for key in {*numbers_of(cls, [options])} & {*options}:
            with pytest.raises(errors.OptionError, match=rf"^{cls.__name__} needs .*, got .*\.$"):
                cls(shape, dtype=dtype, **{**options, key: wrong})


@KIND
def test_a_weight_made_by_any_kind_of_number_is_saved_as_one_made_by_pythons(kind: str) -> None:
    made = {
        "gain": ({"gain": 0.5}, "householder"),
        "blocks": ({"blocks": 2, "dim": 0, "reflections": 2}, "householder"),
        "sizes": ({"blocks": [2, 6], "dim": 1}, "cayley"),
        "own": ({"blocks": 4, "inner_options": {"bandwidth": 1}}, "block_diagonal"),
        "adapter": ({"margin": 0.25, "v_options": {"reflections": 2}, "v": "householder"}, "margin"),
    }
    for options, name in made.values():
        mine = sk.orthogonal(nn.Linear(8, 8), "weight", name, **options)
        other = sk.orthogonal(nn.Linear(8, 8), "weight", name, **of_kind(options, kind))
        other.load_state_dict(loaded(mine.state_dict()))
        mine.load_state_dict(loaded(other.state_dict()))
        assert torch.equal(mine.weight, other.weight)


OURS = {**{k: v for k, v in optimizers.available().items() if v.__module__.startswith("stiefelkit.")}}
OURS |= minimizers.available()


def settings_of(cls: Any) -> dict[str, Any]:
    """Name to a value, as a default or of an example, of each setting that takes a number, or two."""
    values = {key: p.default for key, p in inspect.signature(cls).parameters.items() if p.default is not p.empty}
    values |= {key: value for example in getattr(cls, "examples", ()) for key, value in example.items()}
    values |= {"tolerance": 1e-3} if "tolerance" in values else {}
    found = {key: value for key, value in values.items() if isinstance(value, int | float | tuple)}
    return {key: value for key, value in found.items() if not isinstance(value, bool) and value != math.inf}


def begun(cls: Any, **settings: Any) -> tuple[Any, Callable[[], Any]]:
    """An optimizer of a frame, if it moves such, and of a plain parameter, with a closure."""
    w, b = nn.Parameter(sk.init.identity((4, 3))), nn.Parameter(torch.ones(3, dtype=torch.float64))
    groups = [*sk.optim.frames(w), {"params": [b]}] if getattr(cls, "moves_frames", False) else [b]
    optimizer = cls(groups, **settings)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (w[0].sum() - 1) ** 2 + (b - 2).square().sum()
        loss.backward()
        return loss

    return optimizer, closure


def group_kinds(optimizer: Any) -> set[type]:
    settings = [value for group in optimizer.param_groups for key, value in group.items() if key != "params"]
    return {*kinds_in(settings)}


@KIND
@pytest.mark.parametrize("name", OURS)
def test_an_optimizer_steps_and_is_saved_alike_by_any_kind_of_number(name: str, kind: str) -> None:
    for key, value in settings_of(OURS[name]).items():
        results = []
        for given in (as_python(value, kind), of_kind(value, kind)):
            optimizer, closure = begun(OURS[name], **{key: given})
            optimizer.step(closure)
            saved = loaded(optimizer.state_dict())
            again, _ = begun(OURS[name])
            again.load_state_dict(saved)
            assert group_kinds(again) <= PYTHONS | ({torch.Tensor} if key == "lr" else set())
            results.append([p.detach() for group in optimizer.param_groups for p in group["params"]])
        torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-6 if kind == "tensor" and key == "lr" else 0)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("wrong", [True, math.nan, -1, -0.5, "1", None, [0.1], 1j], ids=repr)
def test_what_is_no_number_for_an_optimizer_is_refused_in_a_sentence(name: str, wrong: Any) -> None:
    may_be_none = {s.name for s in getattr(OURS[name], "settings", ()) if wrong is None and s.check.holds(None)}
    may_be_less = {"dampening"} if wrong in (-1, -0.5) else set()
    for key in {*settings_of(OURS[name])} - may_be_none - may_be_less:
        with pytest.raises((errors.StiefelkitError, ValueError), match=r"[A-Za-z]"):
            begun(OURS[name], **{key: wrong})


class Unprintable:
    """What no sentence can show."""

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


JUNK = {
    "none": None,
    "nan": math.nan,
    "infinite": math.inf,
    "of the edge": 1e308,
    "of no float": 10**400,
    "of no text": 10**5000,
    "two": torch.tensor([0.1, 0.2]),
    "meta": torch.empty((), device="meta"),
    "complex": torch.tensor(1j),
    "word": "junk",
    "nested": [1, [2]],
    "empty": (),
    "unprintable": Unprintable(),
}
FRAMES = [name for name in OURS if hasattr(OURS[name], "move")]


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("name", FRAMES)
def test_a_setting_written_later_is_taken_or_refused_in_a_sentence_before_anything_moves(name: str, junk: str) -> None:
    for setting in OURS[name].settings:
        optimizer, closure = begun(OURS[name])
        optimizer.step(closure)
        (w, b) = (p for group in optimizer.param_groups for p in group["params"])
        before = w.detach().clone()
        optimizer.param_groups[0][setting.name] = JUNK[junk]
        w.grad, b.grad = torch.ones_like(w), None
        refused = True
        with contextlib.suppress(errors.StiefelkitError):
            optimizer.step()
            refused = False
        assert not refused or torch.equal(before, w)
        lands_later = setting.name == "every" and not refused
        assert lands_later or sk.metrics.orthogonality_error(w) <= sk.metrics.frame_tolerance(3, w.dtype)
        with contextlib.suppress(errors.StiefelkitError):  # and where it is made
            begun(OURS[name], **{setting.name: JUNK[junk]})


NO_TENSORS = [None, math.nan, 7, "ab", object(), Unprintable(), [3], {"params": None}]


@pytest.mark.parametrize("junk", NO_TENSORS, ids=lambda junk: type(junk).__name__)
@pytest.mark.parametrize("name", FRAMES)
def test_what_holds_no_tensors_is_refused_as_parameters(name: str, junk: Any) -> None:
    for params in (junk, [{"params": junk}]):
        with pytest.raises(errors.OptionError, match=rf"^{OURS[name].__name__} needs "):
            OURS[name](params)


SCHEDULERS: dict[str, Callable[[Any, Any], Any]] = {
    "lambda": lambda o, kind: lr_scheduler.LambdaLR(o, lambda k: kind(0.5) ** k),
    "one cycle": lambda o, kind: lr_scheduler.OneCycleLR(
        o, kind(0.1), 9, base_momentum=kind(0.85), max_momentum=kind(0.95), cycle_momentum=_has_momentum(o)
    ),
    "cyclic": lambda o, kind: lr_scheduler.CyclicLR(
        o, kind(0.1), kind(0.2), base_momentum=kind(0.8), max_momentum=kind(0.9), cycle_momentum=_has_momentum(o)
    ),
    "by hand": lambda o, kind: [group.update(lr=kind(group["lr"])) for group in o.param_groups],
}


def _has_momentum(optimizer: Any) -> bool:
    return any(key in optimizer.defaults for key in ("momentum", "betas"))


@pytest.mark.parametrize("kind", [np.float64, np.float32])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("name", [name for name in OURS if hasattr(OURS[name], "move") or name == "rmsprop"])
def test_what_a_scheduler_writes_is_saved_as_pythons_numbers(name: str, scheduler: str, kind: Any) -> None:
    optimizer, closure = begun(OURS[name])
    schedule = SCHEDULERS[scheduler](optimizer, kind)
    for _ in range(3):
        optimizer.step(closure)
        if not isinstance(schedule, list):
            schedule.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(loaded(saved))
    assert group_kinds(optimizer) <= PYTHONS
    mixed = sk.optim.MixedOptimizer([torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=kind(0.5)), optimizer])
    mixed.load_state_dict(loaded(mixed.state_dict()))


def test_groups_have_pythons_numbers_and_keep_rates_that_are_tensors() -> None:
    layer, rate = sk.orthogonal(nn.Linear(4, 4), "weight", "cayley"), torch.tensor(0.5)
    kinds: Any = ((np.float64(0.5), 0.5), (rate, rate))
    decay: Any = np.float32(0.25)
    for lr, kept in kinds:
        groups = sk.optim.parameter_groups(
            layer, lr, weight_decay=decay, skew={"lr": lr, "weight_decay": np.int64(0), "nu": np.float32(0)}
        )
        assert [group["lr"] for group in groups] == [kept, kept]
        assert [group["weight_decay"] for group in groups] == [0.25, 0]
        for group in groups:
            values = [value for key, value in group.items() if key != "params"]
            assert {*kinds_in(values)} <= {int, float, str, type(kept)}
    frames = sk.optim.frames(nn.Parameter(sk.init.haar((4, 2))), lr=np.float32(0.5))
    optimizer = sk.optim.CayleySGD([*groups, *frames], rate)
    assert optimizer.param_groups[0]["lr"] is rate
    assert optimizer.param_groups[-1]["lr"] == 0.5


@KIND
@pytest.mark.parametrize("name", models.names())
def test_a_model_is_made_alike_by_any_kind_of_number(name: str, kind: str) -> None:
    factory = models.available()[name]
    parameters = {key: p for key, p in inspect.signature(factory).parameters.items() if takes_a_number(p.annotation)}
    absent = {key: 0.5 if "float" in str(p.annotation) else 4 for key, p in parameters.items()}
    given = {key: absent[key] if p.default is None else p.default for key, p in parameters.items()}
    given = {key: value for key, value in given.items() if key not in models.SIZES}
    arguments, options = (2, 4, 3), given | {"num_layers": 2, "dropout": 0.5}
    seeds.reseed(5)
    mine = models.create(name, *arguments, **as_python(options, kind))
    seeds.reseed(5)
    other = models.create(name, *of_kind(arguments, kind), **of_kind(options, kind))
    for (key, a), (other_key, b) in zip(mine.state_dict().items(), other.state_dict().items(), strict=True):
        assert key == other_key
        assert not isinstance(a, torch.Tensor) or torch.equal(a, b)
    rnn: Any = other.rnn
    assert {*map(type, (rnn.input_size, rnn.hidden_size, rnn.num_layers))} == {int}
    assert type(rnn.dropout) is float


@KIND
def test_layers_are_made_alike_by_any_kind_of_number(kind: str) -> None:
    sizes = of_kind((2, 4), kind)
    cls: Any = sk.nn.OrthogonalRNN
    layer = cls(*sizes, of_kind(2, kind), dropout=of_kind(0.5, kind), bidirectional=of_kind(True, kind))
    assert repr(layer) == repr(cls(2, 4, 2, dropout=0.5, bidirectional=True))
    assert layer(torch.zeros(3, 1, 2))[0].shape == (3, 1, 8)
    assert sk.nn.OrthogonalRNNCell(*sizes)(torch.zeros(1, 2)).shape == (1, 4)
    adapter: Any = sk.nn.OrthogonalAdapter(nn.Linear(8, 8), block_size=of_kind(4, kind))
    assert type(adapter.rotation.parametrizations.weight.param.options()["blocks"]) is int


PLANS: dict[str, Callable[..., Any]] = {
    **{f"task {name}": cls for name, cls in tasks.available().items()},
    "config": lambda **options: Config("copying", "scornn", **options),
    "reproduction": lambda **options: Reproduction(**{"epochs": 1, "seed": 2, "threads": 1, **options}),
    "figures": Figures,
    "drift": DriftPlan,
    "growth": GrowthPlan,
    "parametrizations": ParametrizationRace,
    "optimizers": OptimizerRace,
    "case": lambda **options: ScanCase("x", **{"T": 2, "n": 3, "B": 4, **options}),
    "scan": ScanRace,
    "report": ReportPlan,
}


@KIND
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_has_the_numbers_that_any_kind_says(plan: str, kind: str) -> None:
    made = PLANS[plan]()
    numbers = {
        field.name: getattr(made, field.name)
        for field in dataclasses.fields(made)
        if field.init and {*kinds_in(getattr(made, field.name))} & {int, float, bool}
    }
    numbers = {key: value for key, value in numbers.items() if key not in ("scale", "settings")}
    other = PLANS[plan](**of_kind(numbers, kind))
    for key, value in as_python(numbers, kind).items():
        assert getattr(other, key) == value
        assert {*kinds_in(getattr(other, key))} <= PYTHONS


@pytest.mark.parametrize("wrong", [True, -1, math.nan, 2.5, "3", np.float64(2.5), [1]], ids=repr)
@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "report"])
def test_what_is_no_count_is_refused_by_a_plan_in_a_sentence(plan: str, wrong: Any) -> None:
    made = PLANS[plan]()
    for field in dataclasses.fields(made):
        if type(getattr(made, field.name)) is int and str(field.type) in ("int", "int | None", str(int)):
            with pytest.raises(errors.OptionError, match=r"^[A-Z][A-Za-z ]+ needs an integer .*, got .*\.$"):
                PLANS[plan](**{field.name: wrong})


@KIND
def test_functions_take_any_kind_of_number(kind: str) -> None:
    w = sk.init.haar(of_kind((4, 2), kind))
    assert w.shape == sk.init.identity(of_kind([4, 2], kind)).shape == (4, 2)
    assert torch.equal(msign(w, lowest=of_kind(0.25, kind)), msign(w, lowest=as_python(0.25, kind)))
    assert spectral_direction(w, w.flip(0), iterations=of_kind(2, kind))[0].shape == w.shape
    assert sk.metrics.lipschitz(nn.Linear(2, 2), of_kind(2, kind), steps=of_kind(3, kind)).largest > 0
    assert sk.optim.average_fn(of_kind(0.5, kind))(torch.zeros(1), torch.ones(1), 1).item() == 0.5
    found = sk.optim.minimize(lambda x: x.sum(), w, max_iter=of_kind(2, kind), tolerance_grad=of_kind(0.25, kind))
    assert found.iterations <= 2
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.ones(4)
    sk.optim.clip_grad_norm_(p, of_kind(0.5, kind))
    assert math.isclose(p.grad.norm().item(), 0.5, rel_tol=1e-5)


@KIND
def test_sizes_of_layers_and_frames_are_of_any_kind(kind: str) -> None:
    size = of_kind(4, kind)
    assert sk.nn.OrthogonalLinear(size, size).weight.shape == (4, 4)
    assert sk.nn.ModReLU(size).bias.shape == (4,)
    assert sk.manifolds.Stiefel().random(size, of_kind(2, kind)).shape == (4, 2)
    assert sk.manifolds.Stiefel().dim(size, of_kind(2, kind)) == 5


def test_a_check_says_what_it_has_got_in_pythons_words() -> None:
    with pytest.raises(errors.OptionError, match=r"^It needs a finite lr >= 0, got -1\.0\.$"):
        at_least(0).require("It", "lr", np.float64(-1))
    with pytest.raises(errors.OptionError, match=r"^It needs mode in \('a', 'b'\), got 'c'\.$"):
        one_of("a", "b").require("It", "mode", np.str_("c"))
    assert isinstance(integer(1), Check)
