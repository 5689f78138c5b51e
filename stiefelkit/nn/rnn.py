"""Recurrent layers whose recurrent matrix is orthogonal or unitary, with the arguments and shapes of torch.nn.RNN."""

from typing import Any, Self, Unpack

import torch
from torch import Tensor, nn

from stiefelkit.contract.param import Parametrization
from stiefelkit.errors import ShapeError
from stiefelkit.functional import product
from stiefelkit.nn.recurrent import Layers, Recurrent, States, Steps, without_autocast
from stiefelkit.nn.torch_rnn import fill_, options_of
from stiefelkit.scan import find_activation, scan


class _Scanned(Recurrent):
    """The recurrence h_t = act(x_t U^T + h_{t-1} W^T)."""

    def _run(self, suffix: str, x: Tensor, h0: Tensor | None, batch: int, **steps: Unpack[Steps]) -> States:
        w, u, first = self._begin(suffix, x, h0, batch, steps["batch_sizes"])
        how: dict[str, Any] = {"activation": self.activation, "backend": self.backend, **steps}
        if self.has_bias:
            bias = self._read("bias", suffix)
            how |= {"activation_bias": bias} if self._bias_inside else {"bias": self._join(bias)}
        return scan(x, w, first, u=u, **how)


class OrthogonalRNN(_Scanned, Layers):
    r"""Multi-layer RNN :math:`h_t = act(x_t U^T + h_{t-1} W^T)` with an orthogonal or unitary W.

    It stands in the place of `torch.nn.RNN`: positional arguments, shapes, `hx=` and names are torch's, and
    `from_torch` takes a trained one over. Two things differ: the activation is modReLU unless named, and there is one
    bias, not two. Parameters: `weight_ih_l0` (U), `weight_hh_l0` (W, a frame), `bias_l0`, and `_reverse` for the second
    direction. With modReLU the bias stands inside the activation, as in the papers; with others it is added to the
    input projection. W is evaluated once a forward.

    As in torch, time comes first, (T, B, .), unless `batch_first=True`; an input in the wrong order raises no error.
    (The models of `stiefelkit.models` always read the batch first.)

    With `field="complex"` states and outputs are complex, of `hidden_size` complex numbers, while every parameter is
    real: U as [Re; Im] of shape (2n, m), a trained h0 as [Re | Im] of shape (2n,), W by its coordinates, or as
    [Re; Im] if it is free.

    Args:
        input_size: width m of the input.
        hidden_size: width n of the state.
        num_layers: how many layers are stacked.
        nonlinearity: torch's name of `activation`; one of both is given.
        bias: whether there is a bias; modReLU without one is the identity, and the net linear.
        batch_first: whether input and output are (B, T, .) rather than (T, B, .).
        dropout: probability with which outputs between layers are zeroed in training; one layer has none, and warns.
        bidirectional: whether a second direction runs from the end.
        device: of the parameters.
        dtype: real dtype of the parameters; the complex field uses its complex counterpart.
        parametrization: of W, a registered name or a class; None for a free matrix, which is only drawn as a frame.
        field: "real" (orthogonal W) or "complex" (unitary W).
        activation: one of `stiefelkit.scan.activations.names()`, or "leaky_relu(0.2)" for a slope; complex: "modrelu"
            or "identity". None is "modrelu".
        trainable_h0: whether the first state is a parameter, initially U(-0.01, 0.01), used when no hx is given.
        backend: what runs the recurrence, as in `stiefelkit.scan.scan`.
        factored: whether the recurrence takes W in factors, which "givens" (a brick wall), "householder" and "fourier"
            have, and never forms it; None does where that is faster, on a CPU. Numbers agree up to rounding.
        **options: options of the parametrization (`negative=`) and `init=`; a free W takes the schemes of
            `stiefelkit.init`, "haar" when none is named.

    Shape:
        input (T, B, m), (B, T, m) with batch_first, (T, m) unbatched, or a PackedSequence; hx (layers * directions,
        B, n); output (T, B, directions * n) and h_n like hx.

    >>> rnn = OrthogonalRNN(3, 8)
    >>> out, h_n = rnn(torch.randn(5, 2, 3))
    >>> out.shape, h_n.shape
    (torch.Size([5, 2, 8]), torch.Size([1, 2, 8]))
    """

    @classmethod
    def from_torch(
        cls,
        source: nn.RNN,
        *,
        init: str | None = "project",
        parametrization: Parametrization | None = "cayley",
        nonlinearity: str | None = None,
        batch_first: bool | None = None,
        dropout: float | None = None,
        **options: Any,
    ) -> Self:
        """Takes a torch.nn.RNN over: a net of the same sizes, options and weights, each W the frame nearest to its own.

        Where the recurrent matrices are frames already, outputs are the same up to rounding. The two biases of torch
        are added up. Dtype, device, mode and which weights are trained stay as they are; nothing is shared.

        Args:
            source: a torch.nn.RNN. Load a state dict into one first.
            init: "project" takes the nearest frame (of the map "margin", the nearest near-frame); None refuses others.
            parametrization: of W, a registered name or a class; None for a free one, which is taken as it is.
            nonlinearity: another activation than the source's.
            batch_first: another order of dimensions.
            dropout: another one.
            **options: `trainable_h0`, `backend`, and options of the parametrization.

        >>> rnn = OrthogonalRNN.from_torch(nn.RNN(3, 8, num_layers=2, bidirectional=True))
        >>> rnn(torch.randn(5, 2, 3))[0].shape
        torch.Size([5, 2, 16])
        """
        who = f"{cls.__name__}.from_torch"
        asked = {"nonlinearity": nonlinearity, "batch_first": batch_first, "dropout": dropout}
        options = options_of(who, source, (nn.RNN,), init, asked, options, "activation", "field")
        rnn = cls(parametrization=parametrization, **options)
        fill_(who, rnn, source, init)
        return rnn


