"""Parts that several models share: the options of their layer, draws of its weights, and the read-out."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from stiefelkit.contract.param import Parametrization
from stiefelkit.contract.table import find_parametrization


def named(rnn: nn.Module, name: str) -> list[Tensor]:
    """Returns the weights of one name in every layer and direction: weight_ih_l0, weight_ih_l0_reverse, ..."""
    return [p for key, p in rnn.named_parameters(recurse=False) if key.startswith(f"{name}_l")]


def draw_(rnn: nn.Module, name: str, scheme: Callable[..., Any], *args: Any, **options: Any) -> None:
    """Draws the weights of one name by a function of torch.nn.init."""
    for p in named(rnn, name):
        scheme(p, *args, **options)


def layer_options(
    parametrization: Parametrization | None,
    activation: str,
    options: Mapping[str, Any],
    home: str = "",
    **defaults: Any,
) -> dict[str, Any]:
    """Arguments of a model's layer: batch first, with the caller's options.

    With a map of the name `home`, that of the paper, these stand over the paper's defaults for it.
    """
    if home and parametrization is not None and find_parametrization(parametrization) is find_parametrization(home):
        options = {**defaults, **options}
    return dict(parametrization=parametrization, activation=activation, batch_first=True, **options)


def read_out(rnn: Any, outputs: int, parts: int = 1) -> nn.Linear:
    """Makes a linear layer, Glorot-uniform and with zero bias, on the states of both directions or their parts."""
    layer = nn.Linear(parts * rnn.hidden_size * (1 + rnn.bidirectional), outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
