"""`scan` and `goru_scan`: checks, what all backends share, and the choice among them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_exported, is_in_forward_mode, is_jit_traced
from stiefelkit.errors import DtypeError, OptionError, ShapeError, UnknownNameError, did_you_mean, shown
from stiefelkit.numbers import integer, optional
from stiefelkit.scan import checks
from stiefelkit.scan.activations import Activation, find_activation
from stiefelkit.scan.autograd import fused_scan
from stiefelkit.scan.checks import DTYPES, GATED, PLAIN, Recurrence
from stiefelkit.scan.engines.gated import supports as supports_gated
from stiefelkit.scan.engines.launch import supports
from stiefelkit.scan.onnx import exported_scan
from stiefelkit.scan.reference import reference_scan
from stiefelkit.scan.structures import STRUCTURES, Factored

BACKENDS = ("auto", "reference", "inplace", "triton", "cuda_graphs")
"""Names that `scan` takes as `backend`."""
GORU_BACKENDS = ("auto", "reference", "inplace", "triton")
"""Names that `goru_scan` takes as `backend`."""
GRADIENTS = ("exact", "half")
FEW = 8
"""Steps below which a loop is faster."""


def scan(
    x: Tensor,
    w: Tensor | Factored,
    h0: Tensor,
    *,
    u: Tensor | None = None,
    bias: Tensor | None = None,
    activation_bias: Tensor | None = None,
    activation: str = "modrelu",
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
    backend: str = "auto",
    last_only: bool = False,
    gradient: str = "exact",
) -> tuple[Tensor | None, Tensor]:
    """Runs :math:`h_t = act(x_t U^T + b + h_{t-1} W^T)` over time.

    The fast backends keep the states and nothing else of the forward pass (abs, OPLU and the complex modReLU: at most
    half as much again), work out the derivative of the activation from them, and run in full float32 precision whatever
    TF32 and autocast are set to. With `last_only` they keep about :math:`√T` states and find the others again in the
    backward pass. 16-bit w are computed with in float32, and rounded at the end. Only the backend "reference" is
    differentiable twice and in forward mode; "auto" takes it under torch.func.jvp, and for fewer than eight steps.

    Args:
        x: inputs, time-major, shape (T, B, m), real or complex; :math:`m = n` without `u`. With `batch_sizes`, the
            packed rows (sum of sizes, m) of torch's PackedSequence.
        w: recurrent matrix, shape (n, n), or its factors. These are applied one after the other by "inplace", and W is
            formed for the other backends and for ONNX.
        h0: first state, shape (B, n).
        u: input matrix, shape (n, m).
        bias: added to the input projection, shape (n,).
        activation_bias: second argument of the activation, shape (n,): modReLU's real bias.
        activation: one of `stiefelkit.scan.activations.names()`, or "leaky_relu(0.2)" for a slope.
        batch_sizes: rows alive at each step, not increasing, for sequences of different lengths.
        reverse: run from the last step to the first; outputs stay at their own steps.
        backend: "auto", the fastest that can do it (`scan_backend`); "reference", a loop of autograd's; "inplace",
            chunk by chunk in torch operators, for any device; "triton", one kernel for all steps, CUDA; "cuda_graphs",
            "inplace" with captured chunks, CUDA.
        last_only: return None for the outputs.
        gradient: "exact", or "half": the part of :math:`∂L/∂W` that the code of Wisdom et al. 2016 takes, the sum over
            time of :math:`∂L/∂y_t Re(h_t)^T` instead of :math:`∂L/∂y_t h_t^H`, with :math:`y_t = W h_t`. Complex w
            only, and only once differentiable; :math:`∂L/∂h` is exact in both.

    Returns:
        Outputs of shape (T, B, n), packed rows with `batch_sizes`, and the last state of every sequence, (B, n).

    Raises:
        ShapeError: sizes do not fit together.
        UnknownNameError: there is no such activation or backend.
        OptionError: an argument is of another kind, or the backend cannot do this.
        DtypeError: half of the gradient of a real w, complex tensors with a real w, a complex bias of modReLU, w of
            integers, or what is no tensor.

    >>> w = torch.eye(2)
    >>> out, last = scan(torch.ones(3, 1, 2), w, torch.zeros(1, 2), activation="relu")
    >>> last
    tensor([[3., 3.]])
    """
    structure = ""
    if isinstance(w, Factored):
        structure, w = w.structure, w.factors
    needed = {"w": w, "x": x, "h0": h0}
    for name, tensor in checks.given_tensors("scan", needed, u=u, bias=bias, activation_bias=activation_bias).items():
        if tensor.is_complex() and not w.is_complex():
            raise DtypeError(f"scan needs a complex w for complex {name}, got {w.dtype}.")
    sizes, reverse, last_only = checks.plain_steps("scan", batch_sizes, reverse, last_only)
    given = w.new_empty(1, 1).expand(w.shape[-1], w.shape[-1]) if structure else w
    (batch, steps), n, m = checks.lengths("scan", x, sizes), checks.width_of("scan", "w", given), x.shape[-1]
    if u is None and m != n:
        raise ShapeError(f"scan without u needs x of width n = {n}, got {m}.")
    checks.check_shapes(
        "scan", u=(u, (n, m)), bias=(bias, (n,)), activation_bias=(activation_bias, (n,)), h0=(h0, (batch, n))
    )
    if gradient not in GRADIENTS:
        raise OptionError(f"scan has no gradient {shown(gradient)}{did_you_mean(gradient, GRADIENTS)}")
    if gradient == "half" and not w.is_complex():
        raise DtypeError(f'scan needs a complex w with gradient="half", got {w.dtype}.')
    act, name = find_activation(activation, w.is_complex()), activation
    chosen = _chosen(act, given, steps, backend)
    checks.require_pairs(act, n * (1 + w.is_complex()))
    if act.bias_inside:
        if activation_bias is None:
            name = "identity"
        elif activation_bias.is_complex():
            raise DtypeError(f"scan needs a real activation_bias with {activation}, got {activation_bias.dtype}.")
    elif activation_bias is not None:
        bias, activation_bias = activation_bias if bias is None else bias + activation_bias, None
    if structure and (chosen != "inplace" or gradient == "half" or is_exported() or is_jit_traced()):
        structure, w = "", STRUCTURES[structure].matrix(w)
    dtype, real = DTYPES[w.dtype]
    recurrence = Recurrence(PLAIN, name, sizes, reverse, last_only, gradient == "half", chosen, structure)
    return _run(
        recurrence,
        w.dtype,
        x.to(dtype if x.is_complex() or not dtype.is_complex else real),
        w.to(dtype),
        h0.to(dtype),
        None if u is None else u.to(dtype),
        None if bias is None else bias.to(dtype),
        None if activation_bias is None else activation_bias.to(real),
    )


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

    :math:`r_t = sigmoid(x_t U_r^T + h_{t-1} W_r^T + b_r)`, :math:`g_t = sigmoid(x_t U_g^T + h_{t-1} W_g^T + b_g)`,
    :math:`c_t = act(r_t ⊙ (h_{t-1} Q^T) + x_t U_c^T, b_c)`, :math:`h_t = g_t ⊙ h_{t-1} + (1 - g_t) ⊙ c_t`.

    The fast backend keeps the states and nothing else of the forward pass, takes one product a step forward and one
    back, and runs in full float32 precision whatever TF32 and autocast are set to; with `last_only` it keeps about
    :math:`√T` states. 16-bit weights are computed with in float32, and rounded at the end. Only "reference" is
    differentiable twice and in forward mode; "auto" takes it under torch.func.jvp.

    Args:
        x: inputs, time-major, shape (T, B, m), or packed rows.
        h0: first state, shape (B, n).
        q: orthogonal matrix, shape (n, n).
        w: matrices of the gates, :math:`[W_r; W_g]`, shape (2n, n).
        u: input matrices, :math:`[U_r; U_g; U_c]`, shape (3n, m).
        bias: of the gates, :math:`[b_r; b_g]`, shape (2n,).
        activation_bias: :math:`b_c`, second argument of the activation, shape (n,).
        activation: one of `stiefelkit.scan.activations.names()`; without a bias modReLU is the identity.
        batch_sizes: as in `scan`.
        reverse: as in `scan`.
        last_only: as in `scan`.
        backend: "auto", the last of these that can do it; "reference", a loop of autograd's; "inplace", chunk by chunk
            in torch operators, for any device; "triton", one kernel for all steps, CUDA, up to 128 units.

    Returns:
        Outputs of shape (T, B, n), packed rows with `batch_sizes`, and the last state of every sequence, (B, n).

    Raises:
        ShapeError, UnknownNameError, OptionError: as `scan`.
        DtypeError: something is complex or no tensor, or q is not floating.

    References:
        Jing, Gulcehre, Peurifoy, Shen, Tegmark, Soljacic, Bengio, Gated orthogonal recurrent units: on learning to
        forget, 2017.

    >>> n = 3
    >>> q, w, u = torch.eye(n), torch.zeros(2 * n, n), torch.zeros(3 * n, 1)
    >>> x, h_0, bias = torch.ones(2, 1, 1), torch.ones(1, n), torch.zeros(2 * n)
    >>> out, h_n = goru_scan(x, h_0, q, w, u=u, bias=bias)
    >>> h_n
    tensor([[0.5625, 0.5625, 0.5625]])
    """
    if backend not in GORU_BACKENDS:
        raise UnknownNameError(f"goru_scan has no backend {shown(backend)}{did_you_mean(backend, GORU_BACKENDS)}")
    act, name = find_activation(activation, False), activation
    needed = {"x": x, "h0": h0, "q": q, "w": w, "u": u, "bias": bias}
    tensors = checks.given_tensors("goru_scan", needed, activation_bias=activation_bias)
    for key, tensor in tensors.items():
        if tensor.is_complex():
            raise DtypeError(f"goru_scan needs a real {key}, since its gates are, got {tensor.dtype}.")
    if q.dtype not in DTYPES:
        raise DtypeError(f"goru_scan needs q of a floating dtype, got {q.dtype}.")
    sizes, reverse, last_only = checks.plain_steps("goru_scan", batch_sizes, reverse, last_only)
    (batch, steps), n, m = checks.lengths("goru_scan", x, sizes), checks.width_of("goru_scan", "q", q), x.shape[-1]
    shapes = {"h0": (batch, n), "w": (2 * n, n), "u": (3 * n, m), "bias": (2 * n,), "activation_bias": (n,)}
    checks.check_shapes("goru_scan", **{key: (tensors.get(key), shape) for key, shape in shapes.items()})
    checks.require_pairs(act, n)
    dtype = DTYPES[q.dtype][0]
    inner, outer = (activation_bias, None) if act.bias_inside else (None, activation_bias)
    if act.bias_inside and inner is None:
        name = "identity"
    if backend == "auto" and prefers_loop(steps):
        backend = "reference"
    backend = _able("goru_scan", backend, q.device, functools.partial(supports_gated, q.device, dtype, n, act))
    return _run(
        Recurrence(GATED, name, sizes, reverse, last_only, False, backend),
        q.dtype,
        x.to(dtype),
        torch.cat([q.to(dtype), w.to(dtype)]),
        h0.to(dtype),
        u.to(dtype),
        torch.cat([bias.to(dtype), (bias.new_zeros(n) if outer is None else outer).to(dtype)]),
        None if inner is None else inner.to(dtype),
    )


