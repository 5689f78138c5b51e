"""Small maps and steps of optimizers in few launches of a GPU; triton is imported at the first call."""

import contextlib
import functools
import importlib.util
import math
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from stiefelkit._torch import is_exporting
from stiefelkit.functional._arithmetic.devices import float64_is_weak
from stiefelkit.functional._arithmetic.product import is_plain, opaque
from stiefelkit.functional._exponential.taylor import combinations

PACKAGE = "stiefelkit.functional._kernels.programs"
HAS_TRITON = importlib.util.find_spec("triton") is not None  # once: torch 2.11 cannot trace the search

LARGEST = 128  # rows of a real matrix, twice those of a complex one, that a program takes
TILE = 64
HALF_TILE = 32  # side of the tiles of exponentials, whose many products would spill registers in larger ones
ENTRIES = 32  # rows of a tile where matrices are filled and read
PROGRAMS = 4  # for each multiprocessor; each takes several matrices of a large batch
MOST_PAIRS = 8  # tensors that one launch of `commit` writes
MOST_BOUNDS = 8  # tensors that one launch of `commit` looks at
BLOCK = 1024


class Interpreter:
    """Sends a CPU the road of a GPU, in triton's interpreter (TRITON_INTERPRET=1), for tests."""

    is_on = False


def is_at_hand(m: Tensor) -> bool:
    """Returns whether programs run where the tensor M is, which has to have entries."""
    if m.device.type != "cuda":
        return Interpreter.is_on and m.is_cpu and m.numel() > 0
    if not m.numel() or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_properties(m.device).major >= 8 and HAS_TRITON


def takes(m: Tensor, n: int, parts: int) -> bool:
    """Returns whether one launch maps and moves n x n matrices of so many parts where the tensor M is."""
    return 0 < n * parts <= LARGEST and is_at_hand(m)


