"""Orthogonal adapters as LoRA, the nearest change of low rank, for what serves no other adapter."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stiefelkit.errors import NonFiniteError, OptionError, needs
from stiefelkit.nn.adapter import Adapter
from stiefelkit.nn.adapters import TrainedCopy, replacements, sites_of
from stiefelkit.nn.frozen import attribute, layout_of
from stiefelkit.nn.peft_files import contents_of, write_files
from stiefelkit.numbers import above, integer, optional
from stiefelkit.tensors import computing_dtype

_MATRIX = ("lora_A.weight", "lora_B.weight")
_KEYS = {
    **dict.fromkeys(("Linear", "Conv1D", "Conv1d", "Conv2d", "Conv3d"), _MATRIX),
    "Embedding": ("lora_embedding_A", "lora_embedding_B"),
}
"""Ends of the keys of A and B, by the classes of layers that PEFT has LoRA for."""


class LoraLayer(NamedTuple):
    """The LoRA of a layer's change D = W' - W."""

    rank: int  #: the rank of B A
    error: float  #: ‖D - B A‖_F / ‖D‖_F, with B and A as they are written
    beyond: Tensor  #: the singular values of D that are left out, the largest first


@dataclass(frozen=True)
class Lora:
    """The adapters of a model as LoRA, made by `to_lora`; `save` writes them for PEFT."""

    tensors: Mapping[str, Tensor]  #: by PEFT's keys, without its prefix
    config: Mapping[str, Any]  #: entries of adapter_config.json
    layers: Mapping[str, LoraLayer]  #: by the names of layers
    error: float | None  #: ‖y' - y‖_F / ‖y‖_F of the logits y with the adapters, y' with LoRA; None without inputs

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        base_model_name_or_path: str | None = None,
        task_type: str | None = None,
    ) -> None:
        """Writes adapter_config.json and adapter_model.safetensors, whole or not at all.

        Args:
            folder: empty, or not there.
            base_model_name_or_path: what the configuration says of the base; the model's `name_or_path` if left out.
            task_type: as in PEFT's configuration, "CAUSAL_LM" for instance.
        """
        base = base_model_name_or_path or self.config["base_model_name_or_path"]
        write_files("Lora.save", folder, self.tensors, self.config, base, task_type)


@torch.no_grad()
def to_lora(
    model: nn.Module, *, rank: int | None = None, tolerance: float | None = None, inputs: object = None
) -> Lora:
    """Returns the adapters of a model that are on as LoRA: the nearest :math:`B A` of low rank to each change.

    Of :math:`D = W' - W = U S V^T`, in float64, :math:`B = U_r S_r^{1/2}` and :math:`A = S_r^{1/2} V_r^T` are the
    nearest product of rank r (Eckart and Young), :math:`(s_{r+1}^2 + ...)^{1/2}` away. k reflectors change a weight by
    rank k at most, so that rank=k is exact; blocks change it by full rank. LoRA scales by 1: alpha is the rank of each
    layer. Copies of `modules_to_save` go along. The model is as it was afterwards.

    Args:
        model: a model with adapters, from `adapt` or `load_peft`, of any kind, on layers that PEFT has LoRA for:
            linear ones, the `Conv1D` of transformers, embeddings, convolutions.
        rank: r of all layers, less where a weight is smaller.
        tolerance: in place of `rank`, a bound of :math:`‖D - B A‖_F / ‖D‖_F`; each layer gets the smallest rank.
        inputs: what the model is called with, as a tensor, a tuple or a mapping of arguments; then `error` says how far
            the outputs, or their `logits`, are from those with the adapters, both in evaluation.

    >>> from stiefelkit.nn import adapt
    >>> net = adapt(nn.Sequential(nn.Linear(8, 8)), "*", "householder", reflections=2, init="haar")
    >>> lora = to_lora(net, rank=2, inputs=torch.ones(1, 8))
    >>> max(lora.layers["0"].error, lora.error) < 1e-6
    True
    """
    held_all = replacements(model, "to_lora")
    is_one = (rank is None) != (tolerance is None)
    needs(is_one, OptionError, "to_lora", "either rank= or tolerance=", f"rank={rank}, tolerance={tolerance}")
    optional(integer(1)).require("to_lora", "rank", rank)
    optional(above(0)).require("to_lora", "tolerance", tolerance)
    sites = list(sites_of(model))
    held = [(site, next((other for other in site.around if other.is_on), None)) for site in sites]
    held = [(site, outer) for site, outer in held if outer is not None]
    needs(len(held) > 0, OptionError, "to_lora", "an adapter that is on", f"{len(held_all)} that are off")
    layers: dict[str, LoraLayer] = {}
    factors: dict[str, dict[str, Tensor]] = {}
    weights: dict[Adapter, Tensor] = {}
    for site, outer in held:
        if isinstance(outer, TrainedCopy):
            outer.check_alone()
        elif isinstance(outer, Adapter):
            layers[site.name], factors[site.name], weights[outer] = _decomposed(site.name, outer, rank, tolerance)
    needs(len(layers) > 0, OptionError, "to_lora", "an adapter that is on", "copies of modules_to_save alone")
    most = max(layer.rank for layer in layers.values())
    config: dict[str, Any] = {"peft_type": "LORA", "r": most, "lora_alpha": most, "lora_dropout": 0.0, "bias": "none"}
    config |= {"inference_mode": True, "base_model_name_or_path": attribute(model, "name_or_path") or None}
    # PEFT takes a key as the end of a name, unless it is tied to the start.
    ranks = {f"^{re.escape(title)}": layer.rank for title, layer in layers.items() if layer.rank != most}
    config |= {"rank_pattern": ranks, "alpha_pattern": ranks}
    tensors, config = contents_of("to_lora", sites, held, factors, config)
    error = None if inputs is None else _error_of_outputs(model, weights, inputs)
    return Lora(tensors, config, layers, error)


def _decomposed(
    title: str, adapter: Adapter, rank: int | None, tolerance: float | None
) -> tuple[LoraLayer, dict[str, Tensor], Tensor]:
    """Returns what the change of a layer is as a LoRA, its factors by PEFT's keys, and the layer's weight with them."""
    layer, layout = adapter.base, layout_of(adapter.base)
    ends = _KEYS.get(next((cls.__name__ for cls in type(layer).__mro__ if cls.__name__ in _KEYS), ""))
    if ends is None or layout is None:
        known = ", ".join(_KEYS)
        raise OptionError(f"to_lora needs layers of {known}, got {type(layer).__name__} at {title}; fold is for any.")
    w = layer.weight.double()
    change = (adapter.changed_wide() - w).movedim(layout.axes[1], 0)
    needs(bool(change.isfinite().all()), NonFiniteError, "to_lora", "finite weights", f"others at {title}")
    u, s, vh = torch.linalg.svd(change.flatten(1), full_matrices=False)
    if tolerance is not None:
        left_out = s.square().flip(0).cumsum(0).flip(0).sqrt()
        rank = int((left_out > tolerance * left_out[0]).sum())
    rank = max(1, min(rank or 1, len(s)))
    root, dtype = s[:rank].sqrt(), computing_dtype(layer.weight.dtype)
    b, a = (u[:, :rank] * root).to(dtype), (root[:, None] * vh[:rank]).to(dtype)
    product = (b.double() @ a.double()).view(change.shape)
    shape = change.shape[1:] if len(change.shape) > 2 else a.shape[1:]
    tensors = {ends[0]: a.view(rank, *shape), ends[1]: b.view(*b.shape, *[1] * (change.dim() - 2))}
    made = LoraLayer(rank, _relative(product - change, change), s[rank:])
    return made, tensors, (w + product.movedim(0, layout.axes[1])).to(layer.weight.dtype).contiguous()


def _relative(difference: Tensor, exact: Tensor) -> float:
    norm = torch.linalg.vector_norm(exact).item()
    return torch.linalg.vector_norm(difference).item() / norm if norm else 0.0


def _error_of_outputs(model: nn.Module, weights: Mapping[Adapter, Tensor], inputs: object) -> float:
    training, merged = {m: m.training for m in model.modules()}, {adapter: adapter.merged for adapter in weights}
    try:
        model.eval()
        exact = _outputs(model, inputs)
        for adapter, w in weights.items():
            adapter.merged = w
        return _relative(_outputs(model, inputs) - exact, exact)
    finally:
        for adapter, w in merged.items():
            adapter.merged = w
        for module, was in training.items():
            module.training = was


def _outputs(model: nn.Module, inputs: object) -> Tensor:
    many = inputs if isinstance(inputs, tuple) else (inputs,)
    given = model(**inputs) if isinstance(inputs, Mapping) else model(*many)
    y = given if isinstance(given, Tensor) else attribute(given, "logits")
    got = type(given).__name__
    needs(isinstance(y, Tensor), OptionError, "to_lora", "a model of tensors or logits for inputs=", got)
    return y.double()
