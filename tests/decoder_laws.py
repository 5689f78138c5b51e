"""The laws of a family of decoders."""

import copy
import importlib
import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit.nn.decoders import decoders, rotation_sites
from stiefelkit.nn.rotated_decoder import rotated
from stiefelkit.nn.rotation import absorb_norms_, rotate_
from stiefelkit.testing import seeds


def law_known(name: str, model: nn.Module) -> None:
    """The model has one base, of a class of the family, and heads."""
    classes = decoders[name].classes
    assert sum(type(module).__name__ in classes for module in model.modules()) == 1
    sites = rotation_sites(model)
    assert sites.model is model
    assert sites.heads


@torch.no_grad()
def law_norms(name: str, model: nn.Module) -> None:
    """Absorbing the norms leaves the logits as they were."""
    for norm in rotation_sites(model).norms:
        for p in norm.parameters():
            p.add_(0.3 * torch.randn_like(p))
    before = logits(model)
    absorb_norms_(rotation_sites(model))
    require_same(model, before)


def law_rotations(name: str, model: nn.Module) -> None:
    """A rotation of the stream, and one of each head, leave the logits as they were."""
    before, sites = logits(model), rotation_sites(model)
    heads = [init.haar((one.groups, one.size, one.size)) for one in sites.heads]
    rotate_(init.haar((sites.size, sites.size)), sites=sites, heads=heads)
    require_same(model, before)


def law_learned(name: str, model: nn.Module) -> None:
    """Learned rotations, without rounding, leave the logits as they were."""
    before = logits(model)
    require_same(rotated(model, weight_bits=None, activation_bits=None, start="haar"), before)


LAWS = {name.removeprefix("law_"): law for name, law in vars().copy().items() if name.startswith("law_")}


def check_decoder(name: str, model: nn.Module, laws: Iterable[str] = tuple(LAWS)) -> None:
    """Runs laws of a registered family on copies of a model in float64."""
    for law in laws:
        seeds.reseed()
        LAWS[law](name, copy.deepcopy(model).double().eval())


SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8,
    "num_key_value_heads": 2, "vocab_size": 50, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def tiny_decoder(base: str, task: str = "CausalLM", **changes: Any) -> Any:
    """Returns a tiny model of transformers by the name of its base, with parameters at which a mistake is seen.

    Of sizes those are given that its configuration knows.
    """
    transformers: Any = importlib.import_module("transformers")
    kind = getattr(transformers, base).config_class
    known = {*inspect.signature(kind).parameters, *kind.attribute_map}
    config = kind(**{key: value for key, value in (SIZES | changes).items() if key in known or key not in SIZES})
    model = getattr(transformers, f"AutoModelFor{task}").from_config(config)
    model.set_experts_implementation("eager")  # others have no float64
    return shaken(model)


@torch.no_grad()
def shaken(model: Any) -> Any:
    for p in model.parameters():
        p.add_(0.3 * torch.randn_like(p) if p.dim() == 1 else 0.1 * torch.randn_like(p))
    return model.eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    out: Any = model(torch.arange(12).view(2, 6))
    return out if isinstance(out, Tensor) else out[0]


def require_same(model: nn.Module, before: Tensor) -> None:
    # Learned rotations are float32, and so are the norms of transformers.
    assert torch.dist(logits(model), before) <= 1e-5 * before.norm()
