"""Recurrent layers whose transition is a product of reflections by keys that the input gives."""

import math
from typing import Any, ClassVar, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stiefelkit.errors import OptionError, UnknownNameError, did_you_mean, needs, shown
from stiefelkit.functional import product
from stiefelkit.nn.recurrent import GRULayers, States, Steps, require_options, without_autocast
from stiefelkit.nn.rotation_rnn import LinearRecurrence, RotationBlock, decay_range
from stiefelkit.numbers import FLAG, integer, optional
from stiefelkit.scan import reflectors
from stiefelkit.tensors import coordinate_dtype


class ReflectorRNN(LinearRecurrence):
    r"""Multi-layer RNN :math:`h_t = g_t H(k_{t,m}) ... H(k_{t,1}) h_{t-1} + U x_t + b`, reflections by keys of x.

    :math:`H(k) = I - 2 k k^T / |k|^2`, and keys are linear in the input. Products of reflections follow groups that do
    not commute, as permutations, and keep every length, however long the sequence is: :math:`|k|^2` is that of the key
    as it is stored. Time is parallel (`stiefelkit.scan.reflector_scan`). States are divided among heads, each with m
    keys of its own; with `columns` the state of a head is a matrix, whose columns are reflected alike.

    Parameters: `weight_ih_l0`, rows of keys (m, heads, d), of beta, of rates and, last, U; `bias_l0` with the same
    rows; `log_rate_l0` (heads) with a decay, `weight_conv_l0` (m, taps) with a convolution, and `_reverse` for the
    second direction. Shapes and other arguments are those of `OrthogonalRNN`.

    Args:
        input_size: width m of the input.
        hidden_size: width n of the state, a multiple of heads times columns: d x columns for each head.
        num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as in `OrthogonalRNN`.
        heads: how many parts of the state have keys of their own.
        columns: columns of the state of a head.
        reflections: m. Their product has determinant :math:`(-1)^m` with "exact".
        tau: "exact", "gated" or "free", as in `stiefelkit.scan.reflector_scan`; beta is the sigmoid of a linear
            function of x, twice that with "free".
        decay: the range that each head's :math:`g = 1 / (1 + e^q)` is drawn from, log-uniformly in :math:`-log g`,
            where q is linear in x with the bias `log_rate`; None for :math:`g = 1`.
        conv: taps of a convolution over time, of each input by itself, with SiLU, before all; None for none.
        additive: whether U x + b is added. Without, inputs only turn the state, which begins as a trained one.
        trainable_h0: as in `OrthogonalRNN`; needed, and drawn from N(0, 1), without `additive`.
        backend: as in `stiefelkit.scan.reflector_scan`.

    References:
        Siems, Carstensen, Zela, Hutter, Pontil, Grazzi, DeltaProduct: improving state-tracking in linear RNNs via
        Householder products, NeurIPS 2025.
        Grazzi, Siems, Franke, Zela, Hutter, Pontil, Unlocking state-tracking in linear RNNs through negative
        eigenvalues, ICLR 2025.

    >>> rnn = ReflectorRNN(3, 8, heads=2)
    >>> out, h_n = rnn(torch.randn(5, 2, 3))
    >>> out.shape, h_n.shape
    (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))
    """

    matrices: ClassVar[tuple[str, ...]] = ("weight_ih",)
    coordinate_parameters: ClassVar[tuple[str, ...]] = ("log_rate",)
    _refused: ClassVar[dict[str, str]] = {
        **LinearRecurrence._refused,
        "parametrization": "its transition is made of the input; sk.nn.OrthogonalRNN has a constant one",
        "field": "its states are real",
        "factored": "its transition is in factors always",
    }
    backends: ClassVar[tuple[str, ...]] = reflectors.REFLECTOR_BACKENDS

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *args: Any,
        heads: int = 1,
        columns: int = 1,
        reflections: int = 2,
        tau: str = "exact",
        decay: tuple[float, float] | None = None,
        conv: int | None = None,
        additive: bool = True,
        trainable_h0: bool = False,
        **options: Any,
    ):
        require_options(type(self), None, options)
        name = self._name
        n = integer(1).require(name, "hidden_size", hidden_size)
        self.heads = integer(1).require(name, "heads", heads)
        self.columns = integer(1).require(name, "columns", columns)
        self.reflections = integer(1).require(name, "reflections", reflections)
        parts = self.heads * self.columns
        needs(n % parts == 0, OptionError, name, f"a hidden_size that is a multiple of {parts}", f"{n}, heads={heads}")
        if tau not in reflectors.TAUS:
            raise UnknownNameError(f"{name} has no tau {shown(tau)}{did_you_mean(str(tau), reflectors.TAUS)}")
        self.tau, self.decay = tau, None if decay is None else decay_range(name, decay)
        self.conv = optional(integer(1)).require(name, "conv", conv)
        self.additive = FLAG.require(name, "additive", additive)
        needs(additive or trainable_h0, OptionError, name, "trainable_h0=True with additive=False", trainable_h0)
        width, betas = n // parts, {"exact": 0, "gated": 1, "free": self.reflections}[tau]
        self._state, has_decay = (self.heads, width, self.columns), self.decay is not None
        self._rows = self.heads * reflections * width, self.heads * betas, self.heads * has_decay, n * self.additive
        super().__init__(input_size, n, *args, parametrization=None, trainable_h0=trainable_h0, **options)

    @property
    def _input_rows(self) -> int:
        return sum(self._rows)

    def _add_frame(self, suffix: str, device: torch.device | str | None, options: dict[str, Any]) -> None:
        if self.decay is not None:
            empty = torch.empty(self.heads, device=device, dtype=coordinate_dtype(self.dtype))
            self.register_parameter(f"log_rate{suffix}", nn.Parameter(empty))
        if self.conv is not None:
            width = self._read("weight_ih", suffix).shape[1]
            taps = torch.empty(width, self.conv, device=device, dtype=self.dtype)
            self.register_parameter(f"weight_conv{suffix}", nn.Parameter(taps))

    def _add_weights(self, suffix: str, width: int, device: torch.device | str | None, options: dict[str, Any]) -> None:
        super()._add_weights(suffix, width, device, options)
        self._draw(suffix)

    @torch.no_grad()
    def _draw(self, suffix: str) -> None:
        if self.decay is not None:
            slow, fast = (math.log(-math.log(g)) for g in reversed(self.decay))
            rates = self._read("log_rate", suffix)
            # g = 1 / (1 + e^q) for -log g, uniform in its logarithm.
            rates.copy_(torch.log(torch.expm1(torch.empty_like(rates).uniform_(slow, fast).exp())))
        if self.conv is not None:
            self._read("weight_conv", suffix).uniform_(-(self.conv**-0.5), self.conv**-0.5)
        if not self.additive:
            self._read("h0", suffix).normal_()

    @torch.no_grad()
    def _reset(self, suffix: str) -> None:
        super()._reset(suffix)
        self._draw(suffix)

    def _steps(self, suffix: str, x: Tensor) -> reflectors.Steps:
        """Returns what a layer and direction gives the scan for inputs (B, T, m), in float32 at least."""
        u = self._read("weight_ih", suffix)
        rows = product(x, u.mT.to(x.dtype))
        if self.has_bias:
            rows = rows + self._read("bias", suffix).to(x.dtype)
        keys, logits, rates, added = rows.split(self._rows, -1)
        heads, width, columns = self._state
        keys = keys.unflatten(-1, (self.reflections, heads, width))
        beta = decay = None
        if self.tau == "gated":
            beta = logits.sigmoid()
        elif self.tau == "free":
            keys = F.normalize(keys, dim=-1)
            beta = 2 * logits.sigmoid().unflatten(-1, (self.reflections, heads))
        if self.decay is not None:
            decay = F.logsigmoid(-(rates + self._read("log_rate", suffix).to(x.dtype)))
        values = added.unflatten(-1, (heads, width, columns)) if self.additive else None
        return reflectors.Steps(None, keys, values, beta, decay)

    def _convolved(self, suffix: str, x: Tensor, before: Tensor | None, reverse: bool) -> Tensor:
        """Returns SiLU of the convolution of inputs (B, T, m), which follow those `before`, or zeros."""
        taps = self._read("weight_conv", suffix).to(x.dtype)
        zeros = x.new_zeros(x.shape[0], taps.shape[1] - 1, x.shape[2]) if before is None else before
        padded = torch.cat([x, zeros] if reverse else [zeros, x], 1)
        lags = taps.flip(1) if reverse else taps
        return F.silu(sum(padded[:, i : i + x.shape[1]] * lags[:, i] for i in range(taps.shape[1])))  # type: ignore[arg-type]

    def _run(self, suffix: str, x: Tensor, h0: Tensor | None, batch: int, **steps: Unpack[Steps]) -> States:
        real, sizes = self._dtypes()[0], steps["batch_sizes"]
        with without_autocast(x.device):
            x = x.to(coordinate_dtype(real))
            first = self._first(suffix, h0, batch, x).unflatten(-1, self._state)
            x = x.unsqueeze(0) if sizes is not None else x.transpose(0, 1)
            if self.conv is not None:
                rows = x if sizes is None else reflectors.unpacked(x[0], sizes)
                x = self._convolved(suffix, rows, None, steps["reverse"])
                x = x if sizes is None else reflectors.packed(x, sizes)
            given = self._steps(suffix, x)
            out, last = reflectors.scan_reflectors(given, first, self.tau, real, backend=self.backend, **steps)
            if out is not None:
                out = out.squeeze(0).flatten(1) if sizes is not None else out.transpose(0, 1).flatten(2)
            return out, last.flatten(1)

    def _begun(self, suffix: str, h0: Tensor | None, x: Tensor) -> tuple[Tensor, Any]:
        like = x.to(coordinate_dtype(x.dtype))
        width = self._read("weight_ih", suffix).shape[1]
        inputs = None if self.conv is None else like.new_zeros(len(x), self.conv - 1, width)
        return self._first(suffix, h0, len(x), like).unflatten(-1, self._state).double(), inputs

    def _stepped(self, suffix: str, x: Tensor, h: Tensor, kept: Any) -> tuple[Tensor, Tensor, Any]:
        with without_autocast(x.device):
            row = x.to(coordinate_dtype(self._dtypes()[0])).unsqueeze(1)
            if kept is not None:
                before, kept = kept, torch.cat([kept, row], 1)[:, 1:]
                row = self._convolved(suffix, row, before, False)
            how: Steps = {"batch_sizes": None, "reverse": False, "last_only": True}
            _, h = reflectors.scan_reflectors(self._steps(suffix, row), h, self.tau, torch.float64, **how)
        return h.flatten(1), h, kept


class ReflectorBlock(RotationBlock):
    """A `RotationBlock` around a `ReflectorRNN`: options are `dropout`, `device` and `dtype`, and those of the layer.

    >>> ReflectorBlock(4, 8, heads=2)(torch.randn(2, 5, 4))[0].shape
    torch.Size([2, 5, 4])
    """

    layer: ClassVar[type[GRULayers]] = ReflectorRNN