def _run(recurrence: Recurrence, dtype: torch.dtype, *tensors: Any) -> tuple[Tensor | None, Tensor]:
    """Runs a recurrence on checked tensors of the dtypes that are computed with; returns outputs of another dtype."""
    runner = reference_scan if recurrence.backend == "reference" else fused_scan
    out, last = (exported_scan if is_exported() else runner)(recurrence, *tensors)
    return None if out is None else out.to(dtype), last.to(dtype)


def scan_backend(w: Tensor, steps: int | None = None, *, activation: str = "modrelu", backend: str = "auto") -> str:
    """Returns the name of the backend that `scan` takes.

    Args:
        w: the recurrent matrix, shape (n, n): its device, dtype and size decide.
        steps: T; fewer than eight, such as those of a cell, are left to "reference" outside of compiled code, since a
            fast backend takes longer to start. None for many.
        activation: as in `scan`.
        backend: as in `scan`; one that is named is returned, if it can do it.

    Raises:
        UnknownNameError: there is no such activation or backend.
        OptionError: the one that is named cannot do it.
        DtypeError: the activation is not defined for complex states, or w is of integers, or no tensor.
        ShapeError: w is not square.

    >>> scan_backend(torch.eye(4))
    'inplace'
    """
    checks.width_of("scan_backend", "w", checks.given_tensors("scan_backend", {"w": w})["w"])
    steps = optional(integer(1)).require("scan_backend", "steps", steps)
    return _chosen(find_activation(activation, w.is_complex()), w, steps, backend)


