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


def linear(n: int = 4, **options: Any) -> nn.Module:
    return sk.orthogonal(nn.Linear(n, n, dtype=options.pop("dtype", None)), "weight", **options)


def by_torch(n: int = 4, orthogonal_map: str | None = None, **options: Any) -> nn.Module:
    return of_torch.orthogonal(nn.Linear(n, n), "weight", orthogonal_map, use_trivialization=False, **options)


def assigned(layer: nn.Module, w: torch.Tensor) -> None:
    layer.weight = w


def points(*rows: int) -> list[torch.Tensor]:
    return [nn.Parameter(torch.eye(n)[:, :2]) for n in rows or (4,)]


INPUTS = {
    "another width": (torch.zeros(5, 2, 7),),
    "another number of dimensions": (torch.zeros(1, 5, 2, 3),),
    "another dtype": (ZEROS.double(),),
    "a batch of states": (ZEROS, torch.zeros(1, 3, 4)),
}
CELLS = {"another width": (torch.zeros(2, 5),), "another batch": (torch.zeros(2, 3), torch.zeros(3, 4))}
RNNS: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((3, 0), {}),
    ((3, 4), {"foo": 1}),
    ((3, 4), {"dropout": 2.0}),
    ((3, 4), {"num_layers": 0}),
]
SETTINGS: list[dict[str, Any]] = [{"lr": -1}, {"foo": 1}, {"betas": (2, 0.9)}]
Calls = tuple[Callable[[], Any], Callable[[], Any]]
PAIRS: dict[str, Calls] = {
    **{
        f"RNN of {k}": (lambda x=x: nn.RNN(3, 4)(*x), lambda x=x: sk.nn.OrthogonalRNN(3, 4)(*x))
        for k, x in INPUTS.items()
    },
    **{
        f"cell of {k}": (lambda x=x: nn.RNNCell(3, 4)(*x), lambda x=x: sk.nn.OrthogonalRNNCell(3, 4)(*x))
        for k, x in CELLS.items()
    },
    **{
        f"RNN{a}{k}": (lambda a=a, k=k: nn.RNN(*a, **k), lambda a=a, k=k: sk.nn.OrthogonalRNN(*a, **k)) for a, k in RNNS
    },
    **{
        f"Adam of {k}": (
            lambda k=k: torch.optim.Adam(points(), **k),
            lambda k=k: sk.optim.CayleyAdam(sk.optim.frames(points()), **k),
        )
        for k in SETTINGS
    },
    "an unknown activation": (
        lambda: nn.RNN(3, 4, nonlinearity="foo"),
        lambda: sk.nn.OrthogonalRNN(3, 4, activation="foo"),
    ),
    "an unknown weight": (
        lambda: of_torch.orthogonal(nn.Linear(4, 4), "wieght"),
        lambda: sk.orthogonal(nn.Linear(4, 4), "wieght"),
    ),
    "an unknown map": (lambda: by_torch(orthogonal_map="foo"), lambda: linear(parametrization="foo")),
    "an unknown option": (lambda: by_torch(foo=1), lambda: linear(foo=1)),
    "an assigned shape": (lambda: assigned(by_torch(), torch.eye(3)), lambda: assigned(linear(), torch.eye(3))),
    "an assigned dtype": (
        lambda: assigned(of_torch.orthogonal(nn.Linear(4, 4)), torch.eye(4).to(torch.complex64)),
        lambda: assigned(linear(), torch.eye(4).to(torch.complex64)),
    ),
    "no right inverse": (
        lambda: assigned(by_torch(orthogonal_map="cayley"), torch.eye(4)),
        lambda: assigned(linear(parametrization="fourier", dtype=torch.complex64), torch.eye(4).to(torch.complex64)),
    ),
    "a frame outside the image": (
        lambda: assigned(by_torch(orthogonal_map="matrix_exp"), torch.diag(torch.tensor([-1.0, 1, 1, 1]))),
        lambda: assigned(linear(parametrization="matrix_exp"), torch.diag(torch.tensor([-1.0, 1, 1, 1]))),
    ),
    "a checkpoint of another shape": (
        lambda: by_torch().load_state_dict(by_torch(3).state_dict()),
        lambda: linear().load_state_dict(linear(3).state_dict()),
    ),
    "a checkpoint of a plain weight": (
        lambda: by_torch().load_state_dict(nn.Linear(4, 4).state_dict()),
        lambda: linear().load_state_dict(nn.Linear(4, 4).state_dict()),
    ),
    "an optimizer's checkpoint with other groups": (
        lambda: torch.optim.Adam(points(4)).load_state_dict(torch.optim.Adam(points(4, 5)).state_dict()),
        lambda: sk.optim.CayleyAdam(sk.optim.frames(points(4))).load_state_dict(
            sk.optim.CayleyAdam(sk.optim.frames(points(4, 5))).state_dict()
        ),
    ),
    "a decomposition of NaN": (lambda: torch.linalg.svd(NAN), lambda: polar_factor(NAN)),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_what_torch_raises_is_raised_here_too(pair: Calls) -> None:
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
