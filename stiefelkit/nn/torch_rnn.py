"""Taking a torch.nn.RNN, LSTM or GRU over: what it holds, checked first, and its weights in another net."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from stiefelkit.errors import (
    CheckpointError,
    ImageError,
    NonFiniteError,
    NotAFrameError,
    OptionError,
    RankError,
    needs,
    shown,
)
from stiefelkit.weights.find import coordinate_list_of

_SIZES = ("input_size", "hidden_size", "num_layers", "bidirectional", "bias")
_INSTEAD = {
    nn.RNN: "sk.nn.OrthogonalRNN.from_torch takes it over",
    **dict.fromkeys((nn.GRU, nn.LSTM), "sk.models.FrameGates.from_torch takes it over, with a frame for each gate"),
    Mapping: "load_state_dict of a torch.nn net of its sizes takes a state dict first",
}


def options_of(
    who: str,
    source: object,
    kinds: tuple[type[nn.RNNBase], ...],
    init: object,
    asked: Mapping[str, Any],
    given: Mapping[str, Any],
    *fixed: str,
) -> dict[str, Any]:
    """Returns arguments that make a net like one of torch's, with others that are asked for.

    Raises OptionError for given ones that the source or the new class fixes, and an error for a net that is not one of
    these kinds alone, with values.
    """
    needs(init in ("project", None), OptionError, who, 'init "project" or None', shown(init))
    what = " or ".join(f"torch.nn.{kind.__name__}" for kind in kinds)
    if not isinstance(source, kinds):
        found = type_before_parametrizations(source) if isinstance(source, nn.Module) else type(source)
        remedy = next((f"; {text}" for kind, text in _INSTEAD.items() if isinstance(source, kind)), "")
        raise OptionError(f"{who} needs a {what}, got {found.__name__}{remedy}.")
    kind = next(kind for kind in kinds if isinstance(source, kind))
    sizes: dict[str, Any] = {key: vars(source)[key] for key in _SIZES}
    weights, like = dict(source.named_parameters(recurse=False)), kind(**sizes, device="meta").state_dict()
    remedy = "hand in one net alone, with norms, masks and parametrizations removed"
    for key in (*weights, *like):
        needs(key in like, CheckpointError, who, f"weights of a {what}, such as 'weight_ih_l0'", f"{key!r}; {remedy}")
        needs(key in weights, CheckpointError, who, key, f"none; {remedy}")
        needs(not weights[key].is_meta, OptionError, who, "weights that hold values", f"{key} on the meta device")
    first = weights["weight_ih_l0"]
    choices = ("batch_first", "dropout", *(("nonlinearity",) if kind is nn.RNN else ()))
    options = sizes | {key: vars(source)[key] for key in choices} | {"dtype": first.dtype, "device": first.device}
    for key in (*options, *fixed):
        remedy = "; nonlinearity= sets another one" if key == "activation" else ""
        needs(
            key not in given, OptionError, who, f"{key} of its source", f"{key}={shown(given.get(key))} besides{remedy}"
        )
    return options | {key: value for key, value in asked.items() if value is not None} | dict(given)


@torch.no_grad()
def fill_(who: str, rnn: nn.Module, source: nn.RNNBase, init: str | None) -> None:
    """Copies weights into a net of the same sizes, with one bias or two, which of them are trained, and the mode."""
    rnn.train(source.training)
    own = {name for name, _ in rnn.named_parameters(recurse=False)}
    weights = dict(source.named_parameters(recurse=False))
    for key, weight in weights.items():
        kind, _, suffix = key.partition("_l")
        if kind == "bias_hh" and key not in own:
            continue
        name, value, trained = key, weight.detach(), weight.requires_grad
        if kind == "bias_ih" and key not in own:
            name, second = f"bias_l{suffix}", weights[f"bias_hh_l{suffix}"]
            value, trained = value.double() + second.double(), trained or second.requires_grad
        coordinate_list = coordinate_list_of(rnn, name)
        if coordinate_list is None:
            parameter = rnn.get_parameter(name)
            parameter.copy_(value)
            parameter.requires_grad_(trained)
            continue
        value = value.view(coordinate_list.param.shape)
        try:
            coordinate_list.right_inverse(coordinate_list.param.project(value) if init == "project" else value)
        except (RankError, NotAFrameError, NonFiniteError, ImageError) as error:
            remedy = ' init="project" takes the nearest frame.' if isinstance(error, NotAFrameError) else ""
            raise type(error)(f"{who} cannot take {key} over: {error}{remedy}") from error
        for coordinate in coordinate_list.coordinates.values():
            coordinate.requires_grad_(trained)
