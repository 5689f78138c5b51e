"""Optimizers that move frames along their manifold, and parameters as other optimizers want them.

`sk.optim.Name` imports the file of an optimizer, as `sk.parametrizations.Name` does that of a map.
"""

import importlib
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import OptionError, needs, no_attribute
from stiefelkit.optim.deterministic import minimizers
from stiefelkit.registry import Registry

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from stiefelkit.optim.averages import multi_avg_fn
    from stiefelkit.optim.clip import clip_grad_norm_
    from stiefelkit.optim.deterministic.minimize import Minimum, minimize
    from stiefelkit.optim.deterministic.minimizer import Minimizer, Progress
    from stiefelkit.optim.frame_optimizer import FrameOptimizer
    from stiefelkit.optim.groups import frames, geoopt_parameters, parameter_groups
    from stiefelkit.optim.manifold_muon import PolarStep
    from stiefelkit.optim.mixed import MixedOptimizer
    from stiefelkit.optim.rmsprop import RMSprop
    from stiefelkit.optim.settings import Check, Setting
    from stiefelkit.optim.steps import CayleyStep, Retraction, TangentOptimizer

__all__ = [
    "CayleyStep", "Check", "FrameOptimizer", "Minimizer", "Minimum", "MixedOptimizer", "PolarStep", "Progress",
    "RMSprop", "Retraction", "Setting", "TangentOptimizer", "available", "clip_grad_norm_", "frames",
    "geoopt_parameters", "minimize", "minimizers", "multi_avg_fn", "parameter_groups", "register",
]  # fmt: skip


def _check(optimizer: object) -> None:
    from torch.optim import Optimizer

    is_one = isinstance(optimizer, type) and issubclass(optimizer, Optimizer)
    needs(is_one, OptionError, "An optimizer", "a name or a subclass of torch.optim.Optimizer", optimizer)


FREE = {
    "adagrad": "torch.optim:Adagrad",
    "adam": "torch.optim:Adam",
    "adamw": "torch.optim:AdamW",
    "rmsprop": "stiefelkit.optim.rmsprop:RMSprop",
    "sgd": "torch.optim:SGD",
}
"""Optimizers of all parameters but frames."""
OF_FRAMES = {
    "cayley_adam": "stiefelkit.optim.cayley_adam:CayleyAdam",
    "cayley_sgd": "stiefelkit.optim.cayley_sgd:CayleySGD",
    "landing": "stiefelkit.optim.landing:Landing",
    "manifold_muon": "stiefelkit.optim.manifold_muon:ManifoldMuon",
    "multiplicative_cayley": "stiefelkit.optim.multiplicative_cayley:MultiplicativeCayley",
    "pogo": "stiefelkit.optim.pogo:POGO",
    "sgdg": "stiefelkit.optim.sgdg:SGDG",
    "spel": "stiefelkit.optim.spel:SPEL",
    "stiefel_adam": "stiefelkit.optim.stiefel_adam:StiefelAdam",
    "stiefel_sgd": "stiefelkit.optim.stiefel_sgd:StiefelSGD",
}
"""Those of frames, and of all other parameters as well."""
optimizers = Registry("stiefelkit.optimizers", "optimizer", {**FREE, **OF_FRAMES}, _check)


def names_in_words() -> tuple[str, str]:
    """Returns the names of optimizers of free parameters and of those of frames, for help, which imports no class."""
    return ", ".join(sorted(FREE)), ", ".join(sorted(OF_FRAMES))


def available() -> "dict[str, type[Optimizer]]":
    """Returns name to class of every optimizer that runs know by name: built-ins, installed plugins, registered ones.

    Those that move frames have `moves_frames`. A plugin that does not import, or is no optimizer, is warned about and
    left out.
    """
    return optimizers.available()


def register(name: str, optimizer: "type[Optimizer] | str") -> None:
    """Adds an optimizer by name: a class, or a dotted string "package.module:Class" that is imported at first use.

    A name that is taken, and what is no subclass of `torch.optim.Optimizer`, raises OptionError.
    """
    if not isinstance(optimizer, str):
        optimizers.check(optimizer)
    optimizers.register(name, optimizer)


_HOMES = {
    "averages": ("multi_avg_fn",),
    "clip": ("clip_grad_norm_",),
    "deterministic.minimize": ("Minimum", "minimize"),
    "deterministic.minimizer": ("Minimizer", "Progress"),
    "frame_optimizer": ("FrameOptimizer",),
    "groups": ("frames", "geoopt_parameters", "parameter_groups"),
    "mixed": ("MixedOptimizer",),
    "rmsprop": ("RMSprop",),
    "settings": ("Check", "Setting"),
    "manifold_muon": ("PolarStep",),
    "steps": ("CayleyStep", "Retraction", "TangentOptimizer"),
}
"""Modules of the names that stand here, imported when they are first asked for, and torch with them."""


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            globals()[name] = value = getattr(importlib.import_module(f"stiefelkit.optim.{home}"), name)
            return value
    public = not name.startswith("_")
    optimizer = (optimizers.by_class_name(name) or minimizers.by_class_name(name)) if public else None
    if not getattr(optimizer, "moves_frames", False):
        raise no_attribute(__name__, name)
    return optimizer


def __dir__() -> list[str]:
    classes = {**optimizers.class_names(), **minimizers.class_names()}
    return sorted({*__all__, *(name for name, key in classes.items() if key not in FREE)})
