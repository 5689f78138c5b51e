"""The optimizer of a run: one for all, or others for the coordinates that the table `optimizers` names."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import OptimizerError, OptionError, StiefelkitError, did_you_mean
from stiefelkit.numbers import above
from stiefelkit.optim import optimizers

if TYPE_CHECKING:
    import torch
    from torch import nn


__all__ = ["HANDLED", "build_optimizer", "check_table"]

WHO = "Training"
HANDLED = ("params", "lr", "capturable", "differentiable", "foreach", "fused")
"""Arguments of optimizers that are no choice of a run: set here, or about how the step is carried out."""
IN_TABLE = ("optimizer", "lr")
"""Keys of a table that are not options of its optimizer."""


def check_table(coordinate: str, table: Any) -> None:
    """Raises OptionError or UnknownNameError unless a coordinate's table names an optimizer, with a possible rate."""
    if not isinstance(table, Mapping) or not isinstance(table.get("optimizer"), str):
        raise OptionError(
            f'{WHO} needs optimizers.{coordinate} to be a table such as {{"optimizer": "rmsprop"}}, got {table!r}.'
        )
    optimizers.get(table["optimizer"])
    if "lr" in table:
        above(0).require(WHO, f"optimizers.{coordinate}.lr", table["lr"])


def build_optimizer(config: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Returns the optimizer of a run; see `Config.build_optimizer`."""
    from stiefelkit.optim import MixedOptimizer, parameter_groups
    from stiefelkit.weights.find import coordinate_manifolds

    tables = config.optimizers
    given = {name: table["lr"] for name, table in tables.items() if "lr" in table}
    shared: list[dict[str, Any]] = []
    apart: dict[str, list[dict[str, Any]]] = {}
    for group in parameter_groups(model, lr=config.lr, **{**given, **config.rates}):
        name = str(group.get("name", ""))
        key = next((key for key in (name, name.rpartition(".")[2]) if key in tables), None)
        (shared if key is None else apart.setdefault(key, [])).append(group)
    for name in tables:
        if name not in apart:
            raise OptionError(f"{WHO} {config.model!r} needs a coordinate {name!r} for optimizers.{name}, got none.")
    frames = list(coordinate_manifolds(model))
    built = [_built(config, config.optimizer, config.optimizer_options, shared, frames)] if shared else []
    for name, groups in apart.items():
        options = {key: value for key, value in tables[name].items() if key not in IN_TABLE}
        built.append(_built(config, tables[name]["optimizer"], options, groups, frames))
    return MixedOptimizer(built) if tables else built[0]


def _built(
    config: Any, name: str, options: Mapping[str, Any], groups: list[dict[str, Any]], frames: list[str]
) -> torch.optim.Optimizer:
    factory = optimizers.get(name)
    known = [key for key in inspect.signature(factory).parameters if key not in HANDLED]
    for option in options:
        if option not in known:
            raise OptionError(f"Optimizer {name!r} has no option {option!r}{did_you_mean(option, known)}")
    parameters = inspect.signature(factory).parameters
    for option, value in options.items():
        if _is_switch(parameters[option]) and not isinstance(value, bool | None):
            raise OptionError(f"Optimizer {name!r} needs {option} to be true or false, got {value!r}.")
    bound = any("manifold" in group for group in groups)
    idle = [] if bound else [option for option in options if option in _of_frames_alone(factory)]
    if idle:
        raise OptionError(
            f"Optimizer {name!r} needs a frame to act on for {', '.join(idle)}, got {config.model!r} "
            f"without one; leave the option out, or name another --optimizer."
        )
    try:
        optimizer = factory(groups, **options)
    except (TypeError, ValueError) as error:
        if isinstance(error, StiefelkitError):
            raise
        raise OptionError(f"Optimizer {name!r} refuses its options: {error}.") from error
    if bound and not getattr(optimizer, "moves_frames", False):
        raise OptimizerError(
            f"{WHO} {config.model!r} needs an optimizer that keeps {frames[0]} on its manifold, got "
            f"{name!r}; name one with --optimizer, such as multiplicative_cayley."
        )
    return optimizer


def _is_switch(parameter: inspect.Parameter) -> bool:
    """Returns whether an option is true or false, by its annotation: a word, "no" as well, would count as true."""
    return parameter.annotation in (bool, bool | None, "bool", "bool | None")


def _of_frames_alone(factory: type[torch.optim.Optimizer]) -> set[str]:
    """Returns options of an optimizer of frames that the one which moves the other parameters does not have."""
    plain = getattr(factory, "plain", None)
    return set() if plain is None else {*inspect.signature(factory).parameters} - {*inspect.signature(plain).parameters}
