"""Maps whose rows or columns programs take one by one: what fills their arguments and launches them."""

from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._arithmetic.product import opaque
from stiefelkit.functional._kernels.launch import PACKAGE, _parts, is_at_hand, start

LONGEST = 1024  # entries of a row that a program turns and transforms, eight times as many that it only transforms
TALLEST = 512  # rows of real columns, twice those of complex ones, that a program holds
_OF_MESHES = (4, 256)  # columns of a program, numbers of a warp: each entry needs its partner beside it
SHARES = 1024  # programs that share the rows of all matrices, each with a sum of its own for the gradient of the angles


def takes_rows(t: Tensor, n: int, largest: int = LONGEST) -> bool:
    """Returns whether programs multiply rows of n entries by a Hadamard matrix where a tensor is."""
    return 1 < n <= largest and n & (n - 1) == 0 and is_at_hand(t)


def transform_rows(x: Tensor) -> Tensor:
    """Returns x H / sqrt(n) for rows of n entries, worked out in float64 and rounded once."""
    y, rows = torch.empty_like(x, memory_format=torch.contiguous_format), x.numel() // x.shape[-1]
    fixed = _settings(x.shape[-1], rows, 1, 1 + x.is_complex())
    start(PACKAGE, "rows_transform", fixed["COUNT"], x, _parts(x), _parts(y), rows, **fixed)
    return y


