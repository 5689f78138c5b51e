"""Taking a torch.nn.RNN, LSTM or GRU over: what it holds, checked first, and its weights in another net."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from stiefelkit.errors import (
    CheckpointError,
    DtypeError,
    ImageError,
    NonFiniteError,
    NotAFrameError,
    OptionError,
    RankError,
    ShapeError,
    needs,
    shown,
)
from stiefelkit.weights.find import coordinate_list_of

GATES = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}
"""Number of n x n blocks of a recurrent weight."""
_INSTEAD = {
    nn.RNN: "sk.nn.OrthogonalRNN.from_torch takes it over",
    **dict.fromkeys((nn.GRU, nn.LSTM), "sk.models.FrameGates.from_torch takes it over, with a frame for each gate"),
}


@dataclass(frozen=True)
class TorchRNN:
    """A torch.nn.RNN, LSTM or GRU, read: arguments that make a net like it, and detached weights by name."""

    options: dict[str, Any]
    weights: dict[str, Tensor]
    trained: dict[str, bool]
    training: bool
    gates: int

    def changed(self, who: str, asked: Mapping[str, Any], given: Mapping[str, Any], *fixed: str) -> dict[str, Any]:
        """Returns the arguments with others that are asked for; raises OptionError for given ones that it has."""
        for key in (*self.options, *fixed):
            remedy = "; nonlinearity= sets another one" if key == "activation" else ""
            got = f"{key}={shown(given.get(key))} besides{remedy}"
            needs(key not in given, OptionError, who, f"{key} of its source", got)
        return self.options | {key: value for key, value in asked.items() if value is not None} | dict(given)


def read(who: str, source: object, init: object, *kinds: type[nn.RNNBase]) -> TorchRNN:
    """Reads a recurrent net of torch of some kinds, or a state dict of one, with torch's defaults for what it lacks."""
    needs(init in ("project", None), OptionError, who, 'init "project" or None', shown(init))
    what = " or ".join(f"torch.nn.{kind.__name__}" for kind in kinds)
    options: dict[str, Any] = {"batch_first": False, "dropout": 0.0}
    options |= {"nonlinearity": "tanh"} if nn.RNN in kinds else {}
    if isinstance(source, kinds):
        options = {key: vars(source)[key] for key in options}
        state: dict[str, Tensor] = dict(source.named_parameters(recurse=False))
        kinds = tuple(kind for kind in GATES if isinstance(source, kind))
    elif isinstance(source, Mapping):
        state = dict(source)
    else:
        found = type_before_parametrizations(source) if isinstance(source, nn.Module) else type(source)
        remedy = next((f"; {text}" for kind, text in _INSTEAD.items() if isinstance(source, kind)), "")
        raise OptionError(f"{who} needs a {what} or its state dict, got {found.__name__}{remedy}.")
    sizes, gates = _check(who, what, state, kinds)
    dtypes = {value.dtype for value in state.values()}
    is_one = len(dtypes) == 1 and all(dtype.is_floating_point for dtype in dtypes)
    needs(is_one, DtypeError, who, "weights of one dtype, a real one", ", ".join(sorted(map(str, dtypes))))
    first = state["weight_ih_l0"]
    return TorchRNN(
        {**options, **sizes, "dtype": first.dtype, "device": first.device},
        {key: value.detach() for key, value in state.items()},
        {key: value.requires_grad for key, value in state.items()} if isinstance(source, kinds) else {},
        source.training if isinstance(source, nn.RNNBase) else True,
        gates,
    )


def _check(
    who: str, what: str, state: Mapping[str, Tensor], kinds: tuple[type[nn.RNNBase], ...]
) -> tuple[dict[str, Any], int]:
    """Returns the sizes of a net, and how many gates it has; raises unless a net of torch's has these weights."""
    u, w = (state.get(f"weight_{kind}_l0", torch.empty(0, 0, device="meta")) for kind in ("ih", "hh"))
    for key, value in state.items():
        needs(not value.is_meta, OptionError, who, "weights that hold values", f"{key} on the meta device")
    m, n = u.shape[-1], w.shape[-1]
    kind = next((kind for kind in kinds if w.dim() and len(w) == GATES[kind] * n), kinds[0])
    sizes = {
        "num_layers": 1 + max((int(layer) for key in state for layer in re.findall(r"_l(\d+)", key)), default=0),
        "bidirectional": any(key.endswith("_reverse") for key in state),
        "bias": any(key.startswith("bias") for key in state),
    }
    like = kind(input_size=max(m, 1), hidden_size=max(n, 1), **sizes, device="meta").state_dict()
    remedy = "hand in one net alone, with norms, masks and parametrizations removed"
    for key in (*state, *like):
        needs(key in like, CheckpointError, who, f"weights of a {what}, such as 'weight_ih_l0'", f"{key!r}; {remedy}")
        needs(key in state, CheckpointError, who, key, f"none; {remedy}")
    for key, value in sorted(state.items(), key=lambda item: "_hh" not in item[0]):
        is_gated = nn.RNN in kinds and len(w) in (3 * n, 4 * n) and key.startswith("weight_hh")
        got = f"{tuple(value.shape)}{f'; {_INSTEAD[nn.GRU]}' if is_gated else ''}"
        needs(value.shape == like[key].shape, ShapeError, who, f"{key} of shape {tuple(like[key].shape)}", got)
    return {"input_size": m, "hidden_size": n, **sizes}, GATES[kind]


@torch.no_grad()
def fill_(who: str, rnn: nn.Module, source: TorchRNN, init: str | None) -> None:
    """Copies weights into a net of the same sizes, with one bias or two, which of them are trained, and the mode."""
    rnn.train(source.training)
    own = {name for name, _ in rnn.named_parameters(recurse=False)}
    for key, weight in source.weights.items():
        kind, _, suffix = key.partition("_l")
        if kind == "bias_hh" and key not in own:
            continue
        name, trained = key, source.trained.get(key, True)
        if kind == "bias_ih" and key not in own:
            name, second = f"bias_l{suffix}", f"bias_hh_l{suffix}"
            weight = weight.double() + source.weights[second].double()
            trained = trained or source.trained.get(second, True)
        coordinate_list = coordinate_list_of(rnn, name)
        if coordinate_list is None:
            parameter = rnn.get_parameter(name)
            parameter.copy_(weight)
            parameter.requires_grad_(trained)
            continue
        weight = weight.view(coordinate_list.param.shape)
        try:
            coordinate_list.right_inverse(coordinate_list.param.project(weight) if init == "project" else weight)
        except (RankError, NotAFrameError, NonFiniteError, ImageError) as error:
            remedy = ' init="project" takes the nearest frame.' if isinstance(error, NotAFrameError) else ""
            raise type(error)(f"{who} cannot take {key} over: {error}{remedy}") from error
        for coordinate in coordinate_list.coordinates.values():
            coordinate.requires_grad_(trained)
