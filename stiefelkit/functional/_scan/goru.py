"""`goru_scan`: the gated orthogonal recurrence over a whole sequence."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_exported
from stiefelkit.errors import DtypeError, ShapeError, UnknownNameError, did_you_mean
from stiefelkit.functional._activations import find_activation, split_activation
from stiefelkit.functional._product import FullPrecision
from stiefelkit.functional._scan.backends import GATED
from stiefelkit.functional._scan.dispatch import DTYPES, prefers_loop
from stiefelkit.functional._scan.fused import fused_scan
from stiefelkit.functional._scan.onnx import exported_goru
from stiefelkit.functional._scan.reference import multiplication

__all__ = ["GORU_BACKENDS", "goru_scan"]

GORU_BACKENDS = ("auto", "reference", "inplace")
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
        activation: a name in `stiefelkit.functional.ACTIVATIONS`; without a bias modReLU is the identity.
        batch_sizes: rows alive at each step, not increasing, for sequences of different lengths.
        reverse: run from the last step to the first; outputs stay at their own steps.
        last_only: return None for the outputs.
        backend: "auto"; "reference", a loop of autograd's; "inplace", chunk by chunk in torch operators, for any
            device, which "auto" takes.

    Returns:
        Outputs of shape (T, B, n), packed rows with `batch_sizes`, and the last state of every sequence, (B, n).

    Raises:
        ShapeError: sizes do not fit together.
        UnknownNameError: there is no such activation or backend.
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
        raise UnknownNameError(f"goru_scan has no backend {backend!r}{did_you_mean(backend, GORU_BACKENDS)}")
    find_activation(activation, False)
    kind, _ = split_activation(activation)
    _check_dtypes(x=x, h0=h0, q=q, w=w, u=u, bias=bias, activation_bias=activation_bias)
    _check_shapes(x, h0, q, w, u, bias, activation_bias, batch_sizes)
    if kind == "oplu" and q.shape[0] % 2:
        raise ShapeError(f"OPLU needs an even number of units, got {q.shape[0]}.")
    dtype, inner = DTYPES[q.dtype][0], None
    last_bias = bias.new_zeros(q.shape[0])
    if kind == "modrelu":
        activation, inner = (
            (activation, activation_bias.to(dtype)) if activation_bias is not None else ("identity", None)
        )
    elif activation_bias is not None:
        last_bias = activation_bias
    tensors = (
        x.to(dtype),
        torch.cat([q.to(dtype), w.to(dtype)]),
        h0.to(dtype),
        u.to(dtype),
        torch.cat([bias.to(dtype), last_bias.to(dtype)]),
        inner,
    )
    settings: dict[str, Any] = {
        "activation": activation,
        "sizes": None if batch_sizes is None else tuple(batch_sizes),
        "reverse": reverse,
        "last_only": last_only,
    }
    steps = x.shape[0] if batch_sizes is None else len(batch_sizes)
    if is_exported():
        out, last = exported_goru(*tensors, **settings)
    elif backend == "reference" or (backend == "auto" and prefers_loop(steps)):
        with FullPrecision(x.device):
            out, last = _loop(*tensors, **settings)
    else:
        out, last = fused_scan(*tensors, backend=GATED, half=False, **settings)
    return None if out is None else out.to(q.dtype), last.to(q.dtype)


def _loop(
    x: Tensor,
    w: Tensor,
    h0: Tensor,
    u: Tensor,
    bias: Tensor,
    activation_bias: Tensor | None,
    activation: str,
    sizes: Sequence[int] | None,
    reverse: bool,
    last_only: bool,
) -> tuple[Tensor | None, Tensor]:
    """Runs the recurrence step by step, from w = [q; w_r; w_g], and from u and bias for [r; g; c]."""
    act, n, wt = find_activation(activation, False), h0.shape[-1], w.mT.contiguous()
    times = multiplication(x.device)
    rows = times(x.flatten(0, -2), u.mT) + bias
    steps = rows.split(list(sizes) if sizes is not None else [x.shape[1]] * x.shape[0])
    h, outputs, ended = (h0 if sizes is None else h0[: steps[-1 if reverse else 0].shape[0]]), [], []
    for row in reversed(steps) if reverse else steps:
        if sizes is not None and (alive := row.shape[0]) != h.shape[0]:
            ended.append(h[alive:])
            h = torch.cat([h[:alive], h0[h.shape[0] : alive]])
        moved = times(h, wt)
        r, g = torch.sigmoid(row[:, : 2 * n] + moved[:, n:]).chunk(2, dim=-1)
        c = act(torch.addcmul(row[:, 2 * n :], r, moved[:, :n]), activation_bias)
        h = torch.lerp(c, h, g)
        outputs.append(h)
    last = torch.cat([h, *reversed(ended)]) if ended else h
    if last_only:
        return None, last
    ordered = outputs[::-1] if reverse else outputs
    return (torch.stack(ordered) if sizes is None else torch.cat(ordered)), last


def _check_dtypes(**given: Tensor | None) -> None:
    for name, tensor in given.items():
        if tensor is not None and tensor.is_complex():
            raise DtypeError(f"goru_scan needs a real {name}, since its gates are, got {tensor.dtype}.")
    q = given["q"]
    if q is not None and q.dtype not in DTYPES:
        raise DtypeError(f"goru_scan needs q of a floating dtype, got {q.dtype}.")


def _check_shapes(
    x: Tensor,
    h0: Tensor,
    q: Tensor,
    w: Tensor,
    u: Tensor,
    bias: Tensor,
    activation_bias: Tensor | None,
    batch_sizes: Sequence[int] | None,
) -> None:
    if q.dim() != 2 or q.shape[0] != q.shape[1]:
        raise ShapeError(f"goru_scan needs a square q, got shape {tuple(q.shape)}.")
    n = q.shape[-1]
    if x.dim() != (3 if batch_sizes is None else 2) or x.shape[0] == 0:
        wanted = "(T, B, m) with T >= 1" if batch_sizes is None else "(rows, m) with batch_sizes"
        raise ShapeError(f"goru_scan needs x of shape {wanted}, got {tuple(x.shape)}.")
    batch = x.shape[1] if batch_sizes is None else next(iter(batch_sizes), 0)
    given = {"h0": (h0, (batch, n)), "w": (w, (2 * n, n)), "u": (u, (3 * n, x.shape[-1])), "bias": (bias, (2 * n,))}
    if activation_bias is not None:
        given["activation_bias"] = activation_bias, (n,)
    for name, (tensor, shape) in given.items():
        if tensor.shape != shape:
            raise ShapeError(f"goru_scan needs {name} of shape {shape}, got {tuple(tensor.shape)}.")
    if batch_sizes is None:
        return
    if any(b > a or b < 1 for a, b in itertools.pairwise(batch_sizes)):
        raise ShapeError(f"goru_scan needs batch_sizes that do not increase, got {list(batch_sizes)}.")
    if sum(batch_sizes) != x.shape[0]:
        raise ShapeError(
            f"goru_scan needs batch_sizes that add up to the rows of x, {x.shape[0]}, got {sum(batch_sizes)}."
        )
