"""What several models share: the read-out, and options that belong to one map."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from stiefelkit.param import Parametrization
from stiefelkit.parametrizations import find_parametrization

__all__ = ["each", "map_options", "read_out", "width"]


def each(rnn: nn.Module, name: str) -> list[Tensor]:
    """The weights of one name in every layer and direction: of "weight_ih", weight_ih_l0, weight_ih_l0_reverse, ..."""
    return [p for key, p in rnn.named_parameters(recurse=False) if key.startswith(f"{name}_l")]


def map_options(
    parametrization: Parametrization | None, home: str, own: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the options given, over a model's own ones if the map is the one that they belong to.

    Args:
        parametrization: the map asked for.
        home: name of the map of the paper.
        own: options and init that the paper has for it.
        given: options that the caller named; the map refuses those that it does not have.
    """
    at_home = parametrization is not None and find_parametrization(parametrization) is find_parametrization(home)
    return {**own, **given} if at_home else dict(given)


def read_out(inputs: int, outputs: int) -> nn.Linear:
    """Returns a linear layer with Glorot-uniform weights and zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def width(rnn: Any) -> int:
    """Width of a layer's states, both directions together; in complex numbers if they are."""
    return rnn.hidden_size * (2 if rnn.bidirectional else 1)