class LinearTransitionRNN(Layers):
    """Multi-layer RNN :math:`h_t = act(x_t U^T + b) + h_{t-1} W^T`, with the arguments and shapes of `OrthogonalRNN`.

    The bias stands inside the activation for modReLU, and is added to the input projection for others.

    References:
        Henaff, Szlam, LeCun, Recurrent orthogonal networks and long-memory tasks, ICML 2016.

    >>> rnn = LinearTransitionRNN(3, 8, parametrization=None, activation="relu")
    >>> rnn(torch.zeros(5, 2, 3))[0].shape
    torch.Size([5, 2, 8])
    """

    def _run(self, suffix: str, x: Tensor, h0: Tensor | None, batch: int, **steps: Unpack[Steps]) -> States:
        w, u, first = self._begin(suffix, x, h0, batch, steps["batch_sizes"])
        bias = self._read("bias", suffix) if self.has_bias else None
        if bias is not None and not self._bias_inside:
            bias = self._join(bias)
        # As precise as the scan, in which the projection stands elsewhere: float32 at least, and out of autocast.
        dtype = torch.promote_types(first.dtype, torch.float32)
        with without_autocast(x.device):
            projected = product(x.to(dtype), u.to(dtype).mT)
            driven = find_activation(self.activation, self.is_complex)(projected, bias)
        return scan(driven, w, first, activation="identity", backend=self.backend, **steps)


class OrthogonalRNNCell(_Scanned):
    """One step of `OrthogonalRNN`, with the arguments and shapes of torch.nn.RNNCell.

    W is evaluated at each call; under `torch.nn.utils.parametrize.cached()` once for a whole loop. All arguments mean
    what they mean for `OrthogonalRNN`.

    Shape:
        input (B, m) or (m,), hx (B, n) or (n,), output like hx.

    >>> cell = OrthogonalRNNCell(3, 8, field="complex")
    >>> cell(torch.randn(2, 3)).dtype
    torch.complex64
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        self._check_input(input)
        if hx is not None:
            self._check_input(hx, "an hx")
        if input.dim() not in (1, 2):
            raise ShapeError(f"OrthogonalRNNCell needs an input of 1 or 2 dimensions, got shape {tuple(input.shape)}.")
        self._check_width(input)
        shape = (*input.shape[:-1], self.hidden_size)
        if hx is not None and tuple(hx.shape) != shape:
            raise ShapeError(f"OrthogonalRNNCell needs hx of shape {shape}, got {tuple(hx.shape)}.")
        x = input.unsqueeze(0) if input.dim() == 2 else input.reshape(1, 1, -1)
        steps: Steps = {"batch_sizes": None, "reverse": False, "last_only": False}
        _, h = self._run("", x, None if hx is None else hx.reshape(-1, self.hidden_size), x.shape[1], **steps)
        return h.reshape(shape)