def _like_rows(turn: Tensor, signs: Tensor | None, x: Tensor | None, n: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    y = turn.new_empty((*turn.shape[:-2], n if x is None else x.shape[-2], n), dtype=dtype)
    return y, *(torch.empty_like(turn, dtype=torch.float64, memory_format=torch.contiguous_format) for _ in range(2))


@opaque(_like_rows, dims=(2,))
def hadamard_rows(
    turn: Tensor, signs: Tensor | None, x: Tensor | None, n: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows x W^T, those of W^T if None, in a dtype, and cosines and sines of the angles in float64.

    W is D2 H D1 with phases `turn` of shape (*, 2, n), or S2 R2 H R1 S1 with angles (*, 2, n / 2) and signs (*, 2, n);
    the rows have the shape (*, m, n).
    """
    wide = turn.contiguous().double()
    c, s = wide.cos(), wide.sin()
    y = _like_rows(turn, signs, x, n, dtype)[0]
    shape, rows = turn.shape[:-2], y.shape[-2]
    batch = shape.numel()
    fixed = _settings(n, rows, batch, 1 + dtype.is_complex)
    given = [None if x is None else _parts(x), c, s, _signs(signs, c, n), _parts(y)]
    start(PACKAGE, "rows_forward", batch * fixed["COUNT"], turn, *given, rows, **fixed)
    return y, c, s


@opaque(lambda c, s, signs, x, g: (torch.empty_like(c), g.new_empty((0,) if x is None else x.shape)), dims=(2, 2))
def hadamard_rows_gradient(
    c: Tensor, s: Tensor, signs: Tensor | None, x: Tensor | None, g: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of angles, in float64, and rows, by that of the result of `hadamard_rows`."""
    (*shape, rows, n), parts = g.shape, 1 + g.is_complex()
    batch = torch.Size(shape).numel()
    fixed = _settings(n, rows, batch, parts)
    gx = g.new_empty((0,) if x is None else x.shape)
    turns = c.new_empty(batch, fixed["COUNT"], 2, 2 // parts, parts * n // 2)
    g = g.resolve_conj().reshape(batch, rows, n)
    g = torch.view_as_real(g) if parts == 2 else g
    given = [None if x is None else _parts(x), c, s, _signs(signs, c, n), g, _parts(gx), turns]
    start(PACKAGE, "rows_backward", batch * fixed["COUNT"], g, *given, rows, *g.stride()[:3], **fixed)
    return turns.sum((1, 3)).reshape(c.shape), gx


def takes_columns(v: Tensor, n: int, p: int, dtype: torch.dtype) -> bool:
    """Returns whether programs map n x p frames of a dtype, from float32 coordinates."""
    is_single = v.dtype == torch.float32 and dtype in (torch.float32, torch.complex64)
    return is_single and p > 0 and n * (1 + dtype.is_complex) <= TALLEST and is_at_hand(v)


@opaque(lambda v, d, n, k, dtype: v.new_empty(*v.shape[:-1], n, d.shape[-1], dtype=dtype), dims=(1, 1))
def reflected_columns(v: Tensor, d: Tensor, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Returns H_1 ... H_k [D; 0] from packed reflectors and float64 or complex128 entries of D, (*, p), in a dtype."""
    shape, p = v.shape[:-1], d.shape[-1]
    w, d = v.new_empty(*shape, n, p, dtype=dtype), d.expand(*shape, p)
    fixed = _tile(n, p, shape.numel(), 1 + dtype.is_complex)
    given = [v.contiguous(), _parts(d), _parts(w), n, k, p]
    start(PACKAGE, "reflectors_forward", shape.numel() * fixed["COUNT"], v, *given, **fixed)
    return w


@opaque(lambda v, w, g, k: torch.empty_like(v), dims=(1, 2, 2))
def reflected_columns_gradient(v: Tensor, w: Tensor, g: Tensor, k: int) -> Tensor:
    """Returns dL/dv from W = reflected_columns(v, ...) and dL/dW."""
    (*shape, n, p), v = w.shape, v.expand(*w.shape[:-2], -1).contiguous()
    batch = torch.Size(shape).numel()
    fixed = _tile(n, p, batch, 1 + w.is_complex())
    gv = v.new_zeros(batch, fixed["COUNT"], v.shape[-1])
    start(PACKAGE, "reflectors_backward", batch * fixed["COUNT"], v, v, _parts(w), _parts(g), gv, n, k, p, **fixed)
    return gv.sum(1).reshape(v.shape)


def takes_mesh(angle: Tensor, n: int, p: int, dtype: torch.dtype) -> bool:
    """Returns whether programs rotate n x p matrices of a dtype by float32 angles."""
    is_taken = angle.dtype == torch.float32 and dtype in (torch.float32, torch.complex64, torch.complex128)
    return is_taken and p > 0 and n * (1 + dtype.is_complex) <= TALLEST and is_at_hand(angle)


def rotated_columns(x: Tensor, angle: Tensor, phase: Tensor | None, layers: int) -> Tensor:
    """Returns F_L ... F_1 X as `stiefelkit.functional.brickwall` has it, worked out in float64."""
    (n, p), batch, y = x.shape[-2:], x.shape[:-2].numel(), torch.empty_like(x, memory_format=torch.contiguous_format)
    fixed = _tile(n, p, batch, 1 + x.is_complex(), *_OF_MESHES)
    turns, scratch = _turns(angle, phase, batch), _scratch(x, batch, 2, fixed)
    given = [_parts(x), turns, _parts(y), scratch, n, p, layers, turns.shape[-1]]
    start(PACKAGE, "mesh_forward", len(scratch), x, *given, **fixed)
    return y


def rotated_columns_gradient(
    g: Tensor, y: Tensor, angle: Tensor, phase: Tensor | None, layers: int, with_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of X (empty unless `with_x`), angles and phases by Y = `rotated_columns` and dL/dY."""
    (n, p), batch, parts = y.shape[-2:], y.shape[:-2].numel(), 1 + y.is_complex()
    gx = torch.empty_like(y, memory_format=torch.contiguous_format) if with_x else y.new_empty((*y.shape[:-2], 0, 0))
    fixed = _tile(n, p, batch, parts, *_OF_MESHES)
    turns, scratch = _turns(angle, phase, batch), _scratch(y, batch, 4, fixed)
    slopes = angle.new_empty(batch, fixed["COUNT"], parts, turns.shape[-1])
    given = [_parts(y), _parts(g), turns, _parts(gx) if with_x else None, slopes, scratch]
    start(PACKAGE, "mesh_backward", len(scratch), y, *given, n, p, layers, turns.shape[-1], **fixed)
    sums = slopes.sum(1)
    g_phase = sums[:, 1].reshape(angle.shape) if parts == 2 else angle.new_empty((*angle.shape[:-1], 0))
    return gx, sums[:, 0].reshape(angle.shape), g_phase


def _turns(angle: Tensor, phase: Tensor | None, batch: int) -> Tensor:
    """Returns cosines and sines of angles, and of phases if any, in float64: (batch, 2 or 4, d)."""
    angle, parts, block = angle.contiguous(), 1 if phase is None else 2, 256
    out, count = angle.new_empty(batch, 2 * parts, angle.shape[-1], dtype=torch.float64), angle.numel()
    given = [angle, angle if phase is None else phase.contiguous(), out, angle.shape[-1], count]
    start(PACKAGE, "mesh_turns", -(-count // block), angle, *given, PARTS=parts, SIZE=block)
    return out


def _scratch(like: Tensor, batch: int, matrices: int, fixed: dict[str, Any]) -> Tensor:
    sizes = (batch * fixed["COUNT"], matrices, fixed["PARTS"], fixed["C"], fixed["N"])
    return torch.empty(sizes, dtype=torch.float64, device=like.device)


def _tile(n: int, p: int, batch: int, parts: int, columns: int = 8, numbers: int = 512) -> dict[str, Any]:
    """Returns constants and options of programs that hold columns of n entries, a warp so many numbers.

    COUNT of them share those of a matrix: few, since each adds up a gradient of its own.
    """
    rows = max(16, 1 << (n - 1).bit_length())
    count = max(1, min(-(-p // columns), 128 // max(batch, 1)))
    options = {"num_warps": max(1, columns * rows * parts // numbers), "num_stages": 1, "maxnreg": 255}
    return {"COUNT": count, "PARTS": parts, "C": columns, "N": rows, **options}


def _signs(signs: Tensor | None, like: Tensor, n: int) -> Tensor:
    return like if signs is None else signs.expand(*like.shape[:-1], n).contiguous()


def _settings(n: int, rows: int, batch: int, parts: int) -> dict[str, Any]:
    """Returns constants and options of programs for rows of n entries; COUNT of them share those of a matrix."""
    at_a_time = max(1, 128 // n)
    fixed = {"PARTS": parts, "R": at_a_time, "N": n, "LOG": n.bit_length() - 1}
    count = max(1, min(-(-rows // at_a_time), SHARES // max(batch, 1)))
    return {"COUNT": count, **fixed, "num_warps": max(1, min(16, n // 128)), "num_stages": 1}
