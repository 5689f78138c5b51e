"""What makes no sense is refused at every door: by one sentence of ours, or by torch where it goes straight there."""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stiefelkit as sk
from stiefelkit import errors, functional, metrics
from stiefelkit.contract.table import option_names, registered
from stiefelkit.functional import _packing
from stiefelkit.functional._rotations.layout import MeshLayout
from stiefelkit.optim import minimizers


class Unprintable:
    """What no sentence can show, and what cannot be compared or gone through."""

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no eq")

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no iter")


def breaks() -> Iterator[Any]:
    """Goes nowhere."""
    raise RuntimeError("no item")
    yield


NO_TENSORS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "nan": lambda: math.nan,
    "of no text": lambda: 10**5000,
    "numpy": lambda: np.float64("nan"),
    "array": lambda: np.zeros(2),
    "word": lambda: "junk",
    "nested": lambda: [1, [2]],
    "mapping": lambda: {"a": Unprintable()},
    "unprintable": Unprintable,
    "breaks": breaks,
    "object": object,
}
TENSORS: dict[str, Callable[[], Any]] = {
    "two": lambda: torch.tensor([0.1, 0.2]),
    "number": lambda: torch.tensor(math.nan),
    "meta": lambda: torch.empty((), device="meta"),
    "complex": lambda: torch.tensor(1j),
}
JUNK = NO_TENSORS | TENSORS
ANY = pytest.mark.parametrize("junk", JUNK)


def given(junk: Any) -> Any:
    """Junk where None means that nothing is given."""
    return 0 if junk is None else junk


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def frame() -> nn.Parameter:
    return nn.Parameter(sk.init.identity((4, 3)))


def refused(call: Callable[[Any], Any], junk: Any) -> str | None:
    """Calls with junk; returns the sentence that refuses it, None if it is taken; fails for an error of neither."""
    said = by_whom = None
    try:
        call(junk)
    except errors.StiefelkitError as error:
        said, by_whom = str(error), "us"
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        # torch's: it names its argument, or the tensor's shape; or Python's, of what binds arguments
        is_named = isinstance(junk, torch.Tensor) or "argument" in str(error) or "optimizer got" in str(error)
        said, by_whom = str(error), "torch" if is_named else type(error).__name__
    assert said is None or by_whom in ("us", "torch"), f"{by_whom}: {said}"
    assert by_whom != "us" or "\n" not in str(said)
    return said


@ANY
@pytest.mark.parametrize("name", registered.names())
def test_a_map_takes_options_or_refuses_them_and_the_module_stays(name: str, junk: str) -> None:
    for key in [*option_names(registered.find(name)), "init", "view", "blocks", "dim", "gain"]:
        layer = linear()
        before = layer.weight
        said = refused(
            lambda value, key=key, layer=layer: sk.orthogonal(layer, "weight", name, **{key: value}), JUNK[junk]()
        )
        assert said is None or (layer.weight is before and type(layer) is nn.Linear)
    cls = registered.find(name)
    assert refused(lambda value: cls(value), JUNK[junk]())
    assert junk == "none" or refused(lambda value: cls((4, 4), dtype=value), JUNK[junk]())


