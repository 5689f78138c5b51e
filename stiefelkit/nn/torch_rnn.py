"""Taking a torch.nn.RNN, LSTM or GRU over: what it holds, checked first, and its weights in another net."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from stiefelkit.contract.protocols import projected
from stiefelkit.errors import (
    CheckpointError,
    DtypeError,
    ImageError,
    NonFiniteError,
    NotAFrameError,
    OptionError,
    RankError,
    ShapeError,
    shown,
)
from stiefelkit.metrics import orthogonality_error
from stiefelkit.weights.find import Place, coordinate_list_of

_KEY = re.compile(r"(weight_ih|weight_hh|bias_ih|bias_hh)_l(\d+)(_reverse)?")
_CHANGED = re.compile(rf"(?:parametrizations\.)?({_KEY.pattern})(_g|_mask|_u|\.original\d?)")
_REMOVERS = {
    "_g": ("weight_norm", "remove_weight_norm"),
    "_mask": ("a mask", "prune.remove"),
    "_u": ("spectral_norm", "remove_spectral_norm"),
    ".original": ("a parametrization", "parametrize.remove_parametrizations"),
    ".original0": ("weight_norm", "parametrize.remove_parametrizations"),
    ".original1": ("weight_norm", "parametrize.remove_parametrizations"),
}
"""Endings of the entries that torch's norms, masks and parametrizations keep; what they are, and what ends them."""
GATES = {nn.RNN: 1, nn.GRU: 3, nn.LSTM: 4}
"""How many n x n blocks a recurrent weight has."""


@dataclass(frozen=True)
class TorchRNN:
    """A torch.nn.RNN, LSTM or GRU, read.

    Attributes:
        options: arguments that make a net like it; of a state dict, which does not hold them, the nonlinearity,
            batch_first and dropout are torch's defaults.
        weights: name to tensor, detached.
        trained: name to whether the weight asks for a gradient.
        training: the mode.
        gates: blocks of a recurrent weight.
    """

    options: dict[str, Any]
    weights: dict[str, Tensor]
    trained: dict[str, bool]
    training: bool
    gates: int


def read(who: str, source: object, init: object, *kinds: type[nn.RNNBase]) -> TorchRNN:
    """Reads a recurrent net of torch or a state dict of one.

    Args:
        who: begins the sentences of the errors.
        source: the module, or its state dict.
        init: "project" or None, as `fill_` takes it.
        *kinds: what it may be: keys of `GATES`.

    Raises:
        OptionError: it is neither, or its weights are on the meta device; or `init` is another.
        CheckpointError: a key is missing, or is none of such a net, as those of a whole model; or a weight has a
            norm, a mask or a parametrization.
        ShapeError: the shapes do not belong together, or are those of another kind.
        DtypeError: a weight is no tensor, or they are not of one real dtype.
        NonFiniteError: a recurrent weight holds NaN or infinity.
    """
    if init not in ("project", None):
        raise OptionError(f'{who} needs init "project" or None, got {shown(init)}.')
    what, is_net = " or ".join(f"torch.nn.{kind.__name__}" for kind in kinds), isinstance(source, kinds)
    options = {"batch_first": False, "dropout": 0.0} | ({"nonlinearity": "tanh"} if nn.RNN in kinds else {})
    if is_net:
        assert isinstance(source, nn.RNNBase)
        options = {key: getattr(source, key) for key in options}
        _check_plain(who, what, source.state_dict())
        state: dict[Any, Any] = dict(source.named_parameters(recurse=False))
    elif isinstance(source, Mapping):
        state = dict(source)
        _check_plain(who, what, state)
        _check_whole(who, what, state)
    else:
        kind = type_before_parametrizations(source) if isinstance(source, nn.Module) else type(source)
        raise OptionError(f"{who} needs a {what} or its state dict, got {kind.__name__}{_instead_of(source, kinds)}.")
    matches = {key: _KEY.fullmatch(key) if isinstance(key, str) else None for key in state}
    for key, match in matches.items():
        if match is None:
            raise CheckpointError(f"{who} needs weights of a {what}, such as 'weight_ih_l0', got {key!r}.")
    parts = [match.groups() for match in matches.values() if match is not None]
    sizes = {
        "num_layers": 1 + max((int(layer) for _, layer, _ in parts), default=0),
        "bidirectional": any(direction for _, _, direction in parts),
        "bias": any(kind.startswith("bias") for kind, _, _ in parts),
    }
    _check_tensors(who, state)
    allowed = [gates for kind, gates in GATES.items() if (isinstance(source, kind) if is_net else kind in kinds)]
    shape = tuple(state["weight_hh_l0"].shape) if "weight_hh_l0" in state else ()
    gates = next((count for count in allowed if len(shape) == 2 and shape[0] == count * shape[1]), allowed[0])
    sizes |= _check_shapes(who, state, gates, **sizes)
    first = state["weight_ih_l0"]
    return TorchRNN(
        {**options, **sizes, "dtype": first.dtype, "device": first.device},
        {key: value.detach() for key, value in state.items()},
        {key: value.requires_grad for key, value in state.items()} if is_net else {},
        source.training if isinstance(source, nn.RNNBase) else True,
        gates,
    )


