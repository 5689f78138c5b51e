"""The recurrence on a GPU: all steps in one launch, for widths up to 512, in exact float32.

The products that need no recurrence stand before and behind it. Works on real rows, complex ones as [Re | Im], in
place. triton is imported at the first call.

One table says how the work is laid out, for every size and device. A step of a recurrence cannot begin before the one
before it has ended, so that what counts for a few sequences is how long one step of one of them takes, and for many how
much all multiprocessors do at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stiefelkit.functional._kernels.launch import HAS_TRITON, is_interpreted, start
from stiefelkit.scan.activations import Activation
from stiefelkit.scan.engines.problem import Gradients, Outcome, Problem
from stiefelkit.scan.structures.structure import from_blocks, row_blocks

PACKAGE = "stiefelkit.scan.kernels"

MAX_WIDTH = 512  # the widest row of real numbers
BATCH_BLOCK = 16  # sequences of a program of "tiles"; tensor products have no fewer rows
TILES = ((32, 128), (64, 64))
"""Rows and columns of a tile of the matrix; wider ones read fewer states, but may have more zeros at the edge."""
INTERPRETED = 132  # multiprocessors that triton's interpreter stands for


@dataclass(frozen=True)
class KernelLayout:
    """One way to lay out a scan, for so many units and sequences for each multiprocessor of the GPU at most.

    "rows" is a program a sequence, with the matrix in registers; "groups" are several programs for some sequences,
    `rows` at a time, each with some columns of the matrix; "tiles" is a program for 16 sequences, which reads the
    matrix at every step. A row has so many blocks, `size` numbers in the first and half as many in each next one, and
    a block `deep` rows of the matrix side by side.
    """

    program: str
    states: str
    max_units: int
    max_per_multiprocessor: float
    blocks: int
    size: int
    warps: int
    deep: int = 0
    columns: int = 0
    rows: int = 1


UNLIMITED = float("inf")
LAYOUTS = (
    KernelLayout("rows", "real", 32, UNLIMITED, 1, 32, 1, 4),
    KernelLayout("rows", "real", 64, UNLIMITED, 1, 64, 4, 16),
    KernelLayout("rows", "real", 96, UNLIMITED, 2, 64, 4, 16),
    KernelLayout("rows", "real", 128, UNLIMITED, 1, 128, 8, 16),
    KernelLayout("rows", "real", 192, 24, 2, 128, 8, 16),
    KernelLayout("groups", "real", 256, 5, 1, 256, 8, 32, columns=64, rows=2),
    KernelLayout("groups", "real", 512, 8, 1, 512, 8, 32, columns=64, rows=4),
    KernelLayout("tiles", "real", 512, UNLIMITED, 0, 0, 4),
    KernelLayout("rows", "complex", 32, UNLIMITED, 1, 32, 1, 4),
    KernelLayout("rows", "complex", 64, UNLIMITED, 1, 64, 4, 8),
    KernelLayout("rows", "complex", 128, UNLIMITED, 1, 128, 8, 16),
    KernelLayout("groups", "complex", 256, 7, 1, 512, 8, 32, columns=64, rows=4),
    KernelLayout("tiles", "complex", 256, UNLIMITED, 0, 0, 4),
)
"""The first of these that fits is taken."""


def find_layout(states: str, units: int, batch: int, multiprocessors: int) -> KernelLayout:
    """Returns the layout for so many units and sequences on a GPU of so many multiprocessors.

    >>> find_layout("real", 170, 128, 132).program
    'rows'
    >>> find_layout("real", 170, 4096, 132).program
    'tiles'
    """
    for layout in LAYOUTS:
        most = layout.max_per_multiprocessor * multiprocessors
        if layout.states == states and units <= layout.max_units and batch <= most:
            return layout
    raise ValueError(f"find_layout needs {states} states of fewer units, got {units}.")


def unsupported(device: torch.device, dtype: torch.dtype, width: int, activation: Activation) -> str | None:
    """Returns what the kernels need and do not find for rows of `width` real numbers, or None if they can run."""
    if activation.kernel is None:
        return f"an activation that its programs have, got {activation.name!r}"
    if dtype.to_real() != torch.float32:
        return f"float32 or complex64, got {dtype}"
    if not 0 < width <= MAX_WIDTH:
        return f"rows of at most {MAX_WIDTH} real numbers, got {width}"
    if activation.is_paired and width % 2:
        return f"an even number of units for {type(activation).__name__}, got {width}"
    return unsupported_device(device)


def unsupported_device(device: torch.device) -> str | None:
    """Returns what programs need of a device and do not find, or None; see `unsupported`."""
    if not HAS_TRITON:
        return "the package triton, got an environment without it"
    if device.type == "cpu":
        return None if is_interpreted() else "a GPU, got cpu (TRITON_INTERPRET=1 runs it there, slowly, for tests)"
    if device.type != "cuda":
        return f"a GPU, got {device.type}"
    capability = torch.cuda.get_device_capability(device)
    return None if capability >= (8, 0) else f"a GPU of compute capability 8.0, got {capability[0]}.{capability[1]}"


class Triton:
    """The recurrence as two kernels, in a layout of the work or that of the table, with the methods of `InPlace`."""

    def __init__(self, layout: KernelLayout | None = None):
        self.layout = layout

    def forward(self, p: Problem, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        z, saved, last = _projected(p), p.saved_like(keep), p.first
        if len(last):
            bias = None if p.activation_bias is None else p.activation_bias.contiguous()
            args = last.contiguous(), bias, saved.flatten(0, -2) if saved.numel() else None
            # States take the place of projections.
            steps = _run("forward", p, self.layout, z, p.wt if p.is_complex else p.w.mT, args)
            last = z[steps.ends(not p.reverse)]
        return p.row_gradient(z).view(*p.x.shape[:-1], p.n), p.row_gradient(last.clone()), saved

    def backward(self, p: Problem, outcome: Outcome, needs: Sequence[bool]) -> Gradients:
        needs_x, needs_w, needs_h0, needs_u, needs_bias, needs_inner = needs
        ut = _input_matrix(p)
        delta, ends, h = self._back(p, outcome)
        dh0 = delta[ends] @ (p.rows_w if p.is_complex else p.w) if needs_h0 else None
        w = p.matrix_gradient(_by_states(p, delta, h), True) if needs_w else None
        u = x = bias = inner = None
        if needs_u and p.u is not None:
            u = p.matrix_gradient(delta.mT @ row_blocks(p.x).flatten(0, -2), p.x.is_complex())
        if needs_x:
            dx = delta if ut is None else delta @ ut.mT
            x = (from_blocks(dx) if p.x.is_complex() else dx[:, : p.x.shape[-1]].contiguous()).view(p.x.shape)
        if needs_bias and p.bias is not None:
            bias = p.row_gradient(delta.sum(0))
        if needs_inner and p.activation_bias is not None:
            inner = p.activation.bias_gradient(h, outcome.saved.flatten(0, -2), delta).sum(0)
        return Gradients(x, w, None if dh0 is None else p.row_gradient(dh0), u, bias, inner)

    def _back(self, p: Problem, outcome: Outcome) -> tuple[Tensor, slice | Tensor, Tensor]:
        """Gradients by all pre-activations, delta_t = act'(g_t + delta_{t+1} w); first rows of them; states as rows."""
        out, saved, g_out, g_last = outcome
        h = row_blocks(out).flatten(0, -2)
        delta = torch.empty_like(h)
        if not len(p.first):
            return delta, slice(0), h
        outside = (None if g is None else row_blocks(g).flatten(0, -2) for g in (g_out, g_last))
        args = *outside, h, saved.flatten(0, -2) if saved.numel() else None
        steps = _run("back", p, self.layout, delta, p.rows_w if p.is_complex else p.w, args)
        return delta, steps.ends(p.reverse), h