DOORS: dict[str, Callable[[Any], Any]] = {
    "orthogonal": lambda junk: sk.orthogonal(junk, "weight"),
    "name": lambda junk: sk.orthogonal(linear(), given(junk)),
    "map": lambda junk: sk.orthogonal(linear(), "weight", junk),
    "draw": lambda junk: sk.init.draw(junk, (3, 2)),
    "shape": sk.init.haar,
    "size": lambda junk: sk.init.identity((4, junk)),
    "dtype": lambda junk: sk.init.henaff((3, 2), junk),
    "generator": lambda junk: sk.init.haar((3, 2), torch.float64, given(junk)),
    "frames": sk.optim.frames,
    "[frames]": lambda junk: sk.optim.frames([junk]),
    "clip": lambda junk: sk.optim.clip_grad_norm_(junk, 1.0),
    "[clip]": lambda junk: sk.optim.clip_grad_norm_([{"params": [junk]}], 1.0),
    "max_norm": lambda junk: sk.optim.clip_grad_norm_(linear(), junk),
    "flag": lambda junk: sk.optim.clip_grad_norm_(linear(), 1.0, error_if_nonfinite=junk),
    "mixed": sk.optim.MixedOptimizer,
    "[mixed]": lambda junk: sk.optim.MixedOptimizer([junk]),
    "groups": lambda junk: sk.optim.parameter_groups(junk, lr=0.1),
    "rate": lambda junk: sk.optim.parameter_groups(linear(), lr=junk),
    "function": lambda junk: sk.optim.minimize(junk, frame()),
    "start": lambda junk: sk.optim.minimize(torch.sum, junk),
    "method": lambda junk: sk.optim.minimize(torch.sum, frame(), junk),
    "metric": lambda junk: sk.manifolds.Stiefel(junk),
    "projx": lambda junk: sk.manifolds.Stiefel().projx(junk),
    "proju": lambda junk: sk.manifolds.Stiefel().proju(frame(), junk),
    "retr": lambda junk: sk.manifolds.Stiefel().retr(junk, frame()),
    "error": metrics.orthogonality_error,
    "limit": lambda junk: metrics.rounding_limit(junk, torch.float32),
    "limit of": lambda junk: metrics.rounding_limit(3, junk),
    "lipschitz": metrics.lipschitz,
    "mesh": lambda junk: functional.mesh_size(junk, 4),
    "band": lambda junk: functional.band_size(4, 4, False, junk),
    "conditioned": lambda junk: functional.polar_factor(torch.eye(3), well_conditioned=junk),
    "model": lambda junk: sk.models.create(junk, 3, 4, 2),
    "model's size": lambda junk: sk.models.create("exprnn", 3, junk, 2),
    "field": lambda junk: sk.nn.OrthogonalRNN(3, 4, field=junk),
    "backend": lambda junk: sk.nn.OrthogonalRNN(3, 4, backend=junk),
    "side": lambda junk: sk.nn.OrthogonalAdapter(linear(), side=junk),
    **{name: getattr(sk, name) for name in ("drift", "bake", "group_", "check_state_dict") if hasattr(sk, name)},
    "coordinates of": lambda junk: sk.coordinates(sk.orthogonal(linear(), "weight"), given(junk)),
    "reset_ of": lambda junk: sk.reset_(sk.orthogonal(linear(), "weight"), given(junk)),
    "rebase_ of": lambda junk: sk.rebase_(sk.orthogonal(linear(), "weight"), given(junk)),
    "assign_": lambda junk: sk.assign_(sk.orthogonal(linear(), "weight"), "weight", junk),
}


@ANY
@pytest.mark.parametrize("door", DOORS)
def test_junk_is_refused_at_every_door_in_a_sentence(door: str, junk: str) -> None:
    takes_it = "clip" in door and junk in TENSORS  # without a gradient
    assert refused(DOORS[door], JUNK[junk]()) or takes_it


@pytest.mark.parametrize("junk", NO_TENSORS)
@pytest.mark.parametrize("name", [name for name in functional.__all__ if inspect.isfunction(getattr(functional, name))])
def test_a_function_refuses_what_is_no_tensor_or_no_count(name: str, junk: str) -> None:
    call, eye = getattr(functional, name), torch.eye(4)
    needed = {key: p for key, p in inspect.signature(call).parameters.items() if p.default is p.empty}
    plain = {"n": 4, "p": 4, "k": 4, "layers": 4, "bandwidth": 1, "is_complex": False, "batch": (), "step": 0.1}
    for key, parameter in needed.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            assert refused(call, JUNK[junk]())
        elif key not in ("is_complex", "batch", "step", "dtype"):
            given = {other: plain.get(other, torch.zeros(6) if other in "v angle index" else eye) for other in needed}
            assert refused(lambda value, given=given, key=key: call(**given | {key: value}), JUNK[junk]()), key


