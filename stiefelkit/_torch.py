"""The private parts of torch that the package uses, each under a name of our own.

No other file names anything private of torch, except what a class inherits. tests/house/test_private_torch.py says what
each of these has to do, and so which one it was when torch renames or changes it.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch  # type: ignore[attr-defined]
from torch._higher_order_ops.scan import scan as higher_order_scan
from torch.autograd import forward_ad
from torch.fx import _symbolic_trace as symbolic_trace
from torch.nn.modules.conv import _ConvNd as Convolution
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _pop_mode as pop_mode
from torch.utils._python_dispatch import _push_mode as push_mode

__all__ = [
    "CHECKPOINTED", "Convolution", "TorchDispatchMode", "autograd_time", "backward_pass", "batched", "cached_weights",
    "call_hooks", "check_capture", "class_name", "constant_in_traced_code", "copy_each", "dispatch_modes",
    "forward_hooks", "forward_pre_hooks", "has_saved_tensor_hooks", "held_buffers", "held_modules", "held_parameters",
    "higher_order_scan", "injected_properties", "inside_checkpoint", "is_batched", "is_cached", "is_composite",
    "is_differentiated", "is_exported", "is_exporting", "is_in_backward", "is_in_forward_mode", "is_intercepted",
    "is_jit_traced", "is_mapped", "is_traced", "is_transformed", "is_view", "is_view_operator",
    "is_writing_operator", "kernels_of",
    "lazy_conjugates", "levels_of_forward_mode", "load_pre_hooks", "pop_mode", "pruned_name", "push_mode",
    "unbatched", "unhooked_step", "unwrapped", "write_count",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

CHECKPOINTED = "_checkpoint_wrapped_module"
"""The child of a wrapper of torch.distributed that checkpoints activations; not in the keys of state dicts."""

is_transformed = torch._C._are_functorch_transforms_active
"""Returns whether a transform of torch.func is active: vmap, grad, jvp and others."""
dispatch_modes = torch._C._len_torch_dispatch_stack
"""Returns how many modes see each operator, as fake tensors and make_fx do."""
is_cached: Callable[[], int] = functools.partial(getattr, parametrize, "_cache_enabled")
"""Returns how many contexts of `torch.nn.utils.parametrize.cached()` are open."""
is_view = Tensor._is_view
write_count = operator.attrgetter("_version")
"""Returns how often a tensor has been written to."""
copy_each = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]
"""Copies tensors into others, pair by pair, in one call."""
held_parameters = operator.attrgetter("_parameters")
"""Name to parameter, or None, of a module without those inside it; not by getattr, which a wrapper may pass on."""
held_buffers = operator.attrgetter("_buffers")
forward_hooks = operator.attrgetter("_forward_hooks")
forward_pre_hooks = operator.attrgetter("_forward_pre_hooks")
load_pre_hooks = operator.attrgetter("_load_state_dict_pre_hooks")


def call_hooks(module: nn.Module) -> list[dict[int, Any]]:
    """Returns the tables of what runs at each call of a module, before, after or in its backward pass.

    A function, since torch.compile traces no attrgetter.
    """
    return [module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks]


def class_name(module: nn.Module) -> str:
    """Returns the name of a module's class, without what torch's `parametrize` puts before it."""
    return type(module).__name__.removeprefix("Parametrized")


def held_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns name to child, or None, of a module; a function, since torch.compile traces no attrgetter."""
    return module._modules


def inside_checkpoint(module: nn.Module) -> nn.Module:
    """Returns the module inside a wrapper that checkpoints activations, any other as it is."""
    # Not by the class, whose import takes all of torch.distributed along.
    return module._modules.get(CHECKPOINTED) or module if CHECKPOINTED in module._modules else module


def is_traced() -> bool:
    """Returns whether torch.compile, torch.export, make_fx or torch.jit.trace is tracing.

    No value may be branched on then, and no tensor kept for later that was made meanwhile.
    """
    if torch.compiler.is_compiling():
        return True
    # Only make_fx puts a proxy mode among the dispatch modes.
    if dispatch_modes() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY):
        return True
    return torch._C._get_tracing_state() is not None


def is_jit_traced() -> bool:
    """Returns whether torch.jit.trace is tracing, which does it twice and wants the same with and without gradients."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


def constant_in_traced_code(function: F) -> F:
    """Makes compilers call a function without tracing it: `torch.compiler.assume_constant_result`, but imports none."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_exporting() -> bool:
    """Returns whether torch.export is tracing; in torch 2.11 Dynamo takes `torch.compiler.is_exporting()` for True."""
    return torch.compiler._is_exporting_flag


def is_exported() -> bool:
    """Returns whether `torch.onnx.export(dynamo=True)` is tracing: ONNX lacks our operators and a matrix inverse."""
    if not is_exporting():
        return False
    from torch.onnx._internal.exporter import _flags

    # Not torch.onnx.is_in_onnx_export(), which Dynamo takes for False.
    return _flags._is_onnx_exporting


def is_intercepted() -> bool:
    """Returns whether a compiler, torch.func, a dispatch mode or a tracer sees each operator."""
    return (
        torch.compiler.is_compiling()
        or is_transformed()
        or dispatch_modes() > 0
        or torch._C._get_tracing_state() is not None
        or symbolic_trace.is_fx_symbolic_tracing()
    )