def _projected(p: Problem) -> Tensor:
    """Returns the projected inputs of all steps, (rows, N), in memory of their own."""
    x = row_blocks(p.x).flatten(0, -2)
    if (ut := _input_matrix(p)) is not None:
        return x @ ut if p.row_bias is None else torch.addmm(p.row_bias, x, ut)
    if p.is_complex and not p.x.is_complex():
        x = torch.cat([x, torch.zeros_like(x)], 1)
    return x.clone() if p.row_bias is None else x + p.row_bias


def _input_matrix(p: Problem) -> Tensor | None:
    """Returns the matrix by which rows of x are multiplied from the right, without a copy if it is real."""
    return p.ut if p.is_complex or p.u is None else p.u.mT


def _by_states(p: Problem, delta: Tensor, h: Tensor) -> Tensor:
    """Returns the sum over all rows of delta_t^T h_{t-1}, (N, N)."""
    sizes = p.sizes
    if not p.is_packed:
        first, later, before = slice(0, sizes[0]), slice(sizes[0], None), slice(0, len(h) - sizes[0])
        if p.reverse:
            first, later, before = slice(len(h) - sizes[0], None), before, later
        return torch.addmm(delta[first].mT @ p.first, delta[later].mT, h[before])
    steps = h.split(sizes)
    if p.reverse:
        # A sequence starts at its own last step.
        ahead = [torch.cat([step, p.first[len(step) : size]]) for size, step in zip(sizes, steps[1:], strict=False)]
        rows = [*ahead, p.first[: sizes[-1]]]
    else:
        rows = [p.first[: sizes[0]], *(step[:size] for size, step in zip(sizes[1:], steps, strict=False))]
    return delta.mT @ torch.cat(rows)


