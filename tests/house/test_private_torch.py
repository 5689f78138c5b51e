"""What `stiefelkit._torch` takes of torch does what is said there."""

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from stiefelkit import _torch


class Counting(_torch.TorchDispatchMode):
    """Counts the operators that it sees."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def looking(ask: Callable[[], bool]) -> tuple[nn.Module, list[bool]]:
    """A module, and what it was told at each of its calls."""
    seen: list[bool] = []

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(ask())
            return x + 1

    return Looking().eval(), seen


@pytest.fixture
def parametrized() -> Any:
    module = nn.Linear(2, 2)
    parametrize.register_parametrization(module, "weight", nn.Identity())
    return module


def test_is_transformed_inside_vmap_and_grad() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_transformed())
        return x.sum()

    look(torch.ones(2))
    torch.vmap(look)(torch.ones(2, 2))
    torch.func.grad(look)(torch.ones(2))
    assert seen == [False, True, True]


def test_is_view_of_what_shares_memory() -> None:
    x = torch.ones(2, 2)
    assert [_torch.is_view(t) for t in (x, x[0], x[0].clone())] == [False, True, False]


def test_write_count_grows_with_what_is_written_in_place() -> None:
    x = torch.ones(2)
    before = _torch.write_count(x)
    x.sum()
    assert _torch.write_count(x) == before
    x.add_(1)
    assert _torch.write_count(x) > before


def test_copy_each_writes_to_tensors_and_counts_it() -> None:
    ours, theirs = [nn.Parameter(torch.zeros(2)) for _ in range(2)], list(torch.ones(2, 2))
    before = [_torch.write_count(x) for x in ours]
    with torch.no_grad():
        _torch.copy_each([x.detach() for x in ours], theirs)
    assert all(map(torch.equal, ours, theirs))
    assert [_torch.write_count(x) for x in ours] == [1 + count for count in before]


def test_a_module_holds_what_was_registered_by_name() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    assert list(_torch.held_modules(net)) == ["0"]
    assert _torch.held_parameters(net) == _torch.held_buffers(net) == {}
    assert list(_torch.held_parameters(net[0])) == ["weight", "bias"]
    assert list(_torch.held_buffers(net[0])) == ["running_mean", "running_var", "num_batches_tracked"]
    net.register_parameter("missing", None)
    assert _torch.held_parameters(net) == {"missing": None}


def test_a_module_holds_its_hooks() -> None:
    net = nn.Linear(2, 2)
    net.register_forward_pre_hook(print)
    handle = net.register_forward_hook(lambda *args: None)
    net.register_load_state_dict_pre_hook(lambda *args: None)
    assert list(_torch.forward_pre_hooks(net).values()) == [print]
    assert list(_torch.forward_hooks(net)) == [handle.id]
    assert len(_torch.load_pre_hooks(net)) == 1
    net.register_full_backward_pre_hook(lambda *args: None)
    net.register_full_backward_hook(lambda *args: None)
    assert [len(hooks) for hooks in _torch.call_hooks(net)] == [1, 1, 1, 1]


def test_is_traced_by_make_fx_jit_compile_and_export() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    class Looking(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1 if _torch.is_traced() else x + 2

    look, x = Looking(), torch.zeros(2)
    traced: Any = torch.jit.trace(look, x, check_trace=False)
    assert (look(x) == 2).all()
    with torch.no_grad():
        assert (make_fx(look)(x)(x) == 1).all()
    assert (traced(x) == 1).all()
    assert (torch.compile(look, backend="eager", fullgraph=True)(x) == 1).all()
    assert (torch.export.export(look, (x,)).module()(x) == 1).all()
    assert not _torch.is_traced()


def test_a_function_is_marked_constant_as_the_compiler_does() -> None:
    def ours() -> None: ...

    def torchs() -> None: ...

    assert vars(_torch.constant_in_traced_code(ours)) == vars(torch.compiler.assume_constant_result(torchs)) != {}


def test_is_intercepted_by_transforms_modes_and_tracers() -> None:
    (look, seen), x = looking(_torch.is_intercepted), torch.zeros(2)
    look(x)
    torch.vmap(look)(x)
    with Counting():
        look(x)
    torch.jit.trace(look, x, check_trace=False)
    torch.fx.symbolic_trace(look)
    look(x)
    assert seen == [False, True, True, True, True, False]


def test_dispatch_modes_counts_those_that_are_open() -> None:
    counts = [_torch.dispatch_modes()]
    with Counting(), Counting():
        counts.append(_torch.dispatch_modes())
    assert [*counts, _torch.dispatch_modes()] == [0, 2, 0]


def test_is_in_backward_in_hooks_of_gradients() -> None:
    x, seen = torch.ones(2, requires_grad=True), []
    x.register_hook(lambda g: seen.append(_torch.is_in_backward()))
    x.sum().backward()
    assert [*seen, _torch.is_in_backward()] == [True, False]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_anew_tells_when_it_was_computed(use_reentrant: bool) -> None:
    x, seen, passes = torch.ones(2, requires_grad=True), [], []

    def noted(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.autograd_time())
        passes.append(_torch.backward_pass())
        return x.exp()

    ys: list[Any] = [checkpoint(noted, x, use_reentrant=use_reentrant) for _ in range(2)]
    (ys[0] * ys[1]).sum().backward()
    assert seen[0] < seen[1] <= _torch.autograd_time()
    first, second = sorted(seen[2:])
    assert first < seen[0] <= second < seen[1] if use_reentrant else seen[0] <= first < seen[1] <= second
    assert passes[:2] == [-1, -1]
    assert passes[2] == passes[3] != -1


def test_saved_tensors_have_hooks_inside_their_context() -> None:
    assert not _torch.has_saved_tensor_hooks()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert _torch.has_saved_tensor_hooks()
    assert not _torch.has_saved_tensor_hooks()


class CountingExports(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if _torch.is_exporting() else x


@pytest.mark.parametrize("strict", [False, True])
def test_is_exporting_under_export_and_not_under_compile(strict: bool) -> None:
    x = torch.zeros(2)
    assert torch.export.export(CountingExports(), (x,), strict=strict).module()(x)[0] == 1
    assert torch.compile(CountingExports(), fullgraph=True, backend="eager")(x)[0] == 0
    assert CountingExports()(x)[0] == 0


def test_is_exported_while_onnx_exports() -> None:
    pytest.importorskip("onnxscript")
    (look, seen), x = looking(_torch.is_exported), torch.zeros(2)
    look(x)
    torch.onnx.export(look, (x,), dynamo=True, verbose=False)
    assert not seen[0]
    assert seen[1:]
    assert all(seen[1:])


def test_forward_mode_is_open_in_jvp_and_in_dual_level() -> None:
    levels = []

    def look(x: torch.Tensor) -> torch.Tensor:
        levels.append((_torch.is_in_forward_mode(), _torch.levels_of_forward_mode()))
        with torch.no_grad():
            assert _torch.is_differentiated() == _torch.is_in_forward_mode()
        assert _torch.is_differentiated()
        return x * 2

    x = torch.ones(2)
    look(x)
    torch.func.grad(lambda x: look(x).sum())(x)
    torch.func.jvp(look, (x,), (x,))
    torch.func.jvp(lambda x: torch.func.jvp(look, (x,), (x,))[1], (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        look(x)
    assert levels == [(False, 0), (False, 0), (True, 1), (True, 2), (True, 0)]


def test_a_level_of_vmap_is_seen_through_those_of_grad() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.is_mapped())
        return x.sum()

    look(torch.ones(2))
    torch.func.grad(look)(torch.ones(2))
    torch.func.vmap(torch.func.grad(look))(torch.ones(3, 2))
    assert seen == [False, False, True]


def test_a_batch_that_autograd_hides_is_shown_and_hidden_again() -> None:
    seen: list[Any] = []

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            shown, level = _torch.unbatched(g)
            seen.extend([_torch.is_batched(g), _torch.is_batched(shown), tuple(shown.shape)])
            return _torch.batched(shown * 2, level)

    x = torch.ones(3, requires_grad=True)
    (found,) = torch.autograd.grad(Twice.apply(x), x, torch.eye(3), is_grads_batched=True)  # type: ignore[arg-type]
    assert torch.equal(found, 2 * torch.eye(3))
    assert seen == [True, False, (3, 3)]


def test_what_torch_func_wraps_of_a_constant_is_unwrapped() -> None:
    kept: list[torch.Tensor] = []

    def keeping(x: torch.Tensor) -> torch.Tensor:
        kept.append(_torch.unwrapped(torch.arange(3) + 1))
        return x.sum()

    torch.func.grad(keeping)(torch.ones(2))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(kept[0])  # pyright: ignore[reportAttributeAccessIssue]
    assert kept[0].tolist() == [1, 2, 3]


def test_cached_weights_are_those_of_torchs_context_until_it_ends(parametrized: Any) -> None:
    with parametrize.cached():
        assert _torch.is_cached()
        w = parametrized.weight
        assert [(key[1], kept is w) for key, kept in _torch.cached_weights().items()] == [("weight", True)]
    assert not _torch.is_cached()
    assert _torch.cached_weights() == {}


def test_class_name_is_that_of_a_module_before_its_parametrization(parametrized: Any) -> None:
    assert type(parametrized).__name__ != "Linear"
    assert _torch.class_name(parametrized) == "Linear"


def test_injected_properties_read_the_weight_from_its_list(parametrized: Any) -> None:
    (own,) = _torch.injected_properties(["weight"]).values()
    assert isinstance(own, property)
    assert own.fget is not None
    assert torch.equal(own.fget(parametrized), parametrized.parametrizations.weight())


def test_a_list_of_parametrizations_has_the_attributes_that_ours_sets_in_its_place(parametrized: Any) -> None:
    from stiefelkit.parametrizations.stiefel_point import StiefelPoint
    from stiefelkit.weights.coordinate_list import CoordinateList

    torchs = parametrized.parametrizations.weight
    added = vars(torchs).keys() - vars(nn.ModuleList()).keys()
    assert added == {"unsafe", "is_tensor", "ntensors"}
    ours = CoordinateList(StiefelPoint((2, 2)), [torch.eye(2)])
    assert added <= vars(ours).keys()
    assert "original" in torchs._parameters
    assert "original0" in ours._parameters


def test_the_name_of_a_pruned_parameter() -> None:
    module = prune.identity(nn.Linear(2, 2), "weight")
    (hook,) = _torch.forward_pre_hooks(module).values()
    assert _torch.pruned_name(hook) == "weight"
    assert _torch.pruned_name(print) is None


def test_operators_are_taken_apart_and_redispatched() -> None:
    aten = torch.ops.aten
    assert _torch.is_composite(aten.matmul.default)
    assert not _torch.is_composite(aten.mm.default)
    x = torch.ones(2, 2)
    assert torch.equal(aten.mm.default.redispatch(_torch.kernels_of("cpu"), x, x), x @ x)
    assert _torch.kernels_of("cuda") is not None
    assert _torch.kernels_of("meta") is None


def test_a_mode_that_is_pushed_sees_operators_until_it_is_popped() -> None:
    counting, x = Counting(), torch.ones(2)
    _torch.push_mode(counting)
    try:
        x.add(1)
    finally:
        _torch.pop_mode()
    x.add(1)
    assert counting.count == 1


def test_the_scan_of_torch_runs_a_recurrence() -> None:
    last, out = _torch.higher_order_scan(lambda h, x: (h + x, h * 1), torch.zeros(2), torch.ones(3, 2))
    assert torch.equal(last, torch.full((2,), 3.0))
    assert torch.equal(out[:, 0], torch.arange(3.0))


def test_every_convolution_is_one() -> None:
    for kind in (nn.Conv1d, nn.Conv3d, nn.ConvTranspose2d):
        assert issubclass(kind, _torch.Convolution)
    assert not issubclass(nn.Linear, _torch.Convolution)


def test_wrappers_of_activation_checkpointing_hold_a_module_under_one_name() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper

    layer = nn.Linear(2, 2)
    assert _torch.inside_checkpoint(layer) is layer
    for wrap in (checkpoint_wrapper, offload_wrapper):
        wrapped = wrap(layer)
        assert list(_torch.held_modules(wrapped)) == [_torch.CHECKPOINTED]
        assert _torch.inside_checkpoint(wrapped) is layer


def test_every_name_of_the_room_is_tried_here() -> None:
    tried = {node.attr for node in ast.walk(ast.parse(Path(__file__).read_text())) if isinstance(node, ast.Attribute)}
    assert set(_torch.__all__) - tried - {"is_jit_traced"} == set()


def test_check_capture_asks_whether_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = torch.optim.Adam([torch.zeros(1)])
    _torch.check_capture(optimizer)
    capturing = SimpleNamespace(is_capturing=lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=True: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: capturing)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="capturable"):
        _torch.check_capture(optimizer)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_an_unhooked_step_calls_no_hook_and_does_what_step_does(kind: Any) -> None:
    pair = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    inner, alone = (kind([p], lr=0.1) for p in pair)
    called: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: called.append("every")),
        inner.register_step_post_hook(lambda *_: called.append("own")),
    ]
    for p in pair:
        p.grad = torch.ones(2)
    _torch.unhooked_step(kind)(inner)
    assert not called
    assert _torch.unhooked_step(kind) is not kind.step
    for handle in handles:
        handle.remove()
    alone.step()
    assert torch.equal(*pair)


def test_is_view_operator_of_what_shares_memory_with_its_argument() -> None:
    aten = torch.ops.aten
    views, others = (aten.transpose.int, aten.view.default, aten.split.Tensor), (aten.mm.default, aten.add_.Tensor)
    assert all(map(_torch.is_view_operator, views))
    assert not any(map(_torch.is_view_operator, others))
    assert [*map(_torch.is_writing_operator, others)] == [False, True]


def test_lazy_conjugates_are_resolved_by_kernels_inside_a_mode() -> None:
    class Entering(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace != "stiefelkit_tests":
                return func(*args, **(kwargs or {}))
            with self, _torch.lazy_conjugates():
                return func.redispatch(_torch.kernels_of("cpu"), *args)

    a = torch.randn(2, 2, dtype=torch.complex128)
    with Entering():
        assert torch.equal(skew_part_of(a), a - a.mH)


@torch.library.custom_op("stiefelkit_tests::skew_part_of", mutates_args=())
def skew_part_of(a: torch.Tensor) -> torch.Tensor:
    return a - a.mH
