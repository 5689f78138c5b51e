"""Rotations of queries and keys behind their position encoding (R3), so that the cache holds rotated keys."""

import functools
import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stiefelkit import init
from stiefelkit.errors import OptionError, ShapeError, needs
from stiefelkit.nn.decoders import RotationSites, check_sites
from stiefelkit.nn.frozen import attribute
from stiefelkit.nn.rotation import checked_rotation
from stiefelkit.tensors import computing_dtype

_PREFIX = "stiefelkit_rotated_"
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""Names of the argument, by models and releases of transformers."""


class KeyRotation(nn.Module):
    """R of the queries and keys of an attention; its `matrix` stands in no state dict.

    Args:
        matrix: R, d x d.
        attention: the name of the attention function of transformers that is called with what is rotated.
        hook: the handle of the hook that rotates what a cache is given.
    """

    matrix: Tensor

    def __init__(self, matrix: Tensor, attention: str, hook: RemovableHandle):
        super().__init__()
        self.register_buffer("matrix", matrix, persistent=False)
        self.attention, self.hook = attention, hook

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _register(self.attention)  # a model that another process pickled names it

    def forward(self, x: Tensor) -> Tensor:
        """Returns R x, worked out in float32 at least."""
        return F.linear(x.to(self.matrix.dtype), self.matrix).to(x.dtype)


class _RotatedKeys:
    """A cache, or none, that is given rotated keys."""

    def __init__(self, cache: Any, rotation: KeyRotation):
        self.cache, self.rotation = cache, rotation

    def update(self, keys: Tensor, values: Tensor, *args: object, **options: object) -> tuple[Tensor, Tensor]:
        keys = self.rotation(keys)
        return (keys, values) if self.cache is None else self.cache.update(keys, values, *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.cache, name)


@torch.no_grad()
def rotate_keys_(sites: RotationSites, rotation: Tensor | Sequence[Tensor] | None = None) -> None:
    """Rotates the queries and keys of each head behind their position encoding; the cache holds R k from then on.

    Attention computes :math:`(R q)^T (R k) = q^T k`, so that logits and what `generate` gives are the same, but for
    rounding; a cache that rounds keys finds their outliers spread. Each attention gets a module `key_rotation`, a hook
    that rotates what its cache is given, and an attention function by the name of `AttentionInterface`, which rotates
    queries and calls the one that was set; other models in the process are as they were. Files are those of the plain
    model, which computes the same: call this again after loading, with the `matrix` of each `key_rotation` if it was
    learned. A cache of keys from before is of no use afterwards. One pass over two tokens sees that the queries and the
    keys of each attention come by; a model in which they do not is refused, and left as it was.

    Args:
        sites: the layers, of `rotation_sites(model)` of a model of transformers.
        rotation: R, d x d for heads of d features, or one for each block; None is the Hadamard matrix. What is there
            is replaced.

    References:
        Liu et al., SpinQuant: LLM quantization with learned rotations, ICLR 2025.
    """
    who = "rotate_keys_"
    check_sites(sites, who)
    model: Any = sites.model
    names = {id(module): name for name, module in model.named_modules()}
    attentions: list[Any] = [model.get_submodule(names[id(one.output)].rpartition(".")[0]) for one in sites.heads]
    needs(len(attentions) > 0, OptionError, who, "sites with heads", "none")
    if rotation is None:
        rotation = [init.hadamard(one.size, random=False) for one in sites.heads]
    matrices = [rotation] * len(attentions) if isinstance(rotation, Tensor) else [*rotation]
    needs(len(matrices) == len(attentions), OptionError, who, f"{len(attentions)} rotations", len(matrices))
    matrices = [checked_rotation(matrix, "a rotation", who) for matrix in matrices]
    for one, matrix in zip(sites.heads, matrices, strict=True):
        wanted = f"a rotation of the {one.size} features of a head"
        needs(len(matrix) == one.size, ShapeError, who, wanted, tuple(matrix.shape))
    restore_keys_(sites)
    before = str(attribute(attribute(model, "config"), "_attn_implementation"))
    model.set_attn_implementation(_register(before))
    for one, module, matrix in zip(sites.heads, attentions, matrices, strict=True):
        w = one.output.get_parameter("weight")
        hook = module.register_forward_pre_hook(_rotate_cached, with_kwargs=True)
        module.key_rotation = KeyRotation(matrix.to(w.device, computing_dtype(w.dtype)), before, hook)
    calls: list[nn.Module] = []
    added = [module.key_rotation for module in attentions]
    handles = [one.register_forward_hook(lambda module, *_: calls.append(module)) for one in added]
    is_rotated = False
    try:
        model(torch.zeros(1, 2, dtype=torch.long, device=model.device))
        is_rotated = all(calls.count(one) == 2 for one in added)
    finally:
        for handle in handles:
            handle.remove()
        if not is_rotated:
            restore_keys_(sites)
    kind = type(attentions[0]).__name__
    needs(is_rotated, OptionError, who, "attentions that call a function of AttentionInterface", kind)


def restore_keys_(sites: RotationSites) -> None:
    """Takes what `rotate_keys_` added out of a model.

    Args:
        sites: the layers, of `rotation_sites(model)`.
    """
    model: Any = sites.model
    for module in model.modules():
        rotation = attribute(module, "key_rotation")
        if isinstance(rotation, KeyRotation):
            rotation.hook.remove()
            model.set_attn_implementation(rotation.attention)
            del module.key_rotation


def _register(attention: str) -> str:
    """Makes an attention function known to transformers, with the masks of another, and returns its name."""
    utils = importlib.import_module("transformers")
    masks = utils.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    needs(attention in masks, OptionError, "rotate_keys_", "an attention of transformers with masks", attention)
    utils.AttentionInterface.register(_PREFIX + attention, functools.partial(_attend, attention))
    utils.AttentionMaskInterface.register(_PREFIX + attention, masks[attention])
    return _PREFIX + attention


def _attend(attention: str, module: Any, query: Tensor, *args: object, **options: object) -> Any:
    eager = attribute(sys.modules[type(module).__module__], "eager_attention_forward")
    known = importlib.import_module("transformers").modeling_utils.ALL_ATTENTION_FUNCTIONS
    rotation = attribute(module, "key_rotation")
    query = query if rotation is None else rotation(query)
    return known.get_interface(attention, eager)(module, query, *args, **options)


def _rotate_cached(module: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    known = inspect.signature(type(module).forward).parameters
    name = next((name for name in _CACHES if options.get(name) is not None), None)
    name = name or next((name for name in _CACHES if name in known), None)
    return name and (args, {**options, name: _RotatedKeys(options.get(name), module.key_rotation)})