class _Steps:
    """Where the rows of all steps, (rows, N), are, of at least one sequence."""

    def __init__(self, p: Problem, rows: Tensor):
        self.batch = batch = len(p.first)
        self.rows, self.is_packed = len(rows), p.is_packed
        if not p.is_packed:
            self.count, self.starts, self.sizes, self.lengths = len(rows) // batch, rows, rows, rows
            return
        sizes = torch.tensor(p.sizes, device=rows.device)
        self.count, self.sizes, self.starts = len(sizes), sizes, sizes.cumsum(0) - sizes
        # As many steps as have more rows than the sequence's index.
        self.lengths = torch.searchsorted(-sizes, -torch.arange(batch, device=sizes.device))

    def ends(self, is_last: bool) -> slice | Tensor:
        """Returns where the rows of the last (or first) step in time of each sequence are."""
        if not is_last:
            return slice(0, self.batch)
        if not self.is_packed:
            return slice(self.rows - self.batch, self.rows)
        return self.starts[self.lengths - 1] + torch.arange(self.batch, device=self.starts.device)


def multiprocessors(device: torch.device) -> int:
    """Returns those of a GPU, or what triton's interpreter stands for."""
    is_cuda = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else INTERPRETED


def program_constants(layout: KernelLayout, width: int, units: int, activation: Activation) -> dict[str, Any]:
    """Returns what is fixed when a program is compiled for rows of this width."""
    fixed: dict[str, Any] = {"N": width, "ACTIVATION": activation.kernel, "enable_fp_fusion": True}
    fixed |= {"PAIRS": activation.is_paired, "num_warps": layout.warps}
    if layout.program == "tiles":
        # The tile that pads a matrix least; two halves side by side fill one of pairs.
        columns, tiles = width >> activation.is_paired, [(rows, size >> activation.is_paired) for rows, size in TILES]
        rows, size = min(tiles, key=lambda tile: -columns % tile[1])
        return fixed | {"BLOCK_B": BATCH_BLOCK, "BLOCK_K": rows, "BLOCK_N": size}
    fixed |= {"BLOCKS": layout.blocks, "DEEP": layout.deep}
    if layout.program == "groups":
        parts = -(-width // layout.columns)
        return fixed | {"ROWS": layout.rows, "PARTS": parts, "LONG": layout.size, "SIZE": layout.columns}
    if layout.program == "rows":
        fixed |= {"PAIRS": activation.is_paired and width == units, "COMPLEX": width > units}
    return fixed | {"SIZE": layout.size}


def _run(
    way: str, p: Problem, layout: KernelLayout | None, rows: Tensor, matrix: Tensor, args: Sequence[Tensor | None]
) -> _Steps:
    """Runs a program on rows of all steps, a matrix and its own arguments; returns the steps."""
    steps = _Steps(p, rows)
    states = "complex" if p.is_complex else "real"
    layout = layout or find_layout(states, p.n, steps.batch, multiprocessors(rows.device))
    fixed = program_constants(layout, p.width, p.n, p.activation)
    pad, places = (_tiled, steps.sizes) if layout.program == "tiles" else (_blocked, steps.lengths)
    everything = (rows, pad(matrix, fixed), *args, steps.starts, places, p.activation.slope, steps.count, steps.batch)
    fixed |= {"PACKED": steps.is_packed, "REVERSE": p.reverse}
    if layout.program == "groups":
        _run_groups(f"groups_{way}", steps, everything, fixed)
    else:
        count = -(-steps.batch // fixed.get("BLOCK_B", 1))
        start(PACKAGE, f"{layout.program}_{way}", count, rows, *everything, **fixed)
    return steps


def _run_groups(name: str, steps: _Steps, args: tuple[Any, ...], fixed: dict[str, Any]) -> None:
    """Runs groups that wait for each other, as many as fit; the interpreter's do not, but take a step each."""
    parts, device = fixed["PARTS"], args[0].device
    groups = max(1, min(-(-steps.batch // fixed["ROWS"]), multiprocessors(device) // parts))
    counters = torch.zeros(32 * groups, dtype=torch.int32, device=device)
    fixed["launch_cooperative_grid"] = True
    for first, last in [(0, steps.count)] if device.type == "cuda" else [(t, t + 1) for t in range(steps.count)]:
        start(PACKAGE, name, groups * parts, args[0], *args, counters, first, last, **fixed)


def _tiled(matrix: Tensor, fixed: dict[str, Any]) -> Tensor:
    """Pads a matrix with zeros to whole tiles, in either half of the columns if they are pairs: no masks."""
    halves = matrix.unflatten(1, (1 + fixed["PAIRS"], -1))
    return _padded(halves, -halves.shape[-1] % fixed["BLOCK_N"], 0, -len(matrix) % fixed["BLOCK_K"])


def _blocked(matrix: Tensor, fixed: dict[str, Any]) -> Tensor:
    """Transposes and pads a matrix to whole blocks; of [[a, b], [-b, a]] both a and b, pairs side by side."""
    columns = matrix.mT.unsqueeze(0)
    if fixed.get("COMPLEX"):
        n = len(matrix) // 2
        columns = torch.stack([matrix[:n, :n].mT, matrix[:n, n:].mT])
    elif fixed["PAIRS"]:
        # Units i and i + width / 2 one after the other.
        order = torch.arange(len(matrix), device=matrix.device).view(2, -1).mT.flatten()
        # The rows of a group's matrix meet states as they stand in memory.
        columns = columns[:, order] if "LONG" in fixed else columns[:, order][..., order]
    first = fixed.get("LONG", fixed["SIZE"])
    length = 2 * first - (2 * first >> fixed["BLOCKS"])
    count = fixed["PARTS"] * fixed["SIZE"] if "LONG" in fixed else length
    return _padded(columns, length - columns.shape[2], count - columns.shape[1])


def _padded(t: Tensor, *zeros: int) -> Tensor:
    """Returns a contiguous tensor with so many zeros behind the last, the last but one ... dimension."""
    return torch.nn.functional.pad(t, [n for count in zeros for n in (0, count)]) if any(zeros) else t.contiguous()