def _chosen(activation: Activation, w: Tensor, steps: int | None, backend: str) -> str:
    if w.dtype not in DTYPES:
        raise DtypeError(f"scan needs w of a floating or complex dtype, got {w.dtype}.")
    if backend == "auto" and prefers_loop(steps):
        return "reference"
    if backend not in BACKENDS:
        raise UnknownNameError(f"scan has no backend {shown(backend)}{did_you_mean(backend, BACKENDS)}")
    width = w.shape[-1] * (1 + w.is_complex())
    against = functools.partial(supports, w.device, DTYPES[w.dtype][0], width, activation)
    return _able("The scan", backend, w.device, against, "cuda_graphs")


def _able(
    who: str, backend: str, device: torch.device, against_triton: Callable[[], str | None], without: str = "inplace"
) -> str:
    """Returns the backend asked for, if it can run a scan; for "auto" the fastest that can (`without` triton's)."""
    if backend == "auto":
        return "inplace" if device.type != "cuda" else without if against_triton() else "triton"
    reason = against_triton() if backend == "triton" else None
    if backend == "cuda_graphs" and device.type != "cuda":
        reason = f"a GPU, got {device.type}"
    if reason:
        raise OptionError(f"{who}'s backend {backend!r} needs {reason}.")
    return backend


def prefers_loop(steps: int | None) -> bool:
    """Returns whether "auto" takes the loop, besides what a backend can do: for few steps, and in forward mode."""
    if torch.compiler.is_compiling():
        return False
    return (steps is not None and steps < FEW) or is_in_forward_mode()
