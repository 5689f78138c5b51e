"""The recurrence in its cases, each backend, beside torch's loop and cuDNN's layers, with TF32 off and on."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.parts import Cells, LeftOut
from benchmarks.gpu.scale import Scale
from stiefelkit.measuring.races import scan
from stiefelkit.measuring.races.plan import ScanRace
from stiefelkit.measuring.report.record import Figure

__all__ = ["lowered", "of_cases"]


def of_cases(scale: Scale, device: str) -> Cells:
    """Forward and backward of each contender, case by case."""
    for tf32 in (False, True) if device.startswith("cuda") else (False,):
        words = ", TF32" if tf32 else ""
        for case in scale.cases:
            with lowered(tf32):
                for race in scan.races(ScanRace(cases=(case,), peers=True, device=device, **scale.scan)):
                    table = f"{race.subject}{words}"
                    yield Figure("scan", table, "LIMIT", "s", race.unit)
                    for row in race.rows:
                        beside = {
                            "n": float(row["n"]),
                            "us / step": 1e6 * row["seconds"] / case.T,
                            "/ LIMIT": row["limit_units"],
                            "ours x": row["time_over_ours"],
                        }
                        yield Figure(
                            "scan", table, row.contender, "s", row["seconds"], row["spread"], row["samples"], beside
                        )
                    yield from (LeftOut(f"{name}, {case.name}{words}", why) for name, why in race.left_out.items())


@contextlib.contextmanager
def lowered(allowed: bool) -> Iterator[None]:
    """Lets cuDNN and products lower float32, or neither."""
    flags: Any = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [flag.allow_tf32 for flag in flags]
    try:
        for flag in flags:
            flag.allow_tf32 = allowed
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            flag.allow_tf32 = value
