"""NumPy's numbers and tensors without dimensions count as Python's: options of every member are Python's numbers."""

import inspect
import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, models
from stiefelkit.contract.table import registered
from stiefelkit.numbers import above, as_python_number, at_least, integer, one_of, optional, sizes
from stiefelkit.optim import minimizers, optimizers
from stiefelkit.testing.cases import saved_and_loaded

KIND = pytest.mark.parametrize("kind", [np.array, torch.tensor], ids=["numpy", "torch"])
OF_PYTHON = {int, float, bool, str, type(None)}
OURS = {k: v for k, v in optimizers.available().items() if v.__module__.startswith("stiefelkit.")}
OURS |= minimizers.available()


def of_kind(value: Any, kind: Callable[[Any], Any]) -> Any:
    """A finite number, or each in a tuple, a list or a dictionary, as an array or a tensor without dimensions."""
    if isinstance(value, list | tuple):
        return type(value)(of_kind(item, kind) for item in value)
    if isinstance(value, dict):
        return {key: of_kind(item, kind) for key, item in value.items()}
    if isinstance(value, float) and math.isfinite(value):
        return kind(np.float64(value))
    return kind(value) if type(value) in (int, bool) else value


def kinds_in(value: Any) -> Iterator[type]:
    """The types of the leaves."""
    if not isinstance(value, dict | list | tuple):
        yield type(value)
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        yield from kinds_in(item)


@KIND
def test_a_number_of_any_kind_is_the_same_of_python(kind: Any) -> None:
    for value in (3, 0.25, True, (2, 0.5), [1], {"a": (4, None, "b")}):
        assert as_python_number(of_kind(value, kind)) == value
        assert {*kinds_in(as_python_number(of_kind(value, kind)))} <= OF_PYTHON
    assert as_python_number(Fraction(1, 4)) == 0.25
    for value in ("3", 1j, kind([0.0]), torch.empty((), device="meta")):
        assert as_python_number(value) is value


def test_checks_have_bounds() -> None:
    for check, right, wrong in (
        (at_least(0, below=1), (0, 0.5, np.float64(0.5)), (-1e-300, 1, math.nan, "1", None)),
        (at_least(0, most=1), (0, 1), (1.1, math.inf)),
        (above(0), (1e-300, 10**300), (0, math.inf, 10**400)),
        (integer(1, 3), (1, 3, np.int64(2)), (0, 4, True, torch.zeros(1))),
        (one_of("a", 1), ("a", 1, np.str_("a")), (True, "b")),
        (optional(above(0)), (None, 1), (0,)),
    ):
        for value in right:
            assert type(check.require("It", "size", value)) in OF_PYTHON
        for value in wrong:
            with pytest.raises(errors.OptionError, match="size"):
                check.require("It", "size", value)
    with pytest.raises(errors.OptionError, match=r"write 16\.$"):
        integer(1).require("It", "size", 16.0)


def test_a_shape_is_a_tuple_of_integers() -> None:
    for shape in ((2, 3), [2, 3], torch.Size([2, 3]), np.array([2, 3]), torch.tensor([2, 3])):
        assert sizes(shape) == (2, 3)
        assert {*map(type, sizes(shape) or ())} == {int}
    for shape in (3, None, (2.0, 3.0), torch.tensor(3)):
        assert sizes(shape) is None


@KIND
@pytest.mark.parametrize("name", registered.names())
def test_a_map_has_the_options_and_the_shape_that_any_kind_of_number_says(name: str, kind: Any) -> None:
    cls = registered.find(name)
    for shape, options in cls.examples():
        dtype = torch.complex64 if cls.supports(shape, torch.float32, **options) else torch.float32
        mine = cls(shape, dtype=dtype, **options)
        other = cls(of_kind(shape, kind), dtype=dtype, **of_kind(options, kind))
        assert json.dumps(other.options()) == json.dumps(mine.options())
        assert (other.shape, other.coordinates) == (mine.shape, mine.coordinates)


def settings_of(cls: Any) -> dict[str, Any]:
    """Name to default of each setting that is a finite number, or two."""
    values = {key: parameter.default for key, parameter in inspect.signature(cls).parameters.items()}
    return {k: v for k, v in values.items() if {*kinds_in(v)} <= {int, float} and v != math.inf}


def stepped(cls: Any, **settings: Any) -> Any:
    """An optimizer of a frame, if it moves frames, and of a plain parameter, after a step."""
    w, b = nn.Parameter(sk.init.identity((4, 3))), nn.Parameter(torch.ones(3, dtype=torch.float64))
    groups = [*sk.optim.frames(w), {"params": [b]}] if getattr(cls, "moves_frames", False) else [b]
    optimizer = cls(groups, **settings)
    if not isinstance(optimizer, sk.optim.Minimizer):
        for key, value in settings.items():  # as a scheduler does
            optimizer.param_groups[0][key] = value[()] if isinstance(value, np.ndarray) else value
        w.grad, b.grad = torch.ones_like(w), torch.ones_like(b)
    optimizer.step(lambda: (w[0].sum() - 1) ** 2 + (b - 2).square().sum())
    return optimizer


@KIND
@pytest.mark.parametrize("name", OURS)
def test_an_optimizer_steps_and_is_saved_alike_by_any_kind_of_number(name: str, kind: Any) -> None:
    for key, value in settings_of(OURS[name]).items():
        made = [stepped(OURS[name], **{key: given}) for given in (value, of_kind(value, kind))]
        for optimizer in made:
            optimizer.load_state_dict(saved_and_loaded(optimizer.state_dict()))
            kinds = {*kinds_in([{**group, "params": None} for group in optimizer.param_groups])}
            assert kinds <= OF_PYTHON | ({torch.Tensor} if key == "lr" else set())
        mine, other = ([p.detach() for group in each.param_groups for p in group["params"]] for each in made)
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6 if kind is torch.tensor and key == "lr" else 0)
        with pytest.raises((errors.StiefelkitError, ValueError)):
            stepped(OURS[name], **{key: math.nan})


@KIND
def test_layers_and_models_are_made_alike_by_any_kind_of_number(kind: Any) -> None:
    two, four, half = (of_kind(value, kind) for value in (2, 4, 0.5))
    assert repr(sk.nn.OrthogonalRNN(two, four, two, dropout=half)) == repr(sk.nn.OrthogonalRNN(2, 4, 2, dropout=0.5))
    assert repr(models.create("scornn", two, four, two, num_layers=two)) == repr(
        models.create("scornn", 2, 4, 2, num_layers=2)
    )
    assert sk.init.haar((four, two)).shape == (4, 2)


def test_groups_have_pythons_numbers_and_keep_rates_that_are_tensors() -> None:
    layer, rate = sk.orthogonal(nn.Linear(4, 4), "weight", "cayley"), torch.tensor(0.5)
    lr: Any
    for lr in (np.float64(0.5), np.float32(0.5), rate):
        (group, *_) = sk.optim.parameter_groups(layer, lr, weight_decay=lr)
        assert group["lr"] is rate if lr is rate else type(group["lr"]) is type(group["weight_decay"]) is float
