"""What there is to choose from, and what a line of a table says of it."""

import contextlib
from typing import Any

import torch

from stiefelkit import models
from stiefelkit.cli.words import sections
from stiefelkit.contract import table
from stiefelkit.contract.param import OrthogonalParam, Traits
from stiefelkit.errors import StiefelkitError
from stiefelkit.optim import minimizers, optimizers
from stiefelkit.registry import Registry
from stiefelkit.scan import activations
from stiefelkit.training import tasks

__all__ = ["cost_of", "image_of", "in_short", "instances", "kinds", "moved_by", "states_of", "tables"]

FIELDS = {"real": torch.float32, "complex": torch.complex64}
SIZE = 8
"""Rows of the frames that are looked at."""


def tables() -> dict[str, Registry]:
    """Returns the registries, by kind."""
    return {
        "parametrization": table.registered,
        "optimizer": optimizers,
        "minimizer": minimizers,
        "activation": activations._activations,
        "model": models._models,
        "task": tasks.tasks,
    }


def kinds() -> dict[str, dict[str, Any]]:
    """Returns name to object, by kind; what cannot be used is warned about and left out."""
    return {kind: table.available() for kind, table in tables().items()}


def in_short(kind: str, target: Any) -> list[str]:
    """Returns the cells of a row between the name and where it comes from."""
    if kind == "optimizer":
        return [moved_by(target)]
    line = (sections(target.__doc__ or "")[""] or [""])[0].removeprefix("Builds ").removesuffix(".")
    if kind == "parametrization":
        return [line, *_image_and_cost(target)]
    return [line, states_of(target)] if kind == "activation" else [line]


def instances(cls: type[OrthogonalParam], p: int = SIZE) -> dict[str, OrthogonalParam]:
    """Returns "real" and "complex" to a map of 8 x p frames, for those that the class does."""
    maps = {}
    for field, dtype in FIELDS.items():
        if cls.supports((SIZE, p), dtype) is not None:
            continue
        with contextlib.suppress(StiefelkitError):
            maps[field] = cls((SIZE, p), dtype=dtype)
    return maps


def cost_of(traits: Traits) -> str:
    """Returns how the time of a square map grows."""
    return f"n^{traits.cost_exponent:g}"


def image_of(traits: Traits) -> str:
    """Returns in words which frames a map reaches."""
    if not traits.exact:
        image = "near-orthogonal"
    elif traits.onto:
        image = "every frame"
    else:
        image = "rotations only, det 1" if traits.component == "rotations" else "part of the frames"
    return image if traits.invertible else f"{image}, none assignable"


def states_of(activation: Any) -> str:
    """Returns in words which states an activation takes."""
    return "real" if activation.of_complex() is None else "real, complex"


def moved_by(optimizer: Any) -> str:
    """Returns in words which parameters an optimizer takes."""
    if not getattr(optimizer, "moves_frames", False):
        return "all parameters but frames"
    plain = getattr(optimizer, "plain", None)
    return "frames" if plain is None else f"frames, and all other parameters as {plain.__name__} does"


def _image_and_cost(cls: type[OrthogonalParam]) -> list[str]:
    fields: dict[str, list[str]] = {}
    maps = instances(cls) or instances(cls, SIZE // 2)
    for field, param in maps.items():
        fields.setdefault(image_of(param.traits), []).append(field)
    costs = {cost_of(param.traits): None for param in maps.values()}
    return ["\n".join(f"{', '.join(names)}: {image}" for image, names in fields.items()), ", ".join(costs)]
