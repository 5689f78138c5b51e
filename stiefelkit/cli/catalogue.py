"""What there is to choose from, and what a line of a table says of it."""

import contextlib
from typing import Any

import torch

from stiefelkit import models, parametrizations
from stiefelkit.cli.words import sections
from stiefelkit.errors import StiefelkitError
from stiefelkit.optim import optimizers
from stiefelkit.param import OrthogonalParam, Traits
from stiefelkit.registry import Registry
from stiefelkit.training.tasks import tasks

__all__ = ["image_of", "in_short", "instances", "kinds", "moved_by", "tables"]

FIELDS = {"real": torch.float32, "complex": torch.complex64}
SIZE = 8
"""Rows of the frames that are looked at."""


def tables() -> dict[str, Registry]:
    """Returns the registries, by kind."""
    return {
        "parametrization": parametrizations.registered,
        "optimizer": optimizers,
        "model": models._models,
        "task": tasks,
    }


def kinds() -> dict[str, dict[str, Any]]:
    """Returns name to object, by kind; what cannot be used is warned about and left out."""
    return {kind: table.available() for kind, table in tables().items()}


def in_short(kind: str, target: Any) -> list[str]:
    """Returns the cells of a row after the name."""
    if kind == "optimizer":
        return [moved_by(target)]
    line = (sections(target.__doc__ or "")[""] or [""])[0].removeprefix("Builds ").removesuffix(".")
    return [line, _images(target)] if kind == "parametrization" else [line]


def instances(cls: type[OrthogonalParam], p: int = SIZE) -> dict[str, OrthogonalParam]:
    """Returns "real" and "complex" to a map of 8 x p frames, for those that the class does."""
    maps = {}
    for field, dtype in FIELDS.items():
        if cls.supports((SIZE, p), dtype) is not None:
            continue
        with contextlib.suppress(StiefelkitError):
            maps[field] = cls((SIZE, p), dtype=dtype)
    return maps


def image_of(traits: Traits) -> str:
    """Returns in words which frames a map reaches."""
    if not traits.exact:
        image = "near-orthogonal"
    elif traits.onto:
        image = "every frame"
    else:
        image = "rotations, det 1" if traits.component == "rotations" else "part of the frames"
    return image if traits.invertible else f"{image}, none assignable"


def moved_by(optimizer: Any) -> str:
    """Returns in words which parameters an optimizer takes."""
    if not getattr(optimizer, "moves_frames", False):
        return "all parameters but frames"
    plain = getattr(optimizer, "plain", None)
    return "frames" if plain is None else f"frames, and all other parameters as {plain.__name__} does"


def _images(cls: type[OrthogonalParam]) -> str:
    fields: dict[str, list[str]] = {}
    for field, param in instances(cls).items():
        fields.setdefault(image_of(param.traits), []).append(field)
    return "\n".join(f"{', '.join(names)}: {image}" for image, names in fields.items())