@ANY
@pytest.mark.parametrize("name", minimizers.available())
def test_a_minimizer_refuses_junk_and_the_frame_stays(name: str, junk: str) -> None:
    cls = minimizers.available()[name]
    weights = torch.arange(12.0).view(4, 3)
    for params in (JUNK[junk], lambda: [JUNK[junk]()], lambda: [{"params": JUNK[junk]()}]):
        refused(cls, params())
    w = frame()
    optimizer = cls(sk.optim.frames(w), max_iter=2)
    before = w.detach().clone()
    assert refused(lambda value: optimizer.step(value), JUNK[junk]())
    assert torch.equal(w, before)
    assert refused(lambda value: optimizer.step(lambda: value), JUNK[junk]())
    assert torch.equal(w, before)
    optimizer.step(lambda: (w * weights).sum())
    saved = optimizer.state_dict()
    for key in next(iter(saved["state"].values()), {}):
        wrong = {**saved, "state": {k: {**entry, key: JUNK[junk]()} for k, entry in saved["state"].items()}}
        with contextlib.suppress(errors.StiefelkitError):
            optimizer.load_state_dict(wrong)
        optimizer.step(lambda: (w * weights).sum())
        assert metrics.orthogonality_error(w) <= metrics.frame_tolerance(3, w.dtype)


def test_a_mixed_optimizer_that_is_refused_a_state_is_as_it_was() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = sk.optim.MixedOptimizer([torch.optim.Adam([a], lr=0.1), torch.optim.Adam([b], lr=0.1)])
    other = sk.optim.MixedOptimizer([torch.optim.Adam([a], lr=0.2), torch.optim.Adam([b, a.clone().detach()], lr=0.2)])
    with pytest.raises(ValueError, match="param"):
        optimizer.load_state_dict(other.state_dict())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    for junk in JUNK.values():
        assert refused(optimizer.load_state_dict, junk())
        assert refused(optimizer.load_state_dict, {"optimizers": [junk()] * 2})


SIZES: dict[str, Callable[[Any], Any]] = {
    "in_features": lambda size: sk.nn.OrthogonalLinear(size, 4),
    "out_features": lambda size: sk.nn.OrthogonalLinear(4, size),
    "modrelu": sk.nn.ModReLU,
    "random": lambda size: sk.manifolds.Stiefel().random(size, 2),
    "origin": lambda size: sk.manifolds.Stiefel().origin(size, 2),
    "dim": lambda size: sk.manifolds.Stiefel().dim(size, 2),
    "adapter": lambda size: sk.nn.OrthogonalAdapter(nn.Linear(8, 8), block_size=size),
}


@pytest.mark.parametrize("wrong", [True, math.nan, 4.0, Decimal(4), "4", -1], ids=repr)
@pytest.mark.parametrize("door", SIZES)
def test_what_is_no_size_is_refused_in_a_sentence(door: str, wrong: Any) -> None:
    with pytest.raises((errors.OptionError, errors.ShapeError), match=r"^\w+ needs .*, got .*\.$"):
        SIZES[door](wrong)


@pytest.mark.parametrize("wrong", [5.0, 16.0, Decimal(5), np.float64(5)], ids=repr)
def test_a_size_that_no_function_takes_is_not_remembered_for_those_that_are_equal(wrong: Any) -> None:
    n, v = int(wrong), torch.zeros(2 * int(wrong) ** 2)
    for call in (
        lambda size: functional.cayley(v[: n * (n - 1) // 2], size, size),
        lambda size: functional.unpack_skew(v[: n * (n - 1) // 2], size, size, False),
        lambda size: functional.unpack_trapezoid(v[: n * (n + 1) // 2], size, size, False),
        lambda size: functional.spread_band(v[: n - 1], size, size, False, 1),
        lambda size: functional.brickwall(torch.eye(n), v[: functional.mesh_size(n, n)], layers=size),
    ):
        _packing._known.clear()
        with contextlib.suppress(Exception):
            call(wrong)
        with contextlib.suppress(TypeError):
            MeshLayout.of(wrong, n)
        expected = call(n)
        _packing._known.clear()
        torch.testing.assert_close(call(n), expected, rtol=0, atol=0)
    for name in ("cayley", "householder", "givens", "matrix_exp"):
        sk.orthogonal(nn.Linear(n, n), "weight", name).weight.sum().backward()
