"""Errors are also what torch raises in their place, so that `except` clauses written for torch catch them."""

import builtins
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations as of_torch

import stiefelkit as sk
from stiefelkit import errors
from stiefelkit.functional import polar_factor

ZEROS = torch.zeros(5, 2, 3)
NAN = torch.full((4, 2), torch.nan)


def raised(call: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return caught.value


def linear(n: int = 4, weight: str = "weight", dtype: torch.dtype | None = None, **options: Any) -> nn.Module:
    return sk.orthogonal(nn.Linear(n, n, dtype=dtype), weight, **options)


def by_torch(n: int = 4, parametrization: str | None = None, weight: str = "weight", **options: Any) -> nn.Module:
    return of_torch.orthogonal(nn.Linear(n, n), weight, parametrization, use_trivialization=False, **options)


def assigned(layer: nn.Module, w: torch.Tensor) -> None:
    layer.weight = w


def points(*rows: int) -> list[torch.Tensor]:
    return [nn.Parameter(torch.eye(n)[:, :2]) for n in rows or (4,)]


def cayley_adam(frames: list[torch.Tensor], **options: Any) -> torch.optim.Optimizer:
    return sk.optim.CayleyAdam(sk.optim.frames(frames), **options)


def both(theirs: Any, ours: Any, act: Callable[[Any], Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same act on what torch has and on what stands in its place."""
    return lambda: act(theirs), lambda: act(ours)


RNN, LAYER = (nn.RNN, sk.nn.OrthogonalRNN), (by_torch, linear)
CELL, ADAM = (nn.RNNCell, sk.nn.OrthogonalRNNCell), (torch.optim.Adam, cayley_adam)
INPUTS = {
    "another width": (torch.zeros(5, 2, 7),),
    "another number of dimensions": (torch.zeros(1, 5, 2, 3),),
    "another dtype": (ZEROS.double(),),
    "a batch of states": (ZEROS, torch.zeros(1, 3, 4)),
}
CELLS = {"another width": (torch.zeros(2, 5),), "another batch": (torch.zeros(2, 3), torch.zeros(3, 4))}
RNNS: list[tuple[int, dict[str, Any]]] = [(0, {}), (4, {"foo": 1}), (4, {"dropout": 2.0}), (4, {"num_layers": 0})]
SETTINGS: list[dict[str, Any]] = [{"lr": -1}, {"foo": 1}, {"betas": (2, 0.9)}]
COMPLEX, REFLECTION = torch.eye(4).to(torch.complex64), torch.diag(torch.tensor([-1.0, 1, 1, 1]))
PAIRS = {
    **{f"RNN of {k}": both(*RNN, lambda make, x=x: make(3, 4)(*x)) for k, x in INPUTS.items()},
    **{f"cell of {k}": both(*CELL, lambda make, x=x: make(3, 4)(*x)) for k, x in CELLS.items()},
    **{f"RNN of {n}, {k}": both(*RNN, lambda make, n=n, k=k: make(3, n, **k)) for n, k in RNNS},
    **{f"Adam of {k}": both(*ADAM, lambda make, k=k: make(points(), **k)) for k in SETTINGS},
    "an unknown activation": (
        lambda: nn.RNN(3, 4, nonlinearity="foo"),
        lambda: sk.nn.OrthogonalRNN(3, 4, activation="foo"),
    ),
    "an unknown weight": both(*LAYER, lambda make: make(weight="wieght")),
    "an unknown map": both(*LAYER, lambda make: make(parametrization="foo")),
    "an unknown option": both(*LAYER, lambda make: make(foo=1)),
    "an assigned shape": both(*LAYER, lambda make: assigned(make(), torch.eye(3))),
    "an assigned dtype": both(
        lambda: of_torch.orthogonal(nn.Linear(4, 4)), linear, lambda make: assigned(make(), COMPLEX)
    ),
    "no right inverse": (
        lambda: assigned(by_torch(parametrization="cayley"), torch.eye(4)),
        lambda: assigned(linear(parametrization="fourier", dtype=torch.complex64), COMPLEX),
    ),
    "a frame outside the image": both(*LAYER, lambda make: assigned(make(parametrization="matrix_exp"), REFLECTION)),
    "a checkpoint of another shape": both(*LAYER, lambda make: make().load_state_dict(make(3).state_dict())),
    "a checkpoint of a plain weight": both(*LAYER, lambda make: make().load_state_dict(nn.Linear(4, 4).state_dict())),
    "an optimizer's checkpoint with other groups": both(
        *ADAM, lambda make: make(points(4)).load_state_dict(make(points(4, 5)).state_dict())
    ),
    "a decomposition of NaN": both(torch.linalg.svd, polar_factor, lambda decompose: decompose(NAN)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_what_torch_raises_is_raised_here_too(pair: Any) -> None:
    theirs, ours = map(raised, pair)
    kind = next(cls for cls in type(theirs).__mro__ if cls.__module__ == "builtins")
    assert isinstance(ours, kind), f"{theirs!r} and {ours!r}"


@pytest.mark.parametrize("name", [name for name in errors.__all__ if name.endswith("Error")])
def test_an_error_is_a_sentence_that_travels_between_processes(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("It needs a frame, got none.")
    if kind is not errors.StiefelkitError:
        assert [cls for cls in kind.__mro__ if cls.__module__ == builtins.__name__ and cls not in Exception.__mro__]
    for twin in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(twin) is kind
        assert str(twin) == "It needs a frame, got none."
    assert isinstance(error, errors.StiefelkitError)


def test_an_error_of_a_run_that_diverged_keeps_what_was_found() -> None:
    twin = pickle.loads(pickle.dumps(errors.DivergedError("It needs finite losses, got NaN.", "NaN at step 3")))
    assert twin.found == "NaN at step 3"
    assert isinstance(twin, RuntimeError)
