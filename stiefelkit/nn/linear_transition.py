"""The recurrent layer whose states move linearly: the activation is on the input alone."""

import contextlib
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional import product
from stiefelkit.functional._arithmetic.product import is_autocast
from stiefelkit.nn.layers import Layers
from stiefelkit.scan import Factored, find_activation, scan


class LinearTransitionRNN(Layers):
    """Multi-layer RNN :math:`h_t = act(x_t U^T + b) + h_{t-1} W^T`, with the arguments and shapes of `OrthogonalRNN`.

    The bias stands inside the activation for modReLU, and is added to the input projection for others.

    References:
        Henaff, Szlam, LeCun, Recurrent orthogonal networks and long-memory tasks, ICML 2016.

    >>> import torch
    >>> rnn = LinearTransitionRNN(3, 8, parametrization=None, activation="relu")
    >>> rnn(torch.zeros(5, 2, 3))[0].shape
    torch.Size([5, 2, 8])
    """

    def _run(
        self, suffix: str, x: Tensor, h_0: Tensor | None, batch: int, **steps: Any
    ) -> tuple[Tensor | None, Tensor]:
        w = self._matrix(suffix, x, batch, steps["batch_sizes"])
        shown = w.factors if isinstance(w, Factored) else w
        u = self._join(getattr(self, f"weight_ih{suffix}"))
        bias = getattr(self, f"bias{suffix}") if self.has_bias else None
        if bias is not None and not self._bias_inside:
            bias = self._join(bias)
        # As precise as the scan, in which the projection stands elsewhere: float32 at least, and out of autocast.
        dtype = torch.promote_types(shown.dtype, torch.float32)
        autocast = torch.autocast(x.device.type, enabled=False) if is_autocast(x.device) else contextlib.nullcontext()
        with autocast:
            projected = product(x.to(dtype), u.to(dtype).mT)
            driven = find_activation(self.activation, self.is_complex)(projected, bias)
        first = self._first(suffix, h_0, batch, shown)
        return scan(driven, w, first, activation="identity", backend=self.backend, **steps)