def _instead_of(source: object, kinds: tuple[type[nn.RNNBase], ...]) -> str:
    """Returns the remedy for a module that is of no such kind."""
    if isinstance(source, nn.LSTM | nn.GRU):
        return f", whose gates it lacks; {_OF_GATES}"
    if isinstance(source, nn.RNN):
        return "; sk.nn.OrthogonalRNN.from_torch takes it over"
    if isinstance(source, nn.RNNCell):
        return f"; {_OF_CELL} and nonlinearity={source.nonlinearity!r}"
    if isinstance(source, nn.Module):
        nets = [(name, module) for name, module in source.named_modules() if isinstance(module, kinds)]
        places = [Place(f"{name}.x", module, "x").expression for name, module in nets[:2]]
        return f"; hand in {' or '.join(places)}" if places else ""
    return ""


_OF_GATES = "sk.models.FrameGates.from_torch takes an LSTM or a GRU over, with a frame for each gate"
_OF_CELL = 'hand in {f"{key}_l0": value for key, value in cell.state_dict().items()}'


def _check_plain(who: str, what: str, state: Mapping[Any, Any]) -> None:
    """Raises CheckpointError if a weight is worked out from others."""
    keys = [key for key in state if isinstance(key, str)]
    if any(key.startswith("parametrizations.") and key.endswith("._extra_state") for key in keys):
        raise CheckpointError(
            f"{who} needs the state dict of a {what}, got one whose weights are orthogonal already; "
            "load_state_dict takes it."
        )
    for match in filter(None, map(_CHANGED.fullmatch, keys)):
        what, remover = _REMOVERS[match[match.lastindex or 0]]
        raise CheckpointError(
            f"{who} needs plain weights, got {match[1]} under {what}; torch.nn.utils.{remover}(rnn, {match[1]!r}) "
            "first."
        )


def _check_whole(who: str, what: str, state: Mapping[Any, Any]) -> None:
    """Raises CheckpointError for the state dict of a cell, or of a model with nets inside."""
    keys = [key for key in state if isinstance(key, str)]
    if "weight_hh" in keys:
        raise CheckpointError(f"{who} needs the state dict of a {what}, got that of a cell; {_OF_CELL}.")
    paths = [key.removesuffix(".weight_hh_l0") for key in keys if key.endswith(".weight_hh_l0")]
    if paths:
        first = Place(f"{paths[0]}.x", nn.Module(), "x")
        inside = ", ".join([repr(f"{path}.") for path in paths[:3]]) + (", ..." if len(paths) > 3 else "")
        raise CheckpointError(
            f"{who} needs the state dict of one {what}, got that of a model with one under {inside}; hand in "
            f"{first.expression}, or its entries without the prefix."
        )


