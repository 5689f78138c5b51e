"""torch's gated nets with recurrent blocks that are frames, one for each gate."""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from stiefelkit.contract.param import Parametrization
from stiefelkit.errors import OptionError, ShapeError, needs
from stiefelkit.models.sequence import check_export, draw_, named
from stiefelkit.nn.recurrent import check_dropout, check_stack, other_choices
from stiefelkit.nn.torch_rnn import fill_, options_of
from stiefelkit.numbers import integer
from stiefelkit.weights.attach import orthogonal

Kind = type[nn.LSTM] | type[nn.GRU]


def gated(
    kind: Kind, input_size: int, hidden_size: int, *, parametrization: Parametrization | None = None, **options: Any
) -> nn.Module:
    """Returns torch's LSTM or GRU, Glorot-uniform, with one trained bias, zero, and frames if parametrized."""
    if parametrization is not None:
        return FrameGates(kind, input_size, hidden_size, parametrization, **options)
    stack = {key: options.pop(key) for key in ("num_layers", "bidirectional", "dropout") if key in options}
    del options["batch_first"]
    needs(not options, OptionError, kind.__name__, f"a parametrization for {', '.join(options)}", "none")
    rnn = kind(input_size, hidden_size, batch_first=True, **check_stack(kind.__name__, **stack))
    for u, w in zip(named(rnn, "weight_ih"), named(rnn, "weight_hh"), strict=True):
        nn.init.xavier_uniform_(u)
        nn.init.xavier_uniform_(w)
    draw_(rnn, "bias_ih", nn.init.zeros_)
    for second in named(rnn, "bias_hh"):
        nn.init.zeros_(second).requires_grad_(False)
    return rnn


