"""The recurrence on a GPU: all steps in one launch, for widths up to 512, in exact float32.

Works on real rows, complex ones as [Re | Im], in place. triton is imported at the first call.
"""

import contextlib
import functools
import importlib.util
import os
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._product import FullPrecision
from stiefelkit.scan.activations import Activation

__all__ = ["WIDEST", "backward", "forward", "programs", "settings", "supports"]

WIDEST = 512
"""The widest row of real numbers. Every program reads the whole matrix at every step, from the GPU's cache."""
BATCH_BLOCK = 16
"""Sequences of a program; tensor products have no fewer rows."""
TILES = ((32, 128), (64, 64))
"""Rows and columns of a tile of the matrix; wider ones read fewer states, but may have more zeros at the edge."""


def supports(device: torch.device, dtype: torch.dtype, width: int, activation: Activation) -> str | None:
    """What the kernels need and do not find, as "... , got ...", or None if they can run.

    Args:
        device: a GPU; the CPU only in triton's interpreter, which is for tests (TRITON_INTERPRET=1).
        dtype: of the states, real or complex.
        width: real numbers in a row of states.
        activation: of the states.
    """
    if activation.kernel is None:
        return f"an activation that its programs know, got {activation.name!r}"
    if dtype.to_real() != torch.float32:
        return f"float32 or complex64, got {dtype}"
    if not 0 < width <= WIDEST:
        return f"rows of at most {WIDEST} real numbers, got {width}"
    if activation.is_paired and width % 2:
        return f"an even number of units for {type(activation).__name__}, got {width}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, got an environment without it"
    if device.type == "cpu":
        return None if _is_interpreted() else "a GPU, got cpu (TRITON_INTERPRET=1 runs it there, slowly, for tests)"
    if device.type != "cuda":
        return f"a GPU, got {device.type}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (8, 0) else f"a GPU of compute capability 8.0, got {capability[0]}.{capability[1]}"


def forward(
    z: Tensor,
    wt: Tensor,
    h0: Tensor,
    activation: Activation,
    bias: Tensor | None = None,
    sizes: Tensor | None = None,
    reverse: bool = False,
    keep: bool = True,
    *,
    units: int,
) -> tuple[Tensor, Tensor | None]:
    """Turns projected inputs into states h_t = act(z_t + h_{t-1} wt), in place.

    Args:
        z: projections of all steps, float32 and contiguous, shape (rows, N); the states afterwards.
        wt: recurrent matrix for rows, shape (N, N).
        h0: first states, shape (B, N).
        activation: one that the programs know.
        bias: of an activation that has it inside, shape (n,); the biases of others belong into z.
        sizes: rows alive at each step, int64 on the device, not increasing, shape (T,); None if all are, rows = T B.
        reverse: whether the last step comes first.
        keep: whether the derivative will be asked for.
        units: n; N is 2n for rows [Re | Im].

    Returns:
        The last state of each sequence (B, N), and what `backward` needs besides the states (`Activation.saved`), None
        if nothing.
    """
    width, dtype = activation.saved_like(units, z.dtype)
    saved = z.new_empty(len(z), width, dtype=dtype) if keep and width else None
    if not len(h0):
        return h0.clone(), saved
    fixed = settings(z.shape[1], activation)
    starts, steps = _steps(z, len(h0), sizes)
    _run(
        "run_forward",
        z,
        len(h0),
        z,
        _padded(wt, fixed),
        h0.contiguous(),
        z if bias is None else bias.contiguous(),
        z if saved is None else saved,
        starts,
        z if sizes is None else sizes,
        activation.slope,
        steps,
        len(h0),
        PACKED=sizes is not None,
        REVERSE=reverse,
        KEEP=saved is not None,
        **fixed,
    )
    return z[_ends(z, len(h0), starts, sizes, not reverse)].clone(), saved


