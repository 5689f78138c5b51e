"""The laws of every map and optimizer on the device, in every dtype and precision, and again with products lowered."""

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

import stiefelkit as sk
from benchmarks.gpu.parts import Cells
from benchmarks.gpu.scale import Scale
from stiefelkit.measuring.moved_frames import own_optimizers
from stiefelkit.measuring.report.record import Figure
from stiefelkit.testing import LawBroken, check_optimizer, check_parametrization

__all__ = ["of_everything"]

UNDER_LOWERED = ("frames", "gradients", "precision")
"""The laws that are asked for once more with products lowered."""


def of_everything(scale: Scale, device: str) -> Cells:
    """Law by law of each member: whether it holds, and how long that took."""
    maps = {name: cls for name, cls in sk.available().items() if not scale.maps or name in scale.maps}
    movers = {name: cls for name, cls in own_optimizers().items() if not scale.optimizers or name in scale.optimizers}
    for lowered in (False, True):
        words = ", products lowered" if lowered else ""
        with _lowered() if lowered else contextlib.nullcontext():
            for law in [law for law in scale.laws if not lowered or law in UNDER_LOWERED]:
                for name, cls in maps.items():
                    yield _row(f"maps: {law}{words}", name, partial(check_parametrization, cls, [law], device=device))
            for law in [law for law in scale.steps_laws if not lowered or law in UNDER_LOWERED]:
                for name, cls in movers.items():
                    yield _row(f"optimizers: {law}{words}", name, partial(check_optimizer, cls, [law], device=device))


def _row(table: str, name: str, check: Callable[[], None]) -> Figure:
    start, words = time.monotonic(), ""
    try:
        check()
    except LawBroken as broken:
        words = "; ".join(str(failure).partition("\n")[0] for failure in broken.failures)
    except RuntimeError as error:
        words = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return Figure("laws", table, name, "law", time.monotonic() - start, holds=not words, words=words)


@contextlib.contextmanager
def _lowered() -> Iterator[None]:
    """Every flag of torch's by which float32, bfloat16 and float16 products are lowered."""
    matmul, before = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    flags = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    were = {flag: getattr(matmul, flag) for flag in flags}
    try:
        torch.set_float32_matmul_precision("medium")
        for flag in flags:
            setattr(matmul, flag, True)
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for flag, value in were.items():
            setattr(matmul, flag, value)