def settings(n: int, parts: int, tensor_cores: bool = True, largest_tile: int = TILE) -> dict[str, Any]:
    """Returns constants and options of a program for n rows and so many parts; `maxnreg` keeps it from spilling."""
    size = max(16, 1 << (n * parts - 1).bit_length())
    tile, warps = min(size, largest_tile), min(8, {16: 1, 32: 4}.get(size, 8) * TILE // largest_tile)
    options = {"num_warps": warps, "num_stages": 1, "maxnreg": 255}
    return {"PARTS": parts, "N": size, "T": tile, "K": tile if tensor_cores else 16, "E": min(size, ENTRIES), **options}


@opaque(lambda v, d, n, dtype: v.new_empty(*v.shape[:-1], n, n, dtype=dtype), dims=(1, 1))
def cayley_forward(v: Tensor, d: Tensor | None, n: int, dtype: torch.dtype) -> Tensor:
    """Returns (2 (I + A)^-1 - I) D from float32 coordinates, computed in float64 and rounded once to a dtype.

    D is the entries of a complex diagonal, the signs of a real one in any dtype, or None, the identity.
    """
    parts = 1 + dtype.is_complex
    shape = v.shape[:-1]
    w = v.new_empty(*shape, n, n, dtype=dtype)
    fixed = settings(n, parts, not float64_is_weak(v.device))
    entries, apart = _diagonals(d, shape, n)
    _run("run_forward", v, 3, [v.contiguous(), entries, _parts(w)], apart, n, shape.numel(), **fixed)
    return w


@opaque(lambda w, g, d, dtype: w.new_empty(*w.shape[:-2], _size(w), dtype=dtype), dims=(2, 2, 1))
def cayley_backward(w: Tensor, g: Tensor, d: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns the gradient of packed coordinates from frames of `cayley_forward` and theirs, in the dtype of W."""
    n, parts = w.shape[-1], 1 + w.is_complex()
    shape = w.shape[:-2]
    gv = w.new_empty(*shape, _size(w), dtype=dtype)
    fixed = settings(n, parts, w.dtype.to_real() == torch.float64 and not float64_is_weak(w.device))
    entries, apart = _diagonals(d, shape, n)
    _run(
        "run_backward", w, 3, [_parts(w), _parts(g), entries, gv], apart, n, shape.numel(), dtype=w.real.dtype, **fixed
    )
    return gv


@opaque(lambda v, n, dtype: v.new_empty(*v.shape[:-1], n, n, dtype=dtype), dims=(1,))
def exponential_forward(v: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Returns exp A from float32 coordinates, computed in float64 and rounded once to float32 or complex64."""
    w = v.new_empty(*v.shape[:-1], n, n, dtype=dtype)
    _run_exponential("run_exponential", v, [_parts(w)], n, 1 + dtype.is_complex)
    return w


@opaque(lambda v, g: torch.empty_like(v, memory_format=torch.contiguous_format), dims=(1, 2))
def exponential_backward(v: Tensor, g: Tensor) -> Tensor:
    """Returns the gradient of float32 coordinates by that of their exponentials, computed in float64."""
    gv = torch.empty_like(v, memory_format=torch.contiguous_format)
    _run_exponential("run_exponential_back", v, [_parts(g), gv], g.shape[-1], 1 + g.is_complex())
    return gv


def _run_exponential(name: str, v: Tensor, tensors: Sequence[Tensor], n: int, parts: int) -> None:
    fixed = settings(n, parts, not float64_is_weak(v.device), HALF_TILE)
    _run(name, v, 7, [v.contiguous(), *tensors, combinations(v.device)], n, v.shape[:-1].numel(), **fixed)


def packs(m: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether programs turn coordinates of a dtype into real matrices, where M is, and gradients back."""
    if dtype != torch.float32 or m.is_complex() or (torch.compiler.is_compiling() and is_exporting()):
        return False  # an exported program trains by the derivatives of torch's operators
    return is_at_hand(m)


@opaque(lambda v, n, shift: v.new_empty(*v.shape[:-1], n, n, dtype=torch.float64), dims=(1,))
def skew_matrix(v: Tensor, n: int, shift: float) -> Tensor:
    """Returns A + shift I in float64 from float32 coordinates."""
    return fill_skew_(v.new_empty(*v.shape[:-1], n, n, dtype=torch.float64), v, shift)


def fill_skew_(a: Tensor, v: Tensor, shift: float) -> Tensor:
    """Fills contiguous matrices as `skew_matrix` does."""
    n = a.shape[-1]
    count = v.shape[:-1].numel() * (-(-n // ENTRIES)) ** 2
    start(PACKAGE, "run_skew", count, v, v.contiguous(), a, shift, n, E=ENTRIES)
    return a


@opaque(lambda g, scale: g.new_empty(*g.shape[:-2], _size(g), dtype=torch.float32), dims=(2,))
def skew_coordinates(g: Tensor, scale: float) -> Tensor:
    """Returns the gradient of float32 coordinates from scale G, that of A."""
    n = g.shape[-1]
    gv = g.new_empty(*g.shape[:-2], _size(g), dtype=torch.float32)
    count = g.shape[:-2].numel() * (-(-n // ENTRIES)) ** 2
    start(PACKAGE, "run_skew_back", count, g, g.contiguous(), gv, scale, n, E=ENTRIES)
    return gv


@opaque(
    lambda w, *_: (torch.empty_like(w), torch.empty_like(w), w.new_empty(w.shape[:-2], dtype=torch.float64)), dims=None
)
def frame_step(
    w: Tensor, lo: Tensor, along: Tensor, step: Tensor, turns: int, way: str, most: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns frames W + lo after a step, and one polish or more, all in float64.

    W, float32 or complex64, and lo have the shape (*, n, p), steps the shape (*). The way is "cayley", by a transform
    of square frames along -W A, A skew, or straight along a field of their shape: "go", or what is done where ||W^H W -
    I||_F is larger than `most` after the step: "shorten" it, or "divide" by a bound of the largest singular value.
    Returns W, lo, and ||W^H W - I||_F^2 before the last polish, twice that of complex W, shape (*).
    """
    (*batch, n, p), parts = w.shape, 1 + w.is_complex()
    moved, rest = (torch.empty(w.shape, dtype=w.dtype, device=w.device) for _ in range(2))
    defects = w.new_empty(batch, dtype=torch.float64)
    fixed = settings(n, parts, not float64_is_weak(w.device))
    steps = step.double().expand(batch).contiguous()
    tensors = [_parts(w), _parts(lo), _parts(along), steps, _parts(moved), _parts(rest), defects]
    _run("run_step", w, 4, tensors, n, p, defects.numel(), WAY=way, MOST=most, TURNS=turns, **fixed)
    return moved, rest, defects


def commit(
    pairs: Sequence[tuple[Tensor, Tensor]],
    refused: Tensor,
    bounds: Sequence[tuple[Tensor, float]],
    holds: Tensor | None = None,
) -> None:
    """Writes tensors over others if all values are at most their bounds, none NaN, and something holds.

    Args:
        pairs: what is written over, and by what; of one shape each.
        refused: float32 numbers, to which 1 is added where nothing is written.
        bounds: values and the most that they may be.
        holds: a tensor of one truth value.
    """
    pairs = [(old, new.to(old.dtype).resolve_conj()) for old, new in pairs]
    tensors = [t for pair in (*pairs, *bounds, (refused,)) for t in pair if isinstance(t, Tensor)]
    are_few = len(pairs) <= MOST_PAIRS and len(bounds) <= MOST_BOUNDS and is_at_hand(refused)
    if are_few and is_plain(*tensors) and all([t.is_contiguous() for t in tensors]):
        olds, news = ([_words(pair[side]) for pair in pairs] for side in range(2))
        counts, values = [t.numel() for t in olds], [values for values, _ in bounds]
        looked = tuple(values), tuple(t.numel() for t in values), tuple(most for _, most in bounds), holds
        arguments = tuple(olds), tuple(news), tuple(counts), *looked, refused, refused.numel()
        blocks = -(-max(refused.numel(), *counts, 1) // BLOCK)
        start(PACKAGE, "run_commit", blocks, refused, *arguments, BLOCK=BLOCK)
        torch.autograd.graph.increment_version([old for old, _ in pairs if not old.is_inference()])
        return
    for values, most in bounds:
        fit = (values <= most).all()
        holds = fit if holds is None else holds & fit
    for old, new in pairs:
        old.copy_(new) if holds is None else torch.where(holds, new, old, out=old)
    if holds is not None:
        refused.add_(holds.logical_not())


def adam_in_one(
    counts: Tensor,
    betas: tuple[float, float],
    moments: tuple[Tensor, Tensor, float, float] | None,
    matrices: int,
    rate: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns counts of steps and second moments after one more, and factors of steps; None where no program runs.

    Args:
        counts: of each frame, float32, shape (b,).
        betas: decays of the moments.
        moments: norms of gradients, float64, second moments, float32, of each matrix, and what is added to them and to
            their roots; None for the corrections of moments of entries: of their roots, and of first moments.
        matrices: of each frame.
        rate: by which factors are multiplied.
    """
    norms, seen, inner, outer = moments or (None, None, 0.0, 0.0)
    if not is_at_hand(counts) or not is_plain(counts) or not (seen is None or seen.dtype == torch.float32):
        return None
    batch, counted = counts.numel() * matrices, torch.empty_like(counts)
    mixed, scales = counts.new_empty(batch), counts.new_empty(batch, dtype=torch.float64)
    logs = [math.log(beta) if beta else -math.inf for beta in betas]
    values = norms, None if seen is None else seen.contiguous(), counts.contiguous(), mixed, counted, scales
    rule = (*logs, 1 - betas[1], inner, outer, rate)
    start(PACKAGE, "run_moments", -(-batch // BLOCK), counts, *values, batch, matrices, *rule, N=BLOCK)
    return counted, mixed, scales


def _words(t: Tensor) -> Tensor:
    """Returns the memory of a tensor as integers of 32 bits."""
    return (torch.view_as_real(t) if t.is_complex() else t).reshape(-1).view(torch.int32)


def _size(w: Tensor) -> int:
    n = w.shape[-1]
    return n * n if w.is_complex() else n * (n - 1) // 2


def _parts(t: Tensor) -> Tensor:
    t = t.resolve_conj().contiguous()
    return torch.view_as_real(t) if t.is_complex() else t


def _diagonals(d: Tensor | None, shape: torch.Size, n: int) -> tuple[Tensor | None, int]:
    """Returns D as numbers in memory, and how far those of a matrix are from those of the next."""
    if d is None:
        return None, 0
    if d.numel() == n:
        return _parts(d), 0
    d = _parts(d.expand(*shape, n))
    return d, d.numel() // max(shape.numel(), 1)


def _run(
    name: str,
    on: Tensor,
    matrices: int,
    tensors: Sequence[Tensor | None],
    *numbers: int,
    dtype: torch.dtype = torch.float64,
    **fixed: Any,
) -> None:
    """Launches a program with scratch memory of so many matrices for each of a batch that are worked on at a time."""
    # For as many programs as run at a time; for two on a CPU, so that tests see one take several matrices.
    most = PROGRAMS * torch.cuda.get_device_properties(on.device).multi_processor_count if on.is_cuda else 2
    if count := min(numbers[-1], most):
        scratch = torch.empty(count, matrices, fixed["N"], fixed["N"], dtype=dtype, device=on.device)
        start(PACKAGE, name, count, on, *tensors, scratch, *numbers, **fixed)


def start(package: str, name: str, count: int, on: Tensor, *args: Any, **options: Any) -> None:
    """Launches `count` of a program, one of a module or package of programs, on the device of a tensor."""
    with torch.cuda.device(on.device) if on.is_cuda else contextlib.nullcontext():
        getattr(programs(package, is_interpreted()), name)[(count,)](*args, **options)


def is_interpreted() -> bool:
    if "TRITON_INTERPRET" not in os.environ:
        return False
    from triton import knobs

    return knobs.runtime.interpret


@functools.cache
def programs(package: str, is_interpreted: bool) -> ModuleType:
    """Loads programs: triton.jit asks for the interpreter when it decorates, so each answer has modules of its own."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.origin is not None
    name, inner = f"{package}_{'interpreted' if is_interpreted else 'compiled'}", found.submodule_search_locations
    spec = importlib.util.spec_from_file_location(name, found.origin, submodule_search_locations=inner)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
