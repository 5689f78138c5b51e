"""`goru_scan`: the gated orthogonal recurrence over a whole sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.errors import DtypeError, UnknownNameError, did_you_mean, shown
from stiefelkit.scan.activations import find_activation
from stiefelkit.scan.checks import DTYPES, GATED, Recurrence, check_shapes, require_pairs, sizes_of
from stiefelkit.scan.choice import choose_gated
from stiefelkit.scan.dispatch import prefers_loop, run

GORU_BACKENDS = ("auto", "reference", "inplace", "triton")
"""Names that `goru_scan` takes as `backend`."""


def goru_scan(
    x: Tensor,
    h0: Tensor,
    q: Tensor,
    w: Tensor,
    *,
    u: Tensor,
    bias: Tensor,
    activation_bias: Tensor | None = None,
    activation: str = "modrelu",
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
    last_only: bool = False,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor]:
    r"""Runs the gated orthogonal recurrent unit over time, real states only.

    r_t = sigmoid(x_t u_r^T + h_{t-1} w_r^T + b_r), g_t = sigmoid(x_t u_g^T + h_{t-1} w_g^T + b_g),
    c_t = act(r_t * (h_{t-1} q^T) + x_t u_c^T, b_c), h_t = g_t * h_{t-1} + (1 - g_t) * c_t.

    The fast backend keeps the states and nothing else of the forward pass, takes one product a step forward and one
    back, and runs in full float32 precision whatever TF32 and autocast are set to; with `last_only` it keeps about
    T^(1/2) states. 16-bit weights are computed with in float32, and rounded at the end. Only "reference" is
    differentiable twice and in forward mode; "auto" takes it under torch.func.jvp.

    Args:
        x: inputs, time-major, shape (T, B, m). With `batch_sizes`, the packed rows (sum of sizes, m) of torch's
            PackedSequence.
        h0: first state, shape (B, n).
        q: orthogonal matrix, shape (n, n).
        w: matrices of the gates, [w_r; w_g], shape (2n, n).
        u: input matrices, [u_r; u_g; u_c], shape (3n, m).
        bias: of the gates, [b_r; b_g], shape (2n,).
        activation_bias: b_c, second argument of the activation, shape (n,).
        activation: one of `stiefelkit.scan.activations.names()`; without a bias modReLU is the identity.
        batch_sizes: rows alive at each step, not increasing, for sequences of different lengths.
        reverse: run from the last step to the first; outputs stay at their own steps.
        last_only: return None for the outputs.
        backend: "auto", the last of these that can do it; "reference", a loop of autograd's; "inplace", chunk by chunk
            in torch operators, for any device; "triton", one kernel for all steps, CUDA, up to 128 units.

    Returns:
        Outputs of shape (T, B, n), packed rows with `batch_sizes`, and the last state of every sequence, (B, n).

    Raises:
        ShapeError: sizes do not fit together.
        UnknownNameError: there is no such activation or backend.
        OptionError: the backend cannot do this.
        DtypeError: something is complex, or q is not floating.

    References:
        Jing, Gulcehre, Peurifoy, Shen, Tegmark, Soljacic, Bengio, Gated orthogonal recurrent units: on learning to
        forget, 2017.

    >>> n = 3
    >>> q, w, u = torch.eye(n), torch.zeros(2 * n, n), torch.zeros(3 * n, 1)
    >>> out, h_n = goru_scan(torch.ones(2, 1, 1), torch.ones(1, n), q, w, u=u, bias=torch.zeros(2 * n))
    >>> h_n
    tensor([[0.5625, 0.5625, 0.5625]])
    """
    if backend not in GORU_BACKENDS:
        raise UnknownNameError(f"goru_scan has no backend {shown(backend)}{did_you_mean(backend, GORU_BACKENDS)}")
    act, name = find_activation(activation, False), activation
    tensors = {"x": x, "h0": h0, "q": q, "w": w, "u": u, "bias": bias, "activation_bias": activation_bias}
    for key, tensor in tensors.items():
        if tensor is not None and tensor.is_complex():
            raise DtypeError(f"goru_scan needs a real {key}, since its gates are, got {tensor.dtype}.")
    if q.dtype not in DTYPES:
        raise DtypeError(f"goru_scan needs q of a floating dtype, got {q.dtype}.")
    n, m, batch, steps = sizes_of("goru_scan", "q", q, x, batch_sizes)
    shapes = {"h0": (batch, n), "w": (2 * n, n), "u": (3 * n, m), "bias": (2 * n,), "activation_bias": (n,)}
    check_shapes("goru_scan", x, batch_sizes, {key: (tensors[key], shape) for key, shape in shapes.items()})
    require_pairs(act, n)
    dtype = DTYPES[q.dtype][0]
    inner, outer = (activation_bias, None) if act.bias_inside else (None, activation_bias)
    if act.bias_inside and inner is None:
        name = "identity"
    if backend == "auto" and prefers_loop(steps):
        backend = "reference"
    backend = choose_gated(backend, q.device, dtype, n, act)
    sizes = None if batch_sizes is None else tuple(batch_sizes)
    return run(
        Recurrence(GATED, name, sizes, reverse, last_only, False, backend),
        q.dtype,
        x.to(dtype),
        torch.cat([q.to(dtype), w.to(dtype)]),
        h0.to(dtype),
        u.to(dtype),
        torch.cat([bias.to(dtype), (bias.new_zeros(n) if outer is None else outer).to(dtype)]),
        None if inner is None else inner.to(dtype),
    )