def _check_tensors(who: str, state: Mapping[str, Any]) -> None:
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise DtypeError(f"{who} needs {key} that is a tensor, got {type(value).__name__}.")
        if value.is_meta:
            raise OptionError(f"{who} needs weights that hold values, got {key} on the meta device.")
    dtypes = {value.dtype for value in state.values()}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        raise DtypeError(f"{who} needs weights of one dtype, a real one, got {', '.join(sorted(map(str, dtypes)))}.")


def _check_shapes(
    who: str, state: Mapping[str, Tensor], gates: int, num_layers: int, bidirectional: bool, bias: bool
) -> dict[str, int]:
    """Returns the widths of input and state."""
    n = m = 0
    for layer in range(num_layers):
        for direction in ("", "_reverse")[: 1 + bidirectional]:
            for kind in ("weight_hh", "weight_ih", *(("bias_ih", "bias_hh") if bias else ())):
                key = f"{kind}_l{layer}{direction}"
                if key not in state:
                    raise CheckpointError(f"{who} needs {key}, got none.")
                shape = tuple(state[key].shape)
                if kind == "weight_hh":
                    n = n or (shape[1] if len(shape) == 2 and shape[0] == gates * shape[1] else 0)
                    wanted = (gates * n, n) if n else (f"{gates}n" if gates > 1 else "n", "n")
                elif kind == "weight_ih":
                    m = m or (shape[1] if len(shape) == 2 else 0)
                    wanted = (gates * n, (n * (1 + bidirectional) if layer else m) or "m")
                else:
                    wanted = (gates * n,)
                if shape != wanted:
                    is_gated = gates == 1 and len(shape) == 2 and shape[0] in (3 * shape[1], 4 * shape[1])
                    remedy = f"; {_OF_GATES}" if is_gated and kind == "weight_hh" else ""
                    names = str(wanted).replace("'", "")
                    raise ShapeError(f"{who} needs {key} of shape {names}, got {shape}{remedy}.")
                if kind == "weight_hh" and not torch.isfinite(state[key]).all():
                    raise NonFiniteError(f"{who} needs finite entries in {key}, got NaN or infinity.")
    return {"input_size": m, "hidden_size": n}


@torch.no_grad()
def fill_(who: str, rnn: nn.Module, source: TorchRNN, init: str | None) -> None:
    """Copies weights into a net of the same sizes, with one bias or two, which are trained, and the mode.

    Args:
        who: begins the sentences of the errors.
        rnn: a net with the weights of `OrthogonalRNN`, or torch's names, with n x n blocks one behind the other.
        source: what was read.
        init: "project" to make a recurrent matrix the nearest frame; None if it must be one.

    Raises:
        RankError, NotAFrameError, ImageError: as `OrthogonalRNN.from_torch`.
    """
    rnn.train(source.training)
    for key in source.weights:
        kind, _, suffix = key.partition("_l")
        if kind == "bias_hh" and not hasattr(rnn, key):
            continue
        name, weight, trained = key, source.weights[key], source.trained.get(key, True)
        if kind == "bias_ih" and not hasattr(rnn, key):
            name, second = f"bias_l{suffix}", f"bias_hh_l{suffix}"
            weight = weight.double() + source.weights[second].double()
            trained = trained or source.trained.get(second, True)
        coordinate_list = coordinate_list_of(rnn, name)
        if coordinate_list is None:
            parameter = getattr(rnn, name)
            parameter.copy_(weight)
            parameter.requires_grad_(trained)
            continue
        weight = weight.view(coordinate_list.param.shape)
        try:
            coordinate_list.right_inverse(projected(coordinate_list.param, weight) if init == "project" else weight)
        except RankError as error:
            raise RankError(
                f"{who} needs full rank in {key}, got a matrix without a nearest frame; torch.nn.init.orthogonal_ "
                "draws one."
            ) from error
        except NotAFrameError as error:
            raise NotAFrameError(
                f"{who} needs orthonormal columns in {key}, got ||W^H W - I||_F = "
                f'{orthogonality_error(weight).max().item():.2g}; init="project" takes the nearest frame.'
            ) from error
        except ImageError as error:
            raise ImageError(f"{who} cannot take {key} over: {error}") from error
        for coordinate in coordinate_list.coordinates.values():
            coordinate.requires_grad_(trained)
