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

_KEY = re.compile(r"(weight_ih|weight_hh|bias_ih|bias_hh)_l(\d+)(_reverse)?")
GATES = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}
"""How many n x n blocks a recurrent weight has."""
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


def read(who: str, source: object, init: object, *kinds: type[nn.RNNBase]) -> TorchRNN:
    """Reads a recurrent net of torch of some kinds, or a state dict of one, with torch's defaults for what it lacks."""
    needs(init in ("project", None), OptionError, who, 'init "project" or None', shown(init))
    what = " or ".join(f"torch.nn.{kind.__name__}" for kind in kinds)
    options: dict[str, Any] = {"batch_first": False, "dropout": 0.0}
    options |= {"nonlinearity": "tanh"} if nn.RNN in kinds else {}
    if isinstance(source, kinds):
        options = {key: vars(source)[key] for key in options}
        state: dict[str, Tensor] = dict(source.named_parameters(recurse=False))
        allowed = [gates for kind, gates in GATES.items() if isinstance(source, kind)]
    elif isinstance(source, Mapping):
        state, allowed = dict(source), [gates for kind, gates in GATES.items() if kind in kinds]
    else:
        found = type_before_parametrizations(source) if isinstance(source, nn.Module) else type(source)
        remedy = next((f"; {text}" for kind, text in _INSTEAD.items() if isinstance(source, kind)), "")
        raise OptionError(f"{who} needs a {what} or its state dict, got {found.__name__}{remedy}.")
    matches = {key: _KEY.fullmatch(str(key)) for key in state}
    remedy = "hand in one net alone, with norms, masks and parametrizations removed"
    for key, match in matches.items():
        wanted = f"weights of a {what}, such as 'weight_ih_l0'"
        needs(match is not None, CheckpointError, who, wanted, f"{key!r}; {remedy}")
    parts = [match.groups() for match in matches.values() if match is not None]
    sizes = {
        "num_layers": 1 + max((int(layer) for _, layer, _ in parts), default=0),
        "bidirectional": any(direction for _, _, direction in parts),
        "bias": any(kind.startswith("bias") for kind, _, _ in parts),
    }
    for key, value in state.items():
        needs(not value.is_meta, OptionError, who, "weights that hold values", f"{key} on the meta device")
    dtypes = {value.dtype for value in state.values()}
    is_one = len(dtypes) <= 1 and all(dtype.is_floating_point for dtype in dtypes)
    needs(is_one, DtypeError, who, "weights of one dtype, a real one", ", ".join(sorted(map(str, dtypes))))
    shape = tuple(state["weight_hh_l0"].shape) if "weight_hh_l0" in state else ()
    gates = next((count for count in allowed if len(shape) == 2 and shape[0] == count * shape[1]), allowed[0])
    sizes |= _check_shapes(who, state, gates, **sizes)
    first = state["weight_ih_l0"]
    return TorchRNN(
        {**options, **sizes, "dtype": first.dtype, "device": first.device},
        {key: value.detach() for key, value in state.items()},
        {key: value.requires_grad for key, value in state.items()} if isinstance(source, kinds) else {},
        source.training if isinstance(source, nn.RNNBase) else True,
        gates,
    )


def _check_shapes(
    who: str, state: Mapping[str, Tensor], gates: int, num_layers: int, bidirectional: bool, bias: bool
) -> dict[str, int]:
    n = m = 0
    for layer in range(num_layers):
        for direction in ("", "_reverse")[: 1 + bidirectional]:
            for kind in ("weight_hh", "weight_ih", *(("bias_ih", "bias_hh") if bias else ())):
                key = f"{kind}_l{layer}{direction}"
                needs(key in state, CheckpointError, who, key, "none")
                shape = tuple(state[key].shape)
                if kind == "weight_hh":
                    n = n or (shape[1] if len(shape) == 2 and shape[0] == gates * shape[1] else 0)
                    wanted = (gates * n, n) if n else (f"{gates}n" if gates > 1 else "n", "n")
                elif kind == "weight_ih":
                    m = m or (shape[1] if len(shape) == 2 else 0)
                    wanted = (gates * n, (n * (1 + bidirectional) if layer else m) or "m")
                else:
                    wanted = (gates * n,)
                is_gated = gates == 1 and len(shape) == 2 and shape[0] in (3 * shape[1], 4 * shape[1])
                remedy = f"; {_INSTEAD[nn.GRU]}" if is_gated and kind == "weight_hh" else ""
                names = str(wanted).replace("'", "")
                needs(shape == wanted, ShapeError, who, f"{key} of shape {names}", f"{shape}{remedy}")
                is_finite = kind != "weight_hh" or bool(torch.isfinite(state[key]).all())
                needs(is_finite, NonFiniteError, who, f"finite entries in {key}", "NaN or infinity")
    return {"input_size": m, "hidden_size": n}


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
        except (RankError, NotAFrameError, ImageError) as error:
            remedy = ' init="project" takes the nearest frame.' if isinstance(error, NotAFrameError) else ""
            raise type(error)(f"{who} cannot take {key} over: {error}{remedy}") from error
        for coordinate in coordinate_list.coordinates.values():
            coordinate.requires_grad_(trained)
