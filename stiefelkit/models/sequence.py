"""A recurrent layer and a linear read-out, and what models share: options of the layer, draws of its weights."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from stiefelkit._torch import is_exported
from stiefelkit.contract.param import Parametrization
from stiefelkit.contract.table import find_parametrization
from stiefelkit.errors import OptionError, ShapeError, needs
from stiefelkit.functional import skew_size
from stiefelkit.functional._arithmetic.product import is_autocast
from stiefelkit.nn import RotationBlock
from stiefelkit.nn.recurrent import Layers
from stiefelkit.numbers import integer
from stiefelkit.weights.find import orthogonal_weights

MIN_DROPPED_STATES = 2**22
"""Numbers in all states of a sequence from which on it pays not to keep them: fewer are made faster than left out."""

DrawReadOut = Callable[[nn.Linear], object]  # draws the weights of a read-out, which is Glorot-uniform before


class SequenceModel(nn.Module):
    """Reads a sequence with a recurrent layer and maps its states to outputs; complex states enter as [Re, Im].

    Args:
        rnn: a layer with the interface of torch.nn.RNN or torch.nn.LSTM, batch first, of any depth, in one direction or
            both.
        output: linear layer on the states.
        real_part: read Re h alone of complex states.

    Shape:
        (B, T, m), the batch first, to (B, T, output_size), or to (B, output_size) with `last_only`. A PackedSequence
        gives one of the outputs at every step, or with `last_only` the output at the end of each sequence.
    """

    def __init__(self, rnn: nn.Module, output: nn.Linear, *, real_part: bool = False):
        super().__init__()
        is_first = getattr(rnn, "batch_first", True)
        needs(is_first, OptionError, "SequenceModel", "a layer with batch_first=True", "one that reads (T, B, m)")
        self.rnn = rnn
        self.output = output
        self.real_part = real_part

    def forward(self, x: Tensor | PackedSequence, last_only: bool = False) -> Any:
        """Returns the outputs at every step, or at the last one; of two directions, where each of them ends.

        With gradients all states are kept in either case, which is fastest; `model.rnn(x, last_only=True)` keeps about
        :math:`√T` of them. Without, under `torch.no_grad`, only the last, if they are many.
        """
        states, last = _run(self.rnn, x, last_only)
        rows: Tensor = x.data if isinstance(x, PackedSequence) else x
        if last_only:
            return self._read(self._last(states, last, 3 if isinstance(x, PackedSequence) else x.dim()), rows)
        if isinstance(states, PackedSequence):
            return states._replace(data=self._read(states.data, rows))
        return self._read(states, rows)

    def _last(self, states: Tensor | PackedSequence, last: Tensor | tuple[Tensor, ...], dims: int) -> Tensor:
        """Returns what is read at the last step, (B, .); the layer returned `states` and `last`, which has `dims`."""
        h_n = last[0] if isinstance(last, tuple) else last
        if h_n.dim() != dims:
            got = f"{tuple(h_n.shape)} of {type(self.rnn).__name__}"
            raise ShapeError(f"SequenceModel needs a layer with last states (layers, B, n) as nn.RNN, got {got}.")
        return torch.cat([*h_n[-2:]], dim=-1) if getattr(self.rnn, "bidirectional", False) else h_n[-1]

    def _read(self, states: Tensor, x: Tensor) -> Tensor:
        if states.is_complex():
            states = states.real if self.real_part else torch.cat([states.real, states.imag], dim=-1)
        if not is_autocast(x.device):
            states = states.to(x.real.dtype)  # the last states of 16-bit layers are float32
        return self.output(states)

    def extra_repr(self) -> str:
        return "(batch, time, features)"


class _Blocks(nn.Module):
    """A linear layer and blocks, with the arguments of a recurrent layer: states are those of all blocks."""

    bidirectional = False

    def __init__(
        self, block: type[RotationBlock], input_size: int, width: int, hidden_size: int, count: int, options: dict
    ):
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, count
        self.input = nn.Linear(input_size, width)
        self.blocks = nn.ModuleList(block(width, hidden_size, **options) for _ in range(count))
        self.dropout = self.blocks[0].dropout

    def forward(self, x: Tensor | PackedSequence, hx: Tensor | None = None) -> tuple[Any, Tensor]:
        x, last = x._replace(data=self.input(x.data)) if isinstance(x, PackedSequence) else self.input(x), []
        for i, block in enumerate(self.blocks):
            x, h = block(x, None if hx is None else hx[i : i + 1])
            last.append(h)
        return x, torch.cat(last)


class _BlockModel(SequenceModel):
    """Reads what the last block gives, instead of its states."""

    def _last(self, states: Tensor | PackedSequence, last: Tensor | tuple[Tensor, ...], dims: int) -> Tensor:
        if isinstance(states, PackedSequence):
            rows, lengths = pad_packed_sequence(states, batch_first=True)
            return rows[torch.arange(len(lengths), device="cpu"), lengths - 1]
        return states[:, -1]


def stacked(
    name: str,
    block: type[RotationBlock],
    sizes: tuple[int, int, int],
    width: int | None,
    num_layers: int,
    **options: object,
) -> SequenceModel:
    """Returns the model `name` of so many residual blocks, whose width is half of the state's if left out."""
    inputs, hidden_size, outputs = sizes
    hidden_size = integer(2).require(name, "hidden_size", hidden_size)
    num_layers = integer(1).require(name, "num_layers", num_layers)
    features: int = hidden_size // 2 if width is None else integer(1).require(name, "width", width)
    blocks = _Blocks(block, inputs, features, hidden_size, num_layers, options)
    return _BlockModel(blocks, nn.Linear(features, outputs))


