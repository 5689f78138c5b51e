"""Activations, one a file, by name: built-ins and plugins on the same road, imported at first use."""

import math
from types import SimpleNamespace
from typing import Any

from stiefelkit._torch import constant_in_traced_code
from stiefelkit.errors import DtypeError, OptionError, UnknownNameError, did_you_mean, shown
from stiefelkit.registry import Registry
from stiefelkit.scan.activations.base import Activation, Step

__all__ = ["Activation", "Step", "find_activation", "names", "register"]


def _check(target: Any) -> None:
    if not (isinstance(target, type) and issubclass(target, Activation)):
        raise OptionError(f"An activation needs to be a subclass of Activation, got {shown(target)}.")


_activations = Registry(
    "stiefelkit.activations",
    "activation",
    {
        "abs": "stiefelkit.scan.activations.simple:Abs",
        "identity": "stiefelkit.scan.activations.simple:Identity",
        "leaky_relu": "stiefelkit.scan.activations.simple:LeakyReLU",
        "modrelu": "stiefelkit.scan.activations.modrelu:ModReLU",
        "modrelu_epsilon": "stiefelkit.scan.activations.modrelu:ModReLUEpsilon",
        "oplu": "stiefelkit.scan.activations.simple:OPLU",
        "relu": "stiefelkit.scan.activations.simple:ReLU",
        "tanh": "stiefelkit.scan.activations.simple:Tanh",
    },
    _check,
)
_by_name: dict[tuple[str, bool], Activation] = {}
_learnt = SimpleNamespace()


def names() -> list[str]:
    """Returns every known name, plugins included, without importing any."""
    return _activations.names()


def register(name: str, target: "str | type[Activation]") -> None:
    """Adds an activation.

    Args:
        name: the new name.
        target: a subclass of `Activation`, or a dotted string `"package.module:Class"`.

    Raises:
        OptionError: the name is taken or is no plain word, or the class is no activation.
    """
    if not isinstance(target, str):
        _activations.check(target)
    _activations.register(name, target)


def find_activation(name: str, is_complex: bool) -> Activation:
    """Looks an activation up: a name, or one with a number, "leaky_relu(0.2)".

    Args:
        name: as above.
        is_complex: whether states are complex.

    Raises:
        UnknownNameError: nothing has this name.
        OptionError: the number is not positive, or the activation has none; or it is none.
        DtypeError: it is not defined for complex states.

    >>> import torch
    >>> find_activation("tanh", False)(torch.zeros(2))
    tensor([0., 0.])
    """
    try:
        return _by_name[name, is_complex]
    except (KeyError, TypeError):
        pass
    _learn(name, is_complex)
    # Traced code sees a dict as it was at the first look, and an attribute as it is.
    return getattr(_learnt, f"{name} {is_complex}")


@constant_in_traced_code
def _learn(name: str, is_complex: bool) -> None:
    """Makes a name known, outside of traced code: a compiler would look into the registry's imports."""
    _by_name[name, is_complex] = activation = _parsed(name, is_complex)
    setattr(_learnt, f"{name} {is_complex}", activation)


def _parsed(name: Any, is_complex: bool) -> Activation:
    kind, parenthesis, rest = name.partition("(") if isinstance(name, str) else ("", "", "")
    if kind not in names():
        raise UnknownNameError(f"No activation is named {shown(name)}{did_you_mean(name, names())}")
    cls = _activations.find(kind)
    slope = cls.default_slope or 0.0
    if parenthesis:
        try:
            slope = float(rest.removesuffix(")")) if rest.endswith(")") else math.nan
        except ValueError:
            slope = math.nan
        if cls.default_slope is None or not 0 < slope < math.inf:
            example = "leaky_relu" if cls.default_slope is None else kind
            raise OptionError(
                f"Only {example} takes a number, as in '{example}(0.2)', and one above zero; got {shown(name)}."
            )
    cls = cls.of_complex() if is_complex else cls
    if cls is None:
        fitting = [key for key, other in _activations.available().items() if other.of_complex()]
        raise DtypeError(f"Complex states need an activation in {fitting}, got {name!r}.")
    return cls(name, slope)
