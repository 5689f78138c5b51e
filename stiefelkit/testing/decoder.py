"""The laws of a family of decoders, ours or another's."""

import copy
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit.nn.decoders import decoders, rotation_sites
from stiefelkit.nn.rotated_decoder import rotated
from stiefelkit.nn.rotation import absorb_norms_, rotate_
from stiefelkit.testing import seeds
from stiefelkit.testing.failure import check_laws, laws_of, named, run, settle
from stiefelkit.testing.require import require, require_within

CLOSE = 1e-5
"""Relative difference of logits: rotations that are learned are float32, and so are the norms of transformers."""


def law_known(name: str, model: Any) -> None:
    """The model has one base, of a class of the family, and the sites are of one width."""
    found = [type(module).__name__ for module in model.modules() if type(module).__name__ in decoders.get(name).classes]
    require(len(found) == 1, f"the model has {len(found)} bases of the classes of {name}")
    sites = rotation_sites(model)
    require(sites.model is model and len(sites.heads) > 0, "the sites are not those of the model, with its heads")


def law_norms(name: str, model: Any) -> None:
    """Norms that are absorbed by what reads them leave the logits as they were."""
    with torch.no_grad():
        for norm in rotation_sites(model).norms:
            for p in norm.parameters():
                p.add_(0.3 * torch.randn_like(p))
    before = _logits(model)
    absorb_norms_(rotation_sites(model))
    _same(model, before)


def law_rotations(name: str, model: Any) -> None:
    """A rotation of the stream, and one of each head, leave the logits as they were."""
    before, sites = _logits(model), rotation_sites(model)
    heads = [init.haar((one.groups, one.size, one.size)) for one in sites.heads]
    rotate_(init.haar((sites.size, sites.size)), sites=sites, heads=heads)
    _same(model, before)


def law_learned(name: str, model: Any) -> None:
    """Rotations that are made as the model runs, without rounding, leave the logits as they were."""
    before = _logits(model)
    _same(rotated(model, weight_bits=None, activation_bits=None, start="haar"), before)


DECODER_LAWS = named(laws_of(__name__), lambda name, model: f"{name} of {type(model).__name__}")
"""The laws of a family of decoders, by name."""


def check_decoder(
    name: str, model: nn.Module, laws: Iterable[str] = tuple(DECODER_LAWS), offset: int | None = None
) -> None:
    """Checks a registered family of decoders on a model, of which it takes copies in float64.

    The offset is that of `check_parametrization`.

    Args:
        name: the family's, in `stiefelkit.nn.decoders.decoders`.
        model: a small one with its head and random weights, which takes tokens.
        laws: names in `DECODER_LAWS`.
        offset: of seeds.

    Raises:
        LawBroken: lists every failure.
        UnknownNameError: no family or law has such a name.
    """
    decoders.get(name)
    laws = check_laws(laws, DECODER_LAWS)
    settle((functools.partial(_run, name, model, law) for law in laws), offset)


def _run(name: str, model: nn.Module, law: str) -> None:
    line = f"check_decoder({name!r}, model, [{law!r}], offset={seeds.seed()})"
    twin = copy.deepcopy(model).double().eval()
    run(DECODER_LAWS[law], (name, twin), lambda: f"{type(model).__name__} in float64", lambda: line)


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    tokens = torch.arange(12).view(2, 6)
    out = model(tokens)
    return getattr(out, "logits", out[0] if isinstance(out, tuple) else out)


def _same(model: Any, before: Tensor) -> None:
    away = torch.dist(_logits(model), before) / before.norm()
    require_within(away.item(), CLOSE, "logits differ, relative to their norm, by")
