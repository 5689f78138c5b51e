"""The law of gradients and rates of any size that a dtype holds, for optimizers of frames."""

import contextlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from stiefelkit.errors import StiefelkitError
from stiefelkit.functional._arithmetic.reads import without_reads
from stiefelkit.metrics import frame_tolerance, orthogonality_error, working_dtype
from stiefelkit.testing import seeds
from stiefelkit.testing.optimizer_cases import OptimizerCase, snapshot
from stiefelkit.testing.require import require

__all__ = ["law_of_sizes"]

_EXPONENTS = {True: (-44, -38, -30, -22, -12, 0, 19, 30, 38), False: (-320, -300, -200, -160, 0, 150, 160, 300)}
"""Powers of 10 of gradients, of single precision and of double."""
_SHAPES = ((6, 6), (7, 3), (2, 5, 4), (3, 1), (1, 1))


def law_of_sizes(case: OptimizerCase) -> None:
    """After a gradient and a rate of any size a weight is a finite frame, or as it was, which a sentence tells.

    Where no value is read nothing can be told, and the frame is as it was.
    """
    for number, (exponent, kind, lr) in enumerate(_draws(case.dtype)):
        shape = _SHAPES[number % len(_SHAPES)]
        for unread in (False, True):
            what = f"a {kind} gradient of 1e{exponent} of shape {shape} with lr={lr:.2g}{', unread,' if unread else ''}"
            (w,) = ws = case.frames(shape)
            optimizer = case.on(ws, lr=lr)
            for step in range(2):
                w.grad, before = _gradient(w, exponent, kind, step), snapshot(optimizer)
                try:
                    with without_reads() if unread else contextlib.nullcontext():
                        optimizer.step()
                except StiefelkitError as refusal:
                    require("\n" not in str(refusal), f"{what} is refused in more than a sentence: {refusal}")
                    require(torch.equal(w, before[0][0]), f"{what} is refused, but moves the frame")
                    break
                except Exception as error:
                    require(False, f"{what} ends in {type(error).__name__}: {error}")
                _require_sound(optimizer, w, what)


def _draws(dtype: torch.dtype) -> Iterator[tuple[int, str, float]]:
    """Yields sizes and kinds of gradients, and rates that make an ordinary step of them, a long one or none."""
    is_single = dtype != working_dtype(dtype)
    for exponent in _EXPONENTS[is_single]:
        ordinary = min(0.1 * 10.0**-exponent if exponent > -308 else math.inf, 1e300)
        for lr in (ordinary, 1e30 if is_single else 1e200, 1e-30, 1e300):
            for kind in ("random", "lone"):
                yield exponent, kind, lr
    yield from ((0, "zero", lr) for lr in (1e30, 1e300))


def _gradient(w: Tensor, exponent: int, kind: str, seed: int) -> Tensor:
    """Returns a gradient whose largest entry has a size: one of many, or the only one of that size."""
    g = torch.randn(w.shape, dtype=working_dtype(w.dtype), generator=seeds.generator(seed))
    g = g / g.abs().max() * (1e-3 if kind == "lone" else 10.0**exponent if kind == "random" else 0.0)
    if kind == "lone":
        g[..., -1, 0] = 10.0**exponent
    return g.to(w.device, w.dtype)


def _require_sound(optimizer: torch.optim.Optimizer, w: Tensor, what: str) -> None:
    error = orthogonality_error(w).max().item()
    bound = frame_tolerance(w.shape[-1], w.dtype)
    require(error <= bound, f"{what} leaves ||W^H W - I||_F = {error:.3g}", error, bound)
    for key, value in optimizer.state[w].items():
        finite = not isinstance(value, Tensor) or bool(torch.isfinite(value).all())
        require(finite, f"{what} leaves a state {key} that is not finite")
