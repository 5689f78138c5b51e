"""The gated orthogonal recurrent unit, with the arguments and shapes of torch.nn.GRU."""

import contextlib
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from stiefelkit._torch import is_exported
from stiefelkit.contract.param import Parametrization
from stiefelkit.functional._arithmetic.product import FullPrecision
from stiefelkit.nn.recurrent import GRULayers, States, Steps, require_options
from stiefelkit.scan import find_activation
from stiefelkit.scan.reference import exported_loop, loop, loop_product
from stiefelkit.tensors import computing_dtype


class GORU(GRULayers):
    r"""Multi-layer gated recurrent unit whose candidate state turns by an orthogonal Q.

    :math:`r_t = sigmoid(x_t U_r^T + h_{t-1} W_r^T + b_r)`, :math:`g_t = sigmoid(x_t U_g^T + h_{t-1} W_g^T + b_g)`,
    :math:`h_t = g_t ⊙ h_{t-1} + (1 - g_t) ⊙ act(r_t ⊙ (h_{t-1} Q^T) + x_t U_c^T, b_c)`.

    Arguments and shapes are those of `torch.nn.GRU`; states are real. Those by name mean what they mean for
    `OrthogonalRNN`: the parametrization is that of Q. One loop of autograd's runs it, which keeps all states, and is
    differentiable any number of times; `torch.compile` and `torch.export` write out its steps, ONNX does not. 16-bit
    weights are computed with in float32.

    Parameters: `weight_ih_l0` = :math:`[U_r; U_g; U_c]`, `weight_gates_l0` = :math:`[W_r; W_g]`, dense, `weight_hh_l0`
    (Q, a frame), `bias_gates_l0` = :math:`[b_r; b_g]`, `bias_l0` (:math:`b_c`), and `_reverse` for the second
    direction. Matrices start Glorot-uniform, biases zero.

    References:
        Jing, Gulcehre, Peurifoy, Shen, Tegmark, Soljacic, Bengio, Gated orthogonal recurrent units: on learning to
        forget, 2017.

    >>> rnn = GORU(3, 8)
    >>> out, h_n = rnn(torch.randn(5, 2, 3))
    >>> out.shape, h_n.shape
    (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))
    """

    input_blocks: ClassVar[int] = 3
    _refused: ClassVar[dict[str, str]] = {
        "field": "its states are real",
        "backend": "one loop runs it",
        "factored": "its loop takes Q as a matrix",
    }
    matrices: ClassVar[tuple[str, ...]] = ("weight_ih", "weight_gates", "weight_hh")
    biases: ClassVar[tuple[str, ...]] = ("bias_gates", "bias")

    def __init__(self, *args: Any, parametrization: Parametrization | None = "givens", **options: Any):
        require_options(type(self), parametrization, options)
        super().__init__(*args, parametrization=parametrization, **options)

    def _add_weights(self, suffix: str, width: int, device: torch.device | str | None, options: dict[str, Any]) -> None:
        super()._add_weights(suffix, width, device, options)
        n = self.hidden_size
        gates = torch.empty(2 * n, n, device=device, dtype=self.dtype).uniform_(-1, 1) * (3 / n) ** 0.5
        self.register_parameter(f"weight_gates{suffix}", nn.Parameter(gates))
        if self.has_bias:
            zero = torch.zeros(2 * n, device=device, dtype=self.dtype)
            self.register_parameter(f"bias_gates{suffix}", nn.Parameter(zero))

    @torch.no_grad()
    def _reset(self, suffix: str) -> None:
        super()._reset(suffix)
        bound = (3 / self.hidden_size) ** 0.5
        self._read("weight_gates", suffix).uniform_(-bound, bound)
        if self.has_bias:
            self._read("bias_gates", suffix).zero_()

    def _run(self, suffix: str, x: Tensor, h0: Tensor | None, batch: int, **steps: Unpack[Steps]) -> States:
        q, w, u = (self._read(f"weight_{name}", suffix) for name in ("hh", "gates", "ih"))
        bias = self._read("bias_gates", suffix) if self.has_bias else w.new_zeros(len(w))
        within = self._read("bias", suffix) if self.has_bias else w.new_zeros(self.hidden_size)
        dtype = computing_dtype(q.dtype)
        given = x, self._first(suffix, h0, batch, q), q, w, u, bias, within
        x, h, q, w, u, bias, within = (t.to(dtype).detach() if is_exported() else t.to(dtype) for t in given)
        act, n = find_activation(self.activation, False), self.hidden_size
        outer = torch.zeros_like(within) if act.bias_inside else within
        inner = (within,) if act.bias_inside and self.has_bias else ()
        with contextlib.nullcontext() if torch.compiler.is_compiling() else FullPrecision(x.device):
            times, wt = loop_product(x.device), torch.cat([q, w]).mT.contiguous()
            rows = times(x.contiguous(), u.mT) + torch.cat([bias, outer])

            def step(row: Tensor, h: Tensor) -> Tensor:
                # Parts of one split are joined by one operator on the way back; those of slices would be added up.
                (turned, of_h), (of_x, driven) = times(h, wt).split([n, 2 * n], -1), row.split([2 * n, n], -1)
                r, g = torch.sigmoid(of_x + of_h).chunk(2, dim=-1)
                z = torch.addcmul(driven, r, turned)
                return torch.lerp(act(z, *inner), h, g)

            if is_exported() and steps["batch_sizes"] is None:  # any number of steps
                out, last = exported_loop(step, rows, h, steps["reverse"])
                out = None if steps["last_only"] else out
            else:
                out, last = loop(step, rows, h, **steps)
        return None if out is None else out.to(given[2].dtype), last.to(given[2].dtype)
