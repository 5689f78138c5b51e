"""Modules of torch, on the inputs that torch tests them with, compute with our weights what plain twins do."""

import copy
import io
import pickle
from collections.abc import Callable
from itertools import cycle
from operator import attrgetter
from typing import Any

import pytest
import torch
from their_tests import IS_FULL
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves, tree_map_only
from torchs_inputs import module_db

import stiefelkit as sk
from stiefelkit import errors

Convolution = nn.modules.conv._ConvNd
VIEWS = ("out_by_rest", "in_by_rest", "per_tap")
MAPS = [
    name
    for name, cls in sk.available().items()
    if cls.__module__.startswith("stiefelkit.") and cls.supports((4, 4), torch.float64) is None
]
SQUARE = {name for name in MAPS if sk.available()[name].supports((5, 3), torch.float64) is not None}

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*side by side became one frame",
    "ignore:.*nested",
    "ignore:Initializing zero-element",
    "ignore:Full backward hook",
    "ignore:linear_cross_entropy",
)


class Case:
    """A module with the arguments of one of torch's inputs, a map for its weights, and a view for kernels."""

    def __init__(self, info: Any, number: int, map: str, view: str | None):
        self.info, self.number, self.map, self.view = info, number, map, view

    def __repr__(self) -> str:
        view = f"-{self.view}" if self.view else ""
        return f"{self.info.name.removeprefix('nn.')}-{self.number}-{self.map}{view}"

    def input(self, training: bool) -> Any:
        found = inputs_of(self.info, training)  # of which there may be fewer in one mode
        return found[self.number % len(found)]

    def plain(self, training: bool = True) -> nn.Module:
        made = self.input(training).constructor_input
        torch.manual_seed(1)
        return self.info.module_cls(*made.args, **made.kwargs).double().train(training)

    def ours(self, training: bool = True, init: str | None = None) -> nn.Module:
        module = self.plain(training)
        for name, p in matrices(module).items():
            is_able = self.view or sk.available()[self.map].supports(tuple(p.shape[-2:]), p.dtype) is None
            sk.orthogonal(module, name, self.map if is_able else "cayley", init=init, view=self.view)
        return module

    def twin(self, module: nn.Module) -> nn.Module:
        """A plain module that holds the values of ours."""
        twin = self.plain(module.training)
        with torch.no_grad():
            for name, p in [*twin.named_parameters(), *twin.named_buffers()]:
                p.copy_(attrgetter(name)(module))
        return twin

    def call(self, module: nn.Module, change: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
        taken = self.input(module.training).forward_input
        torch.manual_seed(3)
        return module(*tree_map_only(Tensor, change, taken.args), **tree_map_only(Tensor, change, taken.kwargs))


def inputs_of(info: Any, training: bool) -> list[Any]:
    torch.manual_seed(0)
    found = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=training)
    return [input for input in found if input.forward_input is not None]


def matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module.named_parameters() if p.dim() >= 2}


def has_matrices(info: Any) -> bool:
    made = inputs_of(info, True)[0].constructor_input if inputs_of(info, True) else None
    return made is not None and bool(matrices(info.module_cls(*made.args, **made.kwargs)))


