"""Layers that adapters and rotations take: where their features are, and what they compute, asked of a copy."""

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit._torch import call_hooks
from stiefelkit.errors import DtypeError, needs
from stiefelkit.tensors import is_sharded


class Layout(NamedTuple):
    """The features of a kind of layers: attributes that hold their numbers, and their dimensions."""

    inputs: str | None = "in_features"  # None for indices
    outputs: str = "out_features"
    axes: tuple[int, int] = (1, 0)  # of inputs and of outputs in the weight
    dim: int = -1  # of features in what the layer reads and gives


_TABLE = Layout(None, "embedding_dim", (0, 1))
LAYOUTS: Mapping[str, Layout] = {
    "Linear": Layout(),
    "Conv1D": Layout("nx", "nf", (0, 1)),  # of transformers
    "Embedding": _TABLE,
    "EmbeddingBag": _TABLE,
    **{f"Conv{t}{d}d": Layout("in_channels", "out_channels", dim=-1 - d) for d in (1, 2, 3) for t in ("", "Transpose")},
}
"""Layouts by the name of a layer's class, or of one that it derives from; any other layer may have `Linear`'s."""
_OF_CONVOLUTIONS = "in_channels out_channels kernel_size stride padding dilation groups padding_mode"
PASSED_ON = frozenset(f"nx nf num_embeddings embedding_dim padding_idx {_OF_CONVOLUTIONS}".split())
"""Attributes that an adapter has because its layer has them; in_features, out_features and bias are its own."""
OF_PEFT = ("get_base_layer", "base_layer", "unload_and_optionally_merge_module")
"""Attributes by which PEFT knows its own layers: what they wrap they merge into, and put back."""
_PLAIN = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def attribute(thing: object, *names: str, default: Any = None) -> Any:
    """Returns the first attribute of these names that layers, models and configurations of others have."""
    return next((found for name in names if (found := getattr(thing, name, None)) is not None), default)


def inside_peft(layer: nn.Module) -> nn.Module:
    """Returns the layer inside a layer of PEFT, any other as it is."""
    find = attribute(type(layer), "get_base_layer")
    inner = find(layer) if callable(find) else layer
    return inner if isinstance(inner, nn.Module) else layer


def tensor_of(layer: nn.Module, name: str) -> Tensor | None:
    """Returns an attribute of a layer if it is a tensor."""
    found = attribute(layer, name)
    return found if isinstance(found, Tensor) else None


def size_of(layer: nn.Module, key: str | None) -> int | None:
    """Returns how many features a layer has, by the attribute that says so; None if it has no such number."""
    n = None if key is None else attribute(layer, key)
    return n if type(n) is int else None


def layout_of(layer: nn.Module) -> Layout | None:
    """Returns the layout of a layer, of PEFT's layers that of the one inside; None if its features are not known."""
    base = inside_peft(layer)
    named = [LAYOUTS[cls.__name__] for cls in type(base).__mro__ if cls.__name__ in LAYOUTS]
    for layout in [*named, Layout()]:
        if all(size_of(base, key) is not None for key in (layout.inputs, layout.outputs) if key is not None):
            return layout
    return None


def reference_tensor(layer: nn.Module, who: str) -> Tensor:
    """Returns a tensor of the dtype and on the device that an adapter of a layer computes by."""
    held = [t for t in [tensor_of(layer, "weight"), *layer.parameters(), *layer.buffers()] if t is not None]
    is_real = not any(t.is_complex() for t in held)
    needs(is_real, DtypeError, who, "a layer of a real dtype", f"{type(layer).__name__} with complex numbers")
    floating = [t for t in held if t.is_floating_point()]
    return floating[0] if floating else torch.empty(0, device=held[0].device if held else None)


def along(function: Callable[[Tensor], Tensor], x: Tensor, dim: int) -> Tensor:
    """Returns what a function of vectors in the last dimension gives for vectors in another one."""
    return function(x) if dim == -1 else function(x.movedim(dim, -1)).movedim(-1, dim)


def applied(layer: nn.Module, weight: Tensor, x: Tensor) -> Tensor:
    """Returns what a layer that computes W x + b gives with another weight."""
    layout = layout_of(layer)
    if layout is not None and layout.inputs is not None and layout.dim == -1:
        return F.linear(x, weight if layout.axes == (1, 0) else weight.mT, tensor_of(layer, "bias"))
    return torch.func.functional_call(layer, {"weight": weight}, (x,))


def has_own_forward(module: nn.Module) -> bool:
    """Returns whether a call runs other code than torch's own layer, on the class or on the instance."""
    is_torchs = any(type(module).forward is plain.forward for plain in _PLAIN)
    return not is_torchs or "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__


