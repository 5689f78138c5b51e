"""`rotation_scan`: linear recurrences whose transition rotates planes, parallel over time."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_exported, is_traced
from stiefelkit.errors import DtypeError, OptionError, ShapeError, UnknownNameError, did_you_mean, shown
from stiefelkit.functional._arithmetic.function import Context, Function
from stiefelkit.functional._arithmetic.product import opaque
from stiefelkit.scan.checks import DTYPES, check_shapes, lengths, row_counts
from stiefelkit.scan.dispatch import scan
from stiefelkit.scan.engines import planes
from stiefelkit.scan.engines.triton import unsupported_device

ROTATION_BACKENDS = ("auto", "reference", "chunks", "triton")
"""Names that `rotation_scan` takes as `backend`."""
CACHED = 1 << 15  # complex numbers that are multiplied and summed up at a time on a CPU


def rotation_scan(
    x: Tensor,
    angle: Tensor,
    decay: Tensor | float = 1.0,
    h0: Tensor | None = None,
    *,
    batch_sizes: Sequence[int] | None = None,
    reverse: bool = False,
    last_only: bool = False,
    backend: str = "auto",
) -> tuple[Tensor | None, Tensor]:
    r"""Runs :math:`z_t = decay e^{i angle} z_{t-1} + x_t` for m planes, in parallel over time, planes and batch.

    Real inputs of width 2m are planes side by side, :math:`(x_0, x_1), (x_2, x_3), ...`, each rotated by
    :math:`[[cos, -sin], [sin, cos]]`. Powers of a factor are worked out in float64, and the ends of chunks of steps are
    scanned in float64, so that no error grows with the number of steps. The backward pass is a scan backwards in time
    and one product over time. Derivatives of any order and forward mode work with every backend. 16-bit tensors are
    computed with in float32, whatever autocast is set to.

    Args:
        x: inputs, time-major, of shape (T, B, m) if they are complex and (T, B, 2m) if they are real, or packed rows.
        angle: real angles in radians, shape (m,); or one for each step, (T, B, m) or packed rows.
        decay: real factors of moduli: a number, or of the shapes of `angle`.
        h0: first state, shape (B, .), real or complex as x is; zero if left out.
        batch_sizes: as in `stiefelkit.scan.scan`.
        reverse: as in `stiefelkit.scan.scan`.
        last_only: return None for the outputs; x is kept for the backward pass, which computes the states again.
        backend: "auto", the last of these that can do it; "reference", a loop in float64, rounded once; "chunks", torch
            operators on any device; "triton", one or two kernels for all steps, CUDA.

    Returns:
        Outputs of the shape of x, and the last state of every sequence, (B, .), in the widest of the dtypes given.

    References:
        Biegun, Dolga, Cunningham, Barber, RotRNN: modelling long sequences with rotations, 2024.
        Orvieto, Smith, Gu, Fernando, Gulcehre, Pascanu, De, Resurrecting recurrent neural networks for long sequences,
        ICML 2023.

    >>> out, last = rotation_scan(torch.ones(3, 1, 2), torch.tensor([torch.pi / 2]))
    >>> last.round()
    tensor([[-1.,  1.]])
    """
    if backend not in ROTATION_BACKENDS:
        near = did_you_mean(backend, ROTATION_BACKENDS)
        raise UnknownNameError(f"rotation_scan has no backend {shown(backend)}{near}")
    g = decay
    if not isinstance(g, Tensor):
        g = torch.full((), g, dtype=torch.float64, device=angle.device)
    given = {"x": x, "angle": angle, "decay": g} | ({} if h0 is None else {"h0": h0})
    for name, tensor in given.items():
        kind = "floating or complex" if name == "x" or (name == "h0" and x.is_complex()) else "real floating"
        if tensor.dtype not in DTYPES or (tensor.is_complex() and kind == "real floating"):
            raise DtypeError(f"rotation_scan needs {name} of a {kind} dtype, got {tensor.dtype}.")
    sizes = row_counts("rotation_scan", batch_sizes)
    batch, _ = lengths("rotation_scan", x, sizes, ".")
    *rows, width = x.shape
    if width % 2 and not x.is_complex():
        raise ShapeError(f"rotation_scan needs a real x of even width, two numbers a plane, got {width}.")
    count = width if x.is_complex() else width // 2
    shapes = [(count,), (*rows, count)]
    for name, tensor, fitting in (("angle", angle, shapes), ("decay", g, [(), *shapes])):
        if tensor.shape not in fitting:
            wanted = f"{name} of shape {shapes[0]} or {shapes[1]}"
            raise ShapeError(f"rotation_scan needs {wanted}, got {tuple(tensor.shape)}.")
    check_shapes("rotation_scan", h0=(h0, (batch, width)))
    dtype = functools.reduce(torch.promote_types, (t.real.dtype for t in given.values() if t is not g or g is decay))
    steps: dict[str, Any] = {"batch_sizes": sizes, "reverse": reverse, "last_only": last_only}
    return scan_planes(x, angle, g, h0, dtype, **steps, backend=backend)


def scan_planes(
    x: Tensor,
    angle: Tensor,
    decay: Tensor,
    h0: Tensor | None,
    dtype: torch.dtype,
    *,
    batch_sizes: Sequence[int] | None,
    reverse: bool,
    last_only: bool,
    backend: str,
) -> tuple[Tensor | None, Tensor]:
    """Runs `rotation_scan` with results of a real dtype, whatever the dtypes of angles and decays, and no checks."""
    if is_exported():
        return _exported(x, angle, decay, h0, batch_sizes=batch_sizes, reverse=reverse, last_only=last_only)
    real, sizes, g = DTYPES[dtype][1], batch_sizes, decay
    z, h = _complex(x, real), None if h0 is None else _complex(h0, real)
    shape = torch.broadcast_shapes(angle.shape, g.shape)
    shape = (z.shape[-1],) if len(shape) < 2 else shape
    angle, g = (torch.broadcast_to(t.to(torch.promote_types(t.dtype, real)), shape) for t in (angle, g))
    mask = ends = first = None
    if sizes is not None:
        mask = torch.arange(sizes[0], device=x.device) < torch.tensor(sizes, device=x.device)[:, None]
        ends = mask.sum(0) - 1, torch.arange(sizes[0], device=x.device)
        z, angle, g = (
            t if t.dim() == 1 else t.new_zeros(*mask.shape, t.shape[-1]).index_put((mask,), t) for t in (z, angle, g)
        )
    if h is not None:
        # States of packed rows in reverse stay zero until a sequence begins at its own last step.
        factor, begins = _factor(g, angle), ends if reverse else None
        start = (-1 if reverse else 0) if begins is None else begins
        turned = (h * (factor if factor.dim() == 1 else factor[start])).to(z.dtype)
        z, first = (z, turned) if begins is None else (z.index_put(begins, turned, accumulate=True), None)
    name, is_last_only = find_rotation_backend(backend, z), last_only and (ends is None or reverse)
    if name == "reference":
        out, last = _loop(z, first, angle, g, reverse)
    else:
        out, last = _Scan.of(z, first, angle, g, reverse, is_last_only, name)
    if ends is not None and not reverse:
        last = out[ends]
    last = _like(last, x, dtype)
    return None if last_only else _like(out if mask is None else out[mask], x, dtype), last


def driven_last_state(x: Tensor, u: Tensor, angle: Tensor, decay: Tensor, h0: Tensor, reverse: bool) -> Tensor:
    """Returns the last state of `rotation_scan` over x U, (T, B, k) times (k, .), by one product over time.

    It is taken in float64: powers that are rounded add up an error that grows with the root of T.
    """
    step = _factor(decay.double(), angle.double())
    powers = torch.ones_like(step)[None]
    while len(powers) <= len(x):  # twice as many at a time
        powers, step = torch.cat([powers, powers[: len(x) + 1 - len(powers)] * step]), step * step
    weights = powers[:-1] if reverse else powers[:-1].flip(0)
    rows = weights if u.is_complex() else torch.view_as_real(weights).flatten(1)
    sums = _complex(x.flatten(1).mT.to(rows.dtype) @ rows, torch.float64).unflatten(0, x.shape[1:])
    last = (sums * _complex(u, torch.float64)).sum(1) + _complex(h0, torch.float64) * powers[-1]
    return _like(last, u, u.real.dtype)


def find_rotation_backend(backend: str, z: Tensor) -> str:
    """Returns what runs a scan of inputs that was left to "auto", or the backend that is named, if it can."""
    if backend not in ("auto", "triton"):
        return backend
    flaw = unsupported_device(z.device)
    if backend == "triton" and flaw is not None:
        raise OptionError(f'rotation_scan with backend="triton" needs {flaw}.')
    return "triton" if flaw is None and (backend == "triton" or z.is_cuda) else "chunks"


def _exported(x: Tensor, angle: Tensor, decay: Tensor, h0: Tensor | None, **steps: Any) -> tuple[Tensor | None, Tensor]:
    """Runs a scan with the matrix of all rotations, which ONNX can express."""
    if x.is_complex() or angle.dim() > 1 or decay.dim() > 1:
        kind = "complex ones" if x.is_complex() else "factors of each step"
        raise OptionError(f"rotation_scan needs real planes and one angle and decay of each for ONNX, got {kind}.")
    cos, sin = ((decay.to(angle) * part).to(x.dtype) for part in (angle.cos(), angle.sin()))
    eye, quarter = x.new_ones(2).diag(), x.new_tensor([[0.0, -1.0], [1.0, 0.0]])
    w = torch.kron(torch.diag(cos), eye) + torch.kron(torch.diag(sin), quarter)
    first = x.new_zeros(*x.shape[1:]) if h0 is None else h0
    return scan(x, w, first, activation="identity", **steps)


def _complex(t: Tensor, real: torch.dtype) -> Tensor:
    """Returns planes as complex numbers, a view where the dtype is at hand."""
    return planes.planes_of(t.to(torch.promote_types(real, torch.complex32) if t.is_complex() else real))


def _like(z: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_complex():
        return z.to(torch.promote_types(dtype, torch.complex32))
    return torch.view_as_real(z).flatten(-2).to(dtype)


def _factor(decay: Tensor, angle: Tensor) -> Tensor:
    """Returns decay e^{i angle}; torch.polar has another gradient where a modulus is zero or negative."""
    return decay * torch.polar(torch.ones_like(angle), angle)


def _loop(z: Tensor, first: Tensor | None, angle: Tensor, decay: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    factors = _factor(decay.double(), angle.double()).expand(z.shape)
    states: list[Tensor] = []
    for t in range(len(z))[:: -1 if reverse else 1]:
        step = z[t].to(factors.dtype)
        if states:
            step = step + factors[t] * states[-1]
        elif first is not None:  # in which the first factor is already
            step = step + first
        states.append(step)
    out = torch.stack(states[::-1] if reverse else states)
    return out.to(z.dtype), states[-1].to(z.dtype)


class _Scan(Function):
    """States z_t = f_t z_{t-1} + x_t with z_1 = x_1 + first, f_t = decay e^{i angle}, and the last of them.

    The adjoint is the same function backwards with conjugate factors; it gives derivatives of any order.
    """

    generate_vmap_rule = False

    @staticmethod
    def forward(
        x: Tensor, first: Tensor | None, angle: Tensor, decay: Tensor, reverse: bool, last_only: bool, backend: str
    ) -> tuple[Tensor, Tensor]:
        return rotated_states(x, first, angle, decay, reverse, last_only, backend)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, first, angle, decay, ctx.reverse, ctx.last_only, ctx.backend = inputs
        out = output[0]
        # The backward pass needs the states, which x gives again.
        ctx.save_for_backward(x if ctx.last_only else None, None if ctx.last_only else out, first, angle, decay)
        ctx.save_for_forward(x, first, angle, decay)
        if ctx.last_only:
            ctx.mark_non_differentiable(out)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Context, g_out: Tensor | None, g_last: Tensor | None) -> tuple[Any, ...]:
        x, z, first, angle, decay = ctx.saved_tensors
        if g_last is None and (g_out is None or ctx.last_only):
            return (None,) * 7
        if z is None:
            z, _ = _Scan.of(x, first, angle, decay, ctx.reverse, False, ctx.backend)
        g = torch.zeros_like(z) if g_out is None or ctx.last_only else g_out
        back, b = angle, decay
        if angle.dim() > 1:  # a step takes the factor of the one after it
            back, b = (torch.roll(t, 1 if ctx.reverse else -1, 0) for t in (angle, decay))
        a, a_first = _Scan.of(g, g_last, -back, b, not ctx.reverse, False, ctx.backend)
        g_angle = g_decay = None
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            pull = _pull(a, z, ctx.reverse, angle.dim() == 1)
            unit = torch.polar(torch.ones_like(angle), -angle)
            turned = pull * unit
            g_angle, g_decay = (turned.imag * decay).to(angle.dtype), turned.real.to(decay.dtype)
        return a, None if first is None else a_first, g_angle, g_decay, None, None, None

    @staticmethod
    def tangent(ctx, dx, dfirst, dangle, ddecay, *_) -> tuple[Tensor | None, Tensor]:
        x, first, angle, decay = ctx.saved_tensors
        z, _ = _Scan.of(x, first, angle, decay, ctx.reverse, False, ctx.backend)
        zero = torch.zeros_like(angle)
        d = torch.complex(zero if ddecay is None else ddecay, decay * (zero if dangle is None else dangle))
        moved = (_before(z, ctx.reverse) * (d * torch.polar(torch.ones_like(angle), angle))).to(z.dtype)
        out, last = _Scan.of(moved if dx is None else dx + moved, dfirst, angle, decay, ctx.reverse, False, ctx.backend)
        return None if ctx.last_only else out, last

    @staticmethod
    def vmap(info, in_dims: tuple[int | None, ...], *args) -> tuple[tuple[Tensor, ...], tuple[int, int]]:
        """Puts the new dimension among the planes."""

        def folded(t: Tensor | None, dim: int | None) -> Tensor | None:
            if t is None:
                return None
            t = t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)
            return t.movedim(0, -2).flatten(-2)

        x, first, angle, decay, *settings = args
        if angle.dim() - (in_dims[2] is not None) != decay.dim() - (in_dims[3] is not None):
            raise ShapeError("rotation_scan needs angle and decay of one shape under vmap.")
        out, last = _Scan.of(*map(folded, (x, first, angle, decay), in_dims), *settings)
        return tuple(t.unflatten(-1, (info.batch_size, -1)).movedim(-2, 0) for t in (out, last)), (0, 0)


def _before(z: Tensor, reverse: bool) -> Tensor:
    """Returns the states before each step, zero for the first."""
    zero = torch.zeros_like(z[:1])
    return torch.cat([z[1:], zero] if reverse else [zero, z[:-1]])


def _pull(a: Tensor, z: Tensor, reverse: bool, is_fixed: bool) -> Tensor:
    """Returns the gradient by the factors: a_t conj(z_{t-1}), summed over time and batch if they are the same."""
    if not is_fixed:
        return a * _before(z, reverse).conj()
    a, z = (a[:-1], z[1:]) if reverse else (a[1:], z[:-1])
    if a.is_cuda or is_traced():
        return torch.linalg.vecdot(z.flatten(0, 1), a.flatten(0, 1), dim=0)
    # Some steps at a time, whose products stay in the cache.
    total, size = a.new_zeros(a.shape[2:]), max(1, CACHED // max(1, a.shape[1:].numel()))
    for start in range(0, len(a), size):
        steps = slice(start, start + size)
        total = total + (a[steps] * z[steps].conj()).sum((0, 1))
    return total


ARGUMENTS = "Tensor x, Tensor? first, Tensor angle, Tensor decay, bool reverse, bool last_only, str backend"


def _like_states(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty((0, *x.shape[1:]) if args[-2] else x.shape), x.new_empty(x.shape[1:])


@opaque(_like_states, dims=None, schema=f"({ARGUMENTS}) -> (Tensor, Tensor)")
def rotated_states(
    x: Tensor, first: Tensor | None, angle: Tensor, decay: Tensor, reverse: bool, last_only: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """Returns all states, none with `last_only`, and the last one; see `_Scan`."""
    factor = torch.polar(decay.double(), angle.double())
    if backend == "triton":
        return planes.on_gpu(x, first, factor, reverse, last_only)[:2]
    return planes.by_chunks(x.resolve_conj(), first, factor, reverse, last_only)
