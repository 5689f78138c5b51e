"""The gated orthogonal recurrence over a whole sequence, as an autograd loop."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from stiefelkit.errors import DtypeError, OptionError, ShapeError, did_you_mean
from stiefelkit.functional._activations import find_activation

__all__ = ["goru_scan"]

BACKENDS = ("auto", "reference")


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

    Args:
        x: inputs, time-major, shape (T, B, m). With `batch_sizes`, the packed rows (sum of sizes, m) of torch's
            PackedSequence.
        h0: first state, shape (B, n).
        q: orthogonal matrix, shape (n, n).
        w: matrices of the gates, [w_r; w_g], shape (2n, n).
        u: input matrices, [u_r; u_g; u_c], shape (3n, m).
        bias: of the gates, [b_r; b_g], shape (2n,).
        activation_bias: b_c, second argument of the activation, shape (n,).
        activation: a name in `stiefelkit.functional.ACTIVATIONS`.
        batch_sizes: rows alive at each step, not increasing, for sequences of different lengths.
        reverse: run from the last step to the first; outputs stay at their own steps.
        last_only: return None for the outputs.
        backend: "auto" or "reference", the loop.

    Returns:
        Outputs of shape (T, B, n), packed rows with `batch_sizes`, and the last state of every sequence, (B, n).

    Raises:
        ShapeError: sizes do not fit together.
        OptionError: there is no such backend.
        DtypeError: q is complex.

    References:
        Jing, Gulcehre, Peurifoy, Shen, Tegmark, Soljacic, Bengio, Gated orthogonal recurrent units: on learning to
        forget, 2017.

    >>> n = 3
    >>> q, w, u = torch.eye(n), torch.zeros(2 * n, n), torch.zeros(3 * n, 1)
    >>> out, h_n = goru_scan(torch.ones(2, 1, 1), torch.ones(1, n), q, w, u=u, bias=torch.zeros(2 * n))
    >>> h_n
    tensor([[0.5625, 0.5625, 0.5625]])
    """
    if backend not in BACKENDS:
        raise OptionError(f"goru_scan knows no backend {backend!r}{did_you_mean(backend, BACKENDS)}")
    if q.is_complex():
        raise DtypeError(f"goru_scan needs a real q, since its gates are, got {q.dtype}.")
    _check_shapes(x, h0, q, w, u, bias, batch_sizes)
    act, n = find_activation(activation, False), q.shape[0]
    matrices = torch.cat([w, q]).mT.contiguous()
    rows = torch.addmm(torch.cat([bias, bias.new_zeros(n)]), x.to(q.dtype).reshape(-1, x.shape[-1]), u.mT)
    packed = batch_sizes is not None
    steps = rows.split(list(batch_sizes) if batch_sizes is not None else [x.shape[1]] * x.shape[0])
    h, outputs, ended = (h0[: steps[-1 if reverse else 0].shape[0]] if packed else h0), [], []
    for row in reversed(steps) if reverse else steps:
        if packed and (alive := row.shape[0]) != h.shape[0]:
            ended.append(h[alive:])
            h = torch.cat([h[:alive], h0[h.shape[0] : alive]])
        moved = h @ matrices
        r, g = torch.sigmoid(row[:, : 2 * n] + moved[:, : 2 * n]).chunk(2, dim=-1)
        c = act(torch.addcmul(row[:, 2 * n :], r, moved[:, 2 * n :]), activation_bias)
        h = c + g * (h - c)
        outputs.append(h)
    last = torch.cat([h, *reversed(ended)]) if ended else h
    if last_only:
        return None, last
    ordered = outputs[::-1] if reverse else outputs
    return (torch.cat(ordered) if packed else torch.stack(ordered)), last


def _check_shapes(
    x: Tensor, h0: Tensor, q: Tensor, w: Tensor, u: Tensor, bias: Tensor, batch_sizes: Sequence[int] | None
) -> None:
    n = q.shape[-1]
    if q.dim() != 2 or q.shape[0] != n:
        raise ShapeError(f"goru_scan needs a square q, got shape {tuple(q.shape)}.")
    if x.dim() != (3 if batch_sizes is None else 2) or x.shape[0] == 0:
        wanted = "(T, B, m) with T >= 1" if batch_sizes is None else "(rows, m) with batch_sizes"
        raise ShapeError(f"goru_scan needs x of shape {wanted}, got {tuple(x.shape)}.")
    batch = x.shape[1] if batch_sizes is None else batch_sizes[0]
    given = {"h0": (h0, (batch, n)), "w": (w, (2 * n, n)), "u": (u, (3 * n, x.shape[-1])), "bias": (bias, (2 * n,))}
    for name, (tensor, shape) in given.items():
        if tensor.shape != shape:
            raise ShapeError(f"goru_scan needs {name} of shape {shape}, got {tuple(tensor.shape)}.")
    if batch_sizes is not None and any(b > a or b < 1 for a, b in itertools.pairwise(batch_sizes)):
        raise ShapeError(f"goru_scan needs batch_sizes that do not increase, got {list(batch_sizes)}.")