def foreign_hooks(layer: nn.Module) -> bool:
    """Returns whether a call of a layer runs hooks, but for transformers' that makes outputs require gradients."""
    hooks = [hook for table in call_hooks(layer) for hook in table.values()]
    return any(attribute(hook, "__name__") != "make_inputs_require_grads" for hook in hooks)


def obstacle(layer: nn.Module) -> str | None:
    """Returns what a layer visibly has beside one matrix and a bias, as the end of a sentence, or None."""
    if foreign_hooks(layer):
        return f"{type(layer).__name__} with hooks; remove them first"
    for name, _ in layer.named_parameters():
        if name not in ("weight", "bias") and not name.startswith("parametrizations."):
            return f"{type(layer).__name__} with {name} beside them; merge it into the layer first"
    return None


@torch.no_grad()
def beyond_affine(layer: nn.Module) -> str | None:
    """Returns what a layer does beyond W x + b of its own weight and bias, as the end of a sentence, or None.

    A forward that is not torch's is run on a copy in float64, in training and not, on the unit vectors and others.
    """
    found = obstacle(layer) or beyond_one_matrix(layer)
    if found is not None or not has_own_forward(layer):
        return found
    layout, w, b = layout_of(layer), attribute(layer, "weight"), tensor_of(layer, "bias")
    if layout is None or layout.inputs is None or w.dim() != 2:
        return f"{type(layer).__name__}, whose forward is not torch's"
    w = w if layout.axes == (1, 0) else w.mT
    n, x = w.shape[1], probes(w.shape[1], w.device)
    x = torch.cat([torch.eye(n, dtype=x.dtype, device=w.device), x, 64 * x, x / 64, 0 * x[:1]])
    exact = F.linear(x, w.double(), None if b is None else b.double())
    devices = [w.device] if w.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autocast(w.device.type, enabled=False):
        for is_training in (False, True):
            try:
                rows = zip(twin(layer).train(is_training)(x), exact, strict=True)
            except Exception as error:  # whatever a stranger's forward raises
                return f"{type(layer).__name__}, which cannot be tried ({type(error).__name__})"
            if not all(y.shape == row.shape and agree(y, row, n) for y, row in rows):
                return f"{type(layer).__name__}, whose forward does more"
    return None


def beyond_one_matrix(layer: nn.Module) -> str | None:
    """Returns what a layer has in place of one weight of real numbers and a bias, as the end of a sentence, or None."""
    kind, w = type(layer).__name__, tensor_of(layer, "weight")
    is_real = w is not None and w.is_floating_point() and w.dim() >= 2
    if w is None or not is_real or (hasattr(type(w), "__tensor_flatten__") and not is_sharded(w)):
        return f"{kind} without a matrix of real numbers as its weight"
    if not isinstance(attribute(layer, "bias"), Tensor | None):
        return f"{kind} with a bias that is no tensor"
    if attribute(layer, "groups", default=1) != 1:
        return f"{kind} of {layer.groups} groups, whose channels the product would mix"
    if attribute(layer, "max_norm") is not None:
        return f"{kind} with max_norm, which scales rows"
    if not isinstance(layer, nn.Linear) and "parametrizations" in dict(layer.named_children()):
        return f"{kind} with a parametrized weight; bake it first"
    return None


def in_other_adapters(model: nn.Module) -> dict[int, str]:
    """Returns by their id the modules inside layers of PEFT and its like, each with the class of that layer."""
    theirs = [m for m in model.modules() if any(callable(getattr(type(m), name, None)) for name in OF_PEFT)]
    classes = [(module, f"{type(module).__module__}.{type(module).__qualname__}") for module in theirs]
    return {id(inner): cls for module, cls in classes for inner in module.modules() if inner is not module}


def twin(module: nn.Module, **values: Tensor) -> nn.Module:
    """Returns a copy of a module in float64, without hooks and not in training, with other values of parameters."""
    other = copy.deepcopy(module).double().eval()
    for hooks in call_hooks(other):
        hooks.clear()
    for name, value in values.items():
        other.get_parameter(name).copy_(value)
    return other


def probes(n: int, device: torch.device) -> Tensor:
    """Returns eight random vectors of n entries, in float64 and always the same."""
    source = torch.Generator().manual_seed(0)
    return torch.randn(8, n, dtype=torch.float64, generator=source, device="cpu").to(device)


def agree(one: Tensor, other: Tensor, n: int) -> bool:
    """Returns whether results on n features are the same but for rounding in float32, in which many modules compute."""
    bound = 4 * (math.log2(n) + 4) * torch.finfo(torch.float32).eps  # a sum by halves has at most log2 n roundings
    return bool(torch.dist(one.double(), other.double()) <= bound * torch.linalg.vector_norm(other.double()))
