"""Asks modules what they compute: by their structure where it says so, else by calling a copy."""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit._torch import call_hooks, held_parameters
from stiefelkit.nn.frozen import OF_PEFT, layout_of
from stiefelkit.tensors import is_sharded, working_dtype

_PLAIN = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ROWS = 8
_ROUNDINGS = 4
"""Multiples of the error of torch's own product up to which a result counts as that product."""


def has_own_forward(module: nn.Module) -> bool:
    """Returns whether a call runs other code than torch's own layer, on the class or on the instance."""
    is_torchs = any(type(module).forward is plain.forward for plain in _PLAIN)
    return not is_torchs or "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__


def is_plain(layer: nn.Module) -> bool:
    """Returns whether a call of a layer is torch's own product, with nothing before or after."""
    return not has_own_forward(layer) and not any(call_hooks(layer))


def obstacle(layer: nn.Module) -> str | None:
    """Returns what a layer visibly has beside one matrix and a bias, as the end of a sentence, or None."""
    if any(call_hooks(layer)):
        return f"{type(layer).__name__} with hooks; remove them first"
    for name, _ in layer.named_parameters():
        if name not in ("weight", "bias") and not name.startswith("parametrizations."):
            return f"{type(layer).__name__} with {name} beside them; merge it into the layer first"
    return None


@torch.no_grad()
def beyond_affine(layer: nn.Module) -> str | None:
    """Returns what a layer does beyond W x + b of its own weight and bias, as the end of a sentence, or None.

    A forward that is not torch's is run on a copy, in training and not, on the unit vectors and on random ones.
    """
    found = obstacle(layer) or beyond_one_matrix(layer)
    if found is not None or not has_own_forward(layer):
        return found
    layout = layout_of(layer)
    w: Any = layer.weight
    b: Any = getattr(layer, "bias", None)
    if layout is None or layout.inputs is None or w.dim() != 2:
        return f"{type(layer).__name__}, whose forward is not torch's"
    w = w if layout.axes == (1, 0) else w.mT
    x = probes(w.shape[1], torch.device("cpu"))
    eye = torch.eye(w.shape[1], dtype=x.dtype, device="cpu")
    x = torch.cat([eye, x, 64 * x, x / 64, 0 * x[:1]]).to(w.device, w.dtype)
    wide = working_dtype(w.dtype)
    exact = F.linear(x.to(wide), w.to(wide), None if b is None else b.to(wide))
    devices = [w.device] if w.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autocast(w.device.type, enabled=False):
        bound = _ROUNDINGS * torch.linalg.vector_norm(F.linear(x, w, b).to(wide) - exact, dim=-1)
        bound += _ROUNDINGS * torch.finfo(w.dtype).eps * torch.linalg.vector_norm(exact, dim=-1)
        for is_training in (False, True):
            try:
                y = copy.deepcopy(layer).train(is_training)(x)
                error = torch.linalg.vector_norm(y.to(wide) - exact, dim=-1)
            except Exception as error:  # whatever a stranger's forward raises
                return f"{type(layer).__name__}, which cannot be tried ({type(error).__name__})"
            if y.shape != exact.shape or not bool((error <= bound).all()):
                return f"{type(layer).__name__}, whose forward does more"
    return None


def beyond_one_matrix(layer: nn.Module) -> str | None:
    """Returns what a layer has in place of one weight of real numbers and a bias, as the end of a sentence, or None."""
    w: Any = getattr(layer, "weight", None)
    kind, is_packed = type(layer).__name__, hasattr(type(w), "__tensor_flatten__") and not is_sharded(w)
    is_real = isinstance(w, Tensor) and w.is_floating_point() and w.dim() >= 2 and not is_packed
    if not is_real or not isinstance(getattr(layer, "bias", None), Tensor | None):
        return f"{kind} without a matrix of real numbers as its weight"
    if getattr(layer, "groups", 1) != 1:
        return f"{kind} of {layer.groups} groups, whose channels the product would mix"
    if getattr(layer, "max_norm", None) is not None:
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
        held_parameters(other)[name].copy_(value)  # type: ignore[union-attr]
    return other


def probes(n: int, device: torch.device) -> Tensor:
    """Returns random vectors of n entries, in float64 and always the same."""
    source = torch.Generator().manual_seed(0)
    return torch.randn(_ROWS, n, dtype=torch.float64, generator=source, device="cpu").to(device)


def agree(one: Tensor, other: Tensor, n: int) -> bool:
    """Returns whether results on n features are the same but for rounding in float32, in which many modules compute.

    A sum of n numbers by halves has at most log2 n roundings.
    """
    bound = _ROUNDINGS * (math.log2(n) + 4) * torch.finfo(torch.float32).eps
    return bool(torch.dist(one.double(), other.double()) <= bound * torch.linalg.vector_norm(other.double()))