def backward_pass() -> int:
    """Returns the number of the backward pass that this thread is in, -1 for none."""
    return torch._C._current_graph_task_id()


def is_in_backward() -> bool:
    """Returns whether this thread is inside a backward pass: in a hook, or in a checkpoint that computes anew."""
    return backward_pass() != -1


def autograd_time() -> int:
    """Returns the number that autograd's next node gets; in a backward pass that of the node that runs.

    A node has the number of its forward pass, so that what a checkpoint computes anew tells when that was.
    """
    node = torch._C._current_autograd_node()  # type: ignore[attr-defined]
    if node is None:
        return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]
    return node._sequence_nr()


def has_saved_tensor_hooks() -> bool:
    """Returns whether what autograd saves goes through hooks, as of `torch.utils.checkpoint` without reentrance."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # type: ignore[attr-defined]


def is_in_forward_mode() -> bool:
    """Returns whether a level of forward mode is open, of torch.autograd or of torch.func."""
    return forward_ad._current_level >= 0 or levels_of_forward_mode() > 0


def is_differentiated() -> bool:
    """Returns whether operations may be differentiated: in grad mode, or in forward mode, which does without it.

    A backward pass runs without grad mode; in forward over reverse its operations have tangents all the same.
    """
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and is_in_forward_mode())


def levels_of_forward_mode() -> int:
    """Returns how many levels of torch.func's forward mode are open."""
    stack = functorch.get_interpreter_stack()
    return 0 if stack is None else sum(level.key() == functorch.TransformType.Jvp for level in stack)


def is_mapped() -> bool:
    """Returns whether a level of torch.func's vmap is open."""
    stack = functorch.get_interpreter_stack()
    return stack is not None and any(level.key() == functorch.TransformType.Vmap for level in stack)


def unwrapped(constant: Tensor) -> Tensor:
    """Returns the tensor inside torch.func's wrappers: what is kept must not outlive their level."""
    while functorch.is_functorch_wrapped_tensor(constant):
        constant = functorch.get_unwrapped(constant)
    return constant


def is_batched(g: object) -> bool:
    """Returns whether torch.autograd has batched a tensor, by `is_grads_batched`; it knows few operations."""
    return isinstance(g, Tensor) and functorch.is_legacy_batchedtensor(g)


def unbatched(g: Tensor) -> tuple[Tensor, int]:
    """Returns the tensor with its batch dimension in front, and the number of the batching that hid it."""
    for level in range(1, 65):
        plain = torch._remove_batch_dim(g, level, 1, 0)  # type: ignore[attr-defined]
        if not is_batched(plain):
            return plain, level
    raise NotImplementedError("Batched gradients need one batch dimension, got a gradient that is batched twice.")


def batched(x: Tensor, level: int) -> Tensor:
    """Hides the first dimension again."""
    return torch._add_batch_dim(x, 0, level)  # type: ignore[attr-defined]


def cached_weights() -> dict[Any, Any]:
    """Returns what `torch.nn.utils.parametrize.cached()` keeps until it ends: weights by an id and their name."""
    return parametrize._cache


def injected_properties(names: Sequence[str]) -> dict[str, Any]:
    """Returns the properties by which torch has a module read parametrized weights."""
    # On a bare module, since torch insists that the names are no attributes yet.
    bare, found = nn.Module(), {}
    parametrize._inject_new_class(bare)
    for name in names:
        parametrize._inject_property(bare, name)
        found[name] = vars(type(bare))[name]
    return found


def pruned_name(hook: Any) -> str | None:
    """Returns which parameter of its module a hook of torch.nn.utils.prune prunes."""
    return getattr(hook, "_tensor_name", None)


def is_composite(op: Any) -> bool:
    """Returns whether an operator can be taken apart into others, for every device."""
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return op._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), implicit)


@contextlib.contextmanager
def lazy_conjugates() -> Iterator[None]:
    """Returns a context inside a dispatch mode in which kernels meet conjugates as they do outside of it."""
    out = {key: torch._C._dispatch_tls_is_dispatch_key_excluded(key) for key in ("Conjugate", "Negative")}
    for key in out:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key, was in out.items():
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, was)


def check_capture(optimizer: torch.optim.Optimizer) -> None:
    """Raises while a graph is captured whose groups are not all capturable; warns if they are, and none is."""
    # torch 2.13 has another name for it.
    name = "_accelerator_graph_capture_health_check"
    getattr(optimizer, name if hasattr(optimizer, name) else "_cuda_graph_capture_health_check")()


def unhooked_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """Returns the step of a class of which there are instances, without the hooks that torch puts around it."""
    step: Any = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def is_view_operator(op: Any) -> bool:
    """Returns whether an operator only looks at its argument in another way, and so runs nothing on a device."""
    return any(a.alias_info is not None and not a.alias_info.is_write for a in op._schema.returns)


def is_writing_operator(op: Any) -> bool:
    """Returns whether an operator writes to an argument."""
    return op._schema.is_mutable


def kernels_of(device: str) -> Any:
    """Returns what `redispatch` takes for the kernels of a kind of device, None for other kinds."""
    key = {"cpu": torch._C.DispatchKey.CPU, "cuda": torch._C.DispatchKey.CUDA}.get(device)
    return None if key is None else torch._C.DispatchKeySet(key)