def cases() -> list[Case]:
    """Every module once, with maps and views in turn; or each map and view once, and many inputs with all in turn."""
    maps, views, found = cycle(MAPS), cycle(VIEWS), []
    for info in WITH_MATRICES:
        is_kernel = issubclass(info.module_cls, Convolution)
        count = len(inputs_of(info, True))
        if IS_FULL:
            found += [Case(info, 0, map, view) for map in MAPS for view in (VIEWS if is_kernel else (None,))]
        for number in range(IS_FULL, count if IS_FULL else 1, max(1, count // 20)):
            found.append(Case(info, number, next(maps), next(views) if is_kernel else None))
    return [case for case in found if case.view is None or case.map not in SQUARE]


LAZY = [info for info in module_db if info.is_lazy]
RECURRENT = [info for info in module_db if issubclass(info.module_cls, nn.RNNBase)]
WITH_MATRICES = [info for info in module_db if info not in LAZY + RECURRENT and has_matrices(info)]
over_cases = pytest.mark.parametrize("case", cases(), ids=repr)


def tensors(found: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, Tensor)]


def assert_same(found: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Bit by bit, unless rounding comes in in another order."""
    assert tensors(expected)
    torch.testing.assert_close(tensors(found), tensors(expected), rtol=tolerance, atol=tolerance)


def total(found: Any) -> Tensor:
    """A weighted sum of all that was computed, with other weights for each."""
    x = torch.cat([x.flatten() for x in tensors(found) if x.is_floating_point()])
    return x @ torch.linspace(0.5, 1.5, len(x), dtype=x.dtype)


@over_cases
@pytest.mark.parametrize("training", [True, False])
def test_a_module_computes_what_a_plain_twin_does(case, training):
    module = case.ours(training)
    twin = case.twin(module)
    assert_same(case.call(module), case.call(twin))
    with torch.no_grad():
        # Kernels of torch's are chosen by requires_grad, too, which what is computed has not here.
        assert_same(case.call(module), case.call(twin.requires_grad_(False)))


@over_cases
def test_gradients_of_coordinates_are_those_of_the_twins_weights_through_the_map(case):
    module = case.ours()
    twin = case.twin(module)
    total(case.call(twin)).backward()
    total(case.call(module)).backward()
    for name, p in twin.named_parameters():
        host, _, own = name.rpartition(".")
        host = module.get_submodule(host)
        if parametrize.is_parametrized(host, own):
            coordinates = list(sk.coordinates(host, own).values())
            expected = torch.autograd.grad(getattr(host, own), coordinates, p.grad)
            assert_same([c.grad for c in coordinates], expected, 1e-11)
        elif p.grad is not None:
            assert_same(getattr(host, own).grad, p.grad, 1e-11)


@over_cases
def test_second_derivatives_are_those_of_differences(case):
    if case.number or not case.info.supports_gradgrad:
        pytest.skip("torch has none, or another case of the module has it")
    module = case.ours()
    held = {name: p.detach().requires_grad_() for name, p in module.named_parameters()}
    name = next(name for name in held if ".original" in name)

    def value(coordinate: Tensor) -> Tensor:
        with torch.nn.utils.stateless._reparametrize_module(module, held | {name: coordinate}):
            return total(case.call(module)).square()

    with sdpa_kernel(SDPBackend.MATH):  # torch's others have no second derivatives
        assert torch.autograd.gradgradcheck(value, [held[name]], fast_mode=True)


@over_cases
def test_inputs_need_not_be_contiguous(case):
    module, found = case.ours(), []
    for change in (lambda x: x, lambda x: torch.stack([x, x], -1)[..., 0] if x.dim() else x):
        module.zero_grad()
        total(case.call(module, change)).backward()
        found.append([p.grad for p in module.parameters() if p.grad is not None])
    assert_same(found[0], found[1], 1e-12)


@over_cases
def test_hooks_are_called_in_the_order_of_the_twins(case):
    called = []
    for module in (case.ours(), case.plain()):
        called.append([])

        def noting(word: str, heard: list[str] = called[-1]) -> Any:
            return lambda *_: heard.append(word)

        module.register_forward_pre_hook(noting("before"))
        module.register_forward_hook(noting("after"))
        module.register_full_backward_pre_hook(noting("before gradients"))
        module.register_full_backward_hook(noting("after gradients"))
        module.register_state_dict_pre_hook(noting("saving"))
        module.register_state_dict_post_hook(noting("saved"))
        module.register_load_state_dict_pre_hook(noting("loading"))
        module.register_load_state_dict_post_hook(noting("loaded"))
        total(case.call(module, lambda x: x.requires_grad_(x.is_floating_point()))).backward()
        module.load_state_dict(module.state_dict())
    assert called[0] == called[1]
    assert len(called[0]) >= 7


@over_cases
def test_copies_compute_the_same_and_train_alone(case):
    module, saved = case.ours(), io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    expected = case.call(module)
    assert case.info.module_cls.__name__ in repr(module)
    assert "(parametrizations): ModuleDict" in repr(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(saved, weights_only=False)):
        assert_same(case.call(other), expected)
        assert repr(other) == repr(module)
        with torch.no_grad():
            for p in other.parameters():
                p.neg_()
    assert_same(case.call(module), expected)


@over_cases
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_holds_all_of_it(case, assign):
    other = case.ours(init=None if case.map in SQUARE else "haar")
    module, saved = case.ours(), io.BytesIO()
    torch.save(module.state_dict(), saved)
    saved.seek(0)
    found = other.load_state_dict(torch.load(saved, weights_only=True), assign=assign)
    assert not found.missing_keys
    assert not found.unexpected_keys
    assert_same(case.call(other), case.call(module))


@over_cases
def test_a_cast_module_computes_what_the_cast_twin_does_and_comes_back(case):
    module = case.ours()
    twin = case.twin(module).float()
    module.float()
    for name, p in twin.named_parameters():
        # The nearest float32 of either frame: a rounding of the entries, another of float32 coordinates.
        assert_same(attrgetter(name)(module), p, 1e-6 if case.map != "margin" else 1e-4)
    module.double()
    assert_same(case.call(module), case.call(case.twin(module)))


@over_cases
def test_formats_of_memory_are_kept_as_by_the_twin(case):
    module = case.ours()
    twin = case.twin(module)
    for dim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if not any(p.dim() == dim for p in twin.parameters()):
            continue

        def change(x: Tensor, dim: int = dim, layout: Any = layout) -> Tensor:
            return x.contiguous(memory_format=layout) if x.dim() == dim else x

        found = case.call(module.to(memory_format=layout), change)
        expected = case.call(twin.to(memory_format=layout), change)
        assert_same(found, expected, 1e-12)
        # A kernel is computed in rows: where the input has no format of its own, there is none.
        if any(x.dim() == dim for x in tensors(case.input(True).forward_input.args)):
            assert [x.stride() for x in tensors(found)] == [x.stride() for x in tensors(expected)]


@over_cases
def test_on_the_meta_device_it_is_refused_for_it_holds_no_values(case):
    with pytest.raises((errors.UnfilledError, RuntimeError), match=r"needs filled coordinates|meta tensors") as caught:
        case.call(case.ours().to("meta"), lambda x: x.to("meta"))
    if type(caught.value) is RuntimeError:  # torch's own, which reads values of masks before the weight
        with pytest.raises(RuntimeError, match="meta tensors"):
            case.call(case.plain().to("meta"), lambda x: x.to("meta"))


WITH_ERRORS = [info for info in WITH_MATRICES if info.module_error_inputs_func is not None]


@pytest.mark.parametrize("info", WITH_ERRORS, ids=lambda info: info.name)
def test_what_the_module_refuses_is_refused_in_its_words(info):
    found = info.module_error_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=False, training=True)
    refused = [error for error in found if error.error_on.name == "FORWARD_ERROR"]
    assert refused
    for error in refused:
        made, taken = error.module_error_input.constructor_input, error.module_error_input.forward_input
        module = info.module_cls(*made.args, **made.kwargs)
        for name in matrices(module):
            sk.orthogonal(module, name)
        with pytest.raises(error.error_type, match=error.error_regex):
            module(*taken.args, **taken.kwargs)