def backward(
    g_out: Tensor | None,
    g_last: Tensor | None,
    out: Tensor,
    saved: Tensor | None,
    w: Tensor,
    activation: Activation,
    sizes: Tensor | None = None,
    reverse: bool = False,
    *,
    batch: int,
) -> tuple[Tensor, Tensor]:
    """The gradients by all pre-activations, delta_t = act'(g_t + delta_{t+1} w), and by the first states.

    `g_out` (rows, N) and `g_last` (B, N) are the gradients by the states and by the last state of each sequence, or
    None; `out` are the states that `forward` left and `saved` its second result, with `keep`; `w` (N, N) is the
    transpose of its `wt`; `batch` is B. The others are as in `forward`.

    Returns:
        delta of shape (rows, N) and the gradient by h0, (B, N). With h_{t-1} from `out`, the gradient by w is the sum
        of delta_t^T h_{t-1}.
    """
    delta = torch.empty_like(out)
    if not batch:
        return delta, out.new_empty(0, out.shape[1])
    fixed = settings(out.shape[1], activation)
    starts, steps = _steps(out, batch, sizes)
    _run(
        "run_back",
        out,
        batch,
        delta,
        _padded(w, fixed),
        delta if g_out is None else g_out.contiguous(),
        delta if g_last is None else g_last.contiguous(),
        out,
        out if saved is None else saved,
        starts,
        out if sizes is None else sizes,
        activation.slope,
        steps,
        batch,
        PACKED=sizes is not None,
        REVERSE=reverse,
        HAS_OUT=g_out is not None,
        HAS_LAST=g_last is not None,
        **fixed,
    )
    with FullPrecision(out.device):
        return delta, delta[_ends(out, batch, starts, sizes, reverse)] @ w


def _steps(rows: Tensor, batch: int, sizes: Tensor | None) -> tuple[Tensor, int]:
    """First row of each step (with sizes) and the number of steps."""
    return (rows, len(rows) // batch) if sizes is None else (sizes.cumsum(0) - sizes, len(sizes))


def _ends(rows: Tensor, batch: int, starts: Tensor, sizes: Tensor | None, is_last: bool) -> slice | Tensor:
    """Where the rows of the last (or first) step in time of each sequence are."""
    if not is_last:
        return slice(0, batch)
    if sizes is None:
        return slice(len(rows) - batch, len(rows))
    sequences = torch.arange(batch, device=sizes.device)
    # As many steps as have more rows than the sequence's index.
    lengths = torch.searchsorted(-sizes, -sequences)
    return starts[lengths - 1] + sequences


def settings(width: int, activation: Activation) -> dict[str, Any]:
    """What is fixed when a program is compiled for rows of this width."""
    is_paired = activation.is_paired
    columns = width // 2 if is_paired else width
    tile_rows, tile_columns = _tile(width, columns, is_paired)
    is_resident = not is_paired and width <= tile_rows == tile_columns
    return {
        "N": width,
        "ACTIVATION": activation.kernel,
        "PAIRS": is_paired,
        "RESIDENT": is_resident,
        "BLOCK_B": BATCH_BLOCK,
        "BLOCK_K": tile_rows,
        "BLOCK_N": tile_columns,
        "num_warps": 8 if is_resident and tile_columns > 32 else 4,
        "enable_fp_fusion": True,
    }


def _run(name: str, rows: Tensor, batch: int, *args: Any, **options: Any) -> None:
    """Runs a program on enough blocks for all sequences, on the device of the rows."""
    with torch.cuda.device(rows.device) if rows.is_cuda else contextlib.nullcontext():
        getattr(programs(_is_interpreted()), name)[(-(-batch // BATCH_BLOCK),)](*args, **options)


def _padded(matrix: Tensor, fixed: dict[str, Any]) -> Tensor:
    """The matrix with zeros up to whole tiles, in either half of the columns if they are pairs: aligned, no masks."""
    halves = matrix.unflatten(1, (1 + fixed["PAIRS"], -1))
    rows, columns = -len(matrix) % fixed["BLOCK_K"], -halves.shape[-1] % fixed["BLOCK_N"]
    return torch.nn.functional.pad(halves, (0, columns, 0, 0, 0, rows)).contiguous()


def _tile(width: int, columns: int, is_paired: bool) -> tuple[int, int]:
    """Rows and columns of a tile: the first of TILES that pads least, cut down to powers of two for narrow matrices."""

    def padded(tile: tuple[int, int]) -> int:
        return -(-columns // tile[1]) * tile[1]

    # Two halves side by side fill a tile of pairs.
    tiles = [(rows, size >> is_paired) for rows, size in TILES]
    rows, size = min(tiles, key=padded)
    return min(rows, _power(width)), min(size, _power(columns))


def _power(length: int) -> int:
    """The next power of two, and at least what a tensor product takes."""
    return max(16, 1 << (length - 1).bit_length())


def _is_interpreted() -> bool:
    """Whether triton runs programs in its interpreter."""
    if "TRITON_INTERPRET" not in os.environ:
        return False
    from triton import knobs

    return knobs.runtime.interpret


@functools.cache
def programs(is_interpreted: bool) -> ModuleType:
    """The programs. triton.jit asks for the interpreter when it decorates, so there is one module for each answer."""
    spec = importlib.util.find_spec("stiefelkit.scan.kernels.programs")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