class FrameGates(nn.Module):
    """torch's LSTM or GRU, batch first, whose n x n recurrent blocks are frames.

    The weight `weight_hh_l0` has shape (gates, n, n) instead of (gates n, n), so that one map serves all blocks; the
    kernel is torch's. There is one bias vector a layer and direction. torch's own layers keep a list of their weights
    and cannot be parametrized. `from_torch` takes a trained one over.

    Args:
        kind: nn.LSTM or nn.GRU.
        input_size, hidden_size: m and n.
        parametrization: of each block, a registered name or a class.
        num_layers, bidirectional, dropout, batch_first: as in torch's layers.
        second_bias: whether there is torch's second bias, too: that of a GRU's candidate stands inside of a gate.
        **options: of the parametrization, and `init=`.

    >>> net = FrameGates(nn.GRU, 3, 8, "cayley")
    >>> out, h_n = net(torch.randn(2, 5, 3))
    >>> out.shape, h_n.shape
    (torch.Size([2, 5, 8]), torch.Size([1, 2, 8]))
    """

    def __init__(
        self,
        kind: Kind,
        input_size: int,
        hidden_size: int,
        parametrization: Parametrization,
        *,
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        batch_first: bool = True,
        second_bias: bool = False,
        **options: Any,
    ):
        super().__init__()
        is_gated = isinstance(kind, type) and issubclass(kind, nn.LSTM | nn.GRU)
        needs(is_gated, OptionError, "FrameGates", "nn.LSTM or nn.GRU", kind)
        self.batch_first, self.second_bias = batch_first, second_bias
        self.is_lstm = issubclass(kind, nn.LSTM)
        gates, who = 4 if self.is_lstm else 3, type(self).__name__
        self.input_size = input_size = integer(1).require(who, "input_size", input_size)
        self.hidden_size = hidden_size = integer(1).require(who, "hidden_size", hidden_size)
        stack = check_stack(who, num_layers=num_layers, bidirectional=bidirectional, dropout=dropout)
        self.num_layers, self.bidirectional, self.dropout = num_layers, bidirectional, dropout = stack.values()
        check_dropout(who, num_layers, dropout)
        directions = ("", "_reverse") if bidirectional else ("",)
        self._suffixes = [f"_l{layer}{direction}" for layer in range(num_layers) for direction in directions]
        for suffix in self._suffixes:
            m = input_size if suffix.startswith("_l0") else hidden_size * len(directions)
            u = nn.init.xavier_uniform_(torch.empty(gates * hidden_size, m))
            self.register_parameter(f"weight_ih{suffix}", nn.Parameter(u))
            w = torch.zeros(gates, hidden_size, hidden_size)
            self.register_parameter(f"weight_hh{suffix}", nn.Parameter(w))
            for bias in ("bias_ih", "bias_hh")[: 1 + second_bias]:
                self.register_parameter(f"{bias}{suffix}", nn.Parameter(torch.zeros(gates * hidden_size)))
            orthogonal(self, f"weight_hh{suffix}", parametrization, **options)

    @classmethod
    def from_torch(
        cls,
        source: nn.LSTM | nn.GRU,
        *,
        init: str | None = "project",
        parametrization: Parametrization = "cayley",
        batch_first: bool | None = None,
        dropout: float | None = None,
        **options: Any,
    ) -> Self:
        """Takes a torch.nn.LSTM or GRU over: sizes, options and weights; each gate's n x n block the nearest frame.

        All else stays: input weights, both biases, dtype, device, mode and which weights are trained. Where the blocks
        are frames already, outputs are the same up to rounding. Nothing is shared, and errors are those of
        `OrthogonalRNN.from_torch`.

        Args:
            source: a torch.nn.LSTM or GRU. Load a state dict into one first.
            init: "project" takes the nearest frames; None refuses blocks that are none.
            parametrization: of each block, a registered name or a class.
            batch_first: another order of dimensions than the source's.
            dropout: another one.
            **options: of the parametrization.

        >>> net = FrameGates.from_torch(nn.LSTM(3, 8, num_layers=2, bidirectional=True))
        >>> out, (h_n, c_n) = net(torch.randn(5, 2, 3))
        >>> out.shape, c_n.shape
        (torch.Size([5, 2, 16]), torch.Size([4, 2, 8]))
        """
        who = f"{cls.__name__}.from_torch"
        asked = {"batch_first": batch_first, "dropout": dropout}
        given = options_of(who, source, (nn.LSTM, nn.GRU), init, asked, options, "kind", "second_bias")
        has_bias, place = given.pop("bias"), {key: given.pop(key) for key in ("dtype", "device")}
        kind = nn.LSTM if isinstance(source, nn.LSTM) else nn.GRU
        net = cls(kind, parametrization=parametrization, second_bias=has_bias, **given).to(**place)
        fill_(who, net, source, init)
        if not has_bias:
            for b in named(net, "bias_ih"):
                b.requires_grad_(False)
        return net

    def forward(self, input: Tensor | PackedSequence, hx: Any = None) -> tuple[Any, Tensor | tuple[Tensor, Tensor]]:
        """Runs the net over (B, T, m), (T, B, m) without batch_first, (T, m) or a PackedSequence, as torch's layers do.

        `hx` is the first state, or the pair of an LSTM, zero if left out; outputs and last states are torch's.
        """
        check_export(self.training, self.dropout)
        packed = input if isinstance(input, PackedSequence) else None
        x: Tensor = input.data if isinstance(input, PackedSequence) else input
        if x.dim() not in ((2, 3) if packed is None else (2,)) or x.shape[-1] != self.input_size:
            order = "batch, time" if self.batch_first else "time, batch"
            raise ShapeError(f"FrameGates needs an input ({order}, {self.input_size}), got {tuple(x.shape)}.")
        if x.dim() == 2 and packed is None:
            dim = 0 if self.batch_first else 1
            h = hx if hx is None else tuple(h[:, None] for h in hx) if self.is_lstm else hx[:, None]
            out, last = self(x.unsqueeze(dim), h)
            return out.squeeze(dim), tuple(h[:, 0] for h in last) if self.is_lstm else last[:, 0]
        batch = int(packed.batch_sizes[0]) if packed is not None else x.shape[0 if self.batch_first else 1]
        states = self._first(hx, x, batch)
        flat: list[Tensor] = []
        for suffix in self._suffixes:
            u, w, bias = (getattr(self, f"{name}{suffix}") for name in ("weight_ih", "weight_hh", "bias_ih"))
            second = self.get_parameter(f"bias_hh{suffix}") if self.second_bias else torch.zeros_like(bias)
            flat += [u, w.flatten(0, 1), bias, second]
        stack = (flat, True, self.num_layers, self.dropout, self.training, self.bidirectional)
        kernel: Any = torch.lstm if self.is_lstm else torch.gru
        if packed is None:
            out, *last = kernel(x, states if self.is_lstm else states[0], *stack, self.batch_first)
            return out, tuple(last) if self.is_lstm else last[0]
        order, back = packed.sorted_indices, packed.unsorted_indices
        states = states if order is None else [h.index_select(1, order) for h in states]
        out, *last = kernel(x, packed.batch_sizes, states if self.is_lstm else states[0], *stack)
        last = last if back is None else [h.index_select(1, back) for h in last]
        return packed._replace(data=out), tuple(last) if self.is_lstm else last[0]

    def _first(self, hx: Any, x: Tensor, batch: int) -> list[Tensor]:
        shape = (len(self._suffixes), batch, self.hidden_size)
        if hx is None:
            return [x.new_zeros(shape)] * (1 + self.is_lstm)
        given = [*hx] if isinstance(hx, tuple | list) else [hx]
        if len(given) != 1 + self.is_lstm or any(h.shape != shape for h in given):
            count = "a pair of hx" if self.is_lstm else "an hx"
            raise ShapeError(f"FrameGates needs {count} of shape {shape}, got {[tuple(h.shape) for h in given]}.")
        return given

    def extra_repr(self) -> str:
        text = f"{self.input_size}, {self.hidden_size}, batch_first={self.batch_first}"
        return text + other_choices(self, num_layers=1, dropout=0, bidirectional=False, second_bias=False)