def count_parameters(model: nn.Module) -> int:
    """Returns the number of trained real numbers in a model, as the papers count them.

    A frame that is a coordinate itself counts with the dimension of its manifold: np - p(p + 1)/2 for a real one,
    :math:`2np - p^2` for a complex one.
    """
    bound = {
        id(w.coordinate_list.coordinates[name])
        for w in orthogonal_weights(model)
        for name in w.coordinate_list.param.manifolds
    }

    def size(p: Tensor) -> int:
        if id(p) in bound:
            *batch, n, columns = p.shape
            return math.prod(batch) * skew_size(n, columns, p.is_complex())
        return p.numel() * (1 + p.is_complex())

    return sum(size(p) for p in model.parameters() if p.requires_grad)


def _run(rnn: nn.Module, x: Tensor | PackedSequence, last_only: bool) -> Any:
    """Runs a layer, batch first; without gradients it keeps only the last of many states."""
    if last_only and isinstance(rnn, Layers) and not torch.is_grad_enabled() and not is_exported():
        rows: Tensor = x.data if isinstance(x, PackedSequence) else x
        if rows.shape[:-1].numel() * rnn.hidden_size >= MIN_DROPPED_STATES:
            return rnn(x, last_only=True)
    if isinstance(rnn, nn.LSTM | nn.GRU):
        check_export(rnn.training, rnn.dropout)
    return rnn(x)


def check_export(training: bool, dropout: float) -> None:
    """Raises OptionError if gates with dropout in training are written for ONNX, whose operators drop nothing."""
    drops, got = is_exported() and training and dropout, "dropout in training; call eval() first"
    needs(not drops, OptionError, "torch.onnx.export", "a net that drops nothing", got)


def named(rnn: nn.Module, name: str) -> list[Tensor]:
    """Returns the weights of one name in every layer and direction: weight_ih_l0, weight_ih_l0_reverse, ..."""
    return [p for key, p in rnn.named_parameters(recurse=False) if key.startswith(f"{name}_l")]


def draw_(rnn: nn.Module, name: str, scheme: Callable[..., object], *args: object, **options: object) -> None:
    """Draws the weights of one name by a function of torch.nn.init."""
    for p in named(rnn, name):
        scheme(p, *args, **options)


def recurrent(
    layer: Callable[..., nn.Module],
    parametrization: Parametrization | None = None,
    activation: str | None = "modrelu",
    *,
    is_complex: bool = False,
    real_part: bool = False,
    trainable_h0: bool = False,
    **defaults: object,
) -> Callable[[Callable[..., DrawReadOut | None]], Callable[..., SequenceModel]]:
    """Makes a model of a function that draws a layer's weights and takes, by name, options of the model alone.

    The function may return another one, which draws those of the read-out.

    Args:
        layer: the class of the layer, whose states a Glorot-uniform read-out reads.
        parametrization: the paper's map.
        activation: the paper's; None if it is part of the layer.
        is_complex: whether states are complex.
        real_part: whether the read-out reads their real parts alone.
        trainable_h0: whether the first state is trained.
        **defaults: the paper's options of its own map (of all, if it has none), or functions of n that return them.
    """
    home: Parametrization | None = parametrization
    fixed = ({"field": "complex"} if is_complex else {}) | ({"trainable_h0": True} if trainable_h0 else {})

    def decorate(draw: Callable[..., DrawReadOut | None]) -> Callable[..., SequenceModel]:
        def build(
            input_size: int,
            hidden_size: int,
            output_size: int,
            *,
            parametrization: Parametrization | None = home,
            activation: str | None = activation,
            **options: object,
        ) -> SequenceModel:
            drawn = {key: options.pop(key) for key in own if key in options}
            given: dict[str, Any] = {"parametrization": parametrization, "batch_first": True}
            cls, own_cls = (None if name is None else find_parametrization(name) for name in (parametrization, home))
            if own_cls is None or cls is own_cls:
                given |= {key: value(hidden_size) if callable(value) else value for key, value in defaults.items()}
            given |= options if activation is None else {**options, "activation": activation}
            rnn = layer(input_size, hidden_size, **fixed, **given)
            draw_read_out = draw(rnn, **drawn)
            output = read_out(rnn, output_size, parts=1 + (is_complex and not real_part))
            if draw_read_out is not None:
                draw_read_out(output)
            return SequenceModel(rnn, output, real_part=real_part)

        signature = inspect.signature(build)
        *before, last = (p for p in signature.parameters.values() if p.name != "activation" or activation is not None)
        own = {name: p for name, p in inspect.signature(draw).parameters.items() if p.kind is p.KEYWORD_ONLY}
        functools.update_wrapper(build, draw)
        build.__dict__["__signature__"] = signature.replace(parameters=[*before, *own.values(), last])
        return build

    return decorate


def read_out(rnn: Any, outputs: int, parts: int = 1) -> nn.Linear:
    """Makes a linear layer, Glorot-uniform and with zero bias, on the states of both directions or their parts."""
    layer = nn.Linear(parts * rnn.hidden_size * (1 + rnn.bidirectional), outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
