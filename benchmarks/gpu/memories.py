"""Most memory that is held at once: by maps forward and backward, and by the recurrence."""

import torch

import stiefelkit as sk
from benchmarks.gpu.parts import Cells, LeftOut
from benchmarks.gpu.scale import Scale
from stiefelkit.errors import StiefelkitError
from stiefelkit.measuring.races.clock import peak_bytes
from stiefelkit.measuring.races.contenders import OPERATIONS, FrameProblem, our_contenders
from stiefelkit.measuring.races.plan import ScanRace
from stiefelkit.measuring.races.recurrences import LOOP, picked_backend
from stiefelkit.measuring.races.scan import resident_bytes
from stiefelkit.measuring.report.record import Figure

__all__ = ["of_maps_and_scan"]


def of_maps_and_scan(scale: Scale, device: str) -> Cells:
    """Bytes beyond what was there before."""
    yield from _of_maps(scale.memory_size, torch.device(device))
    case = scale.cases[0]
    drawn = ScanRace(cases=(case,), device=device).drawn(case)
    ours = picked_backend(drawn)
    for contender, is_peer in ((ours, False), (LOOP, True)):
        for loss in scale.losses:
            name = f"{contender}, {loss.replace('_', ' ')}"
            try:
                size = resident_bytes(drawn, contender, loss, is_peer)
            except StiefelkitError as error:
                yield LeftOut(name, str(error))
            else:
                yield Figure("memory", f"the recurrence, {case}", name, "bytes", float(size))


def _of_maps(n: int, device: torch.device) -> Cells:
    problem = FrameProblem(n, n, device=device)
    frame = 4 * n * n
    for name, contender in our_contenders(sk.available(), ("exact",), {}).items():
        try:
            run = OPERATIONS["forward_backward"](contender.enter(problem), problem.gradient())
            run()
            size = peak_bytes(run, device)
        except StiefelkitError as error:
            yield LeftOut(name, str(error))
        except torch.OutOfMemoryError as error:
            yield LeftOut(name, str(error).partition("\n")[0])
        else:
            yield Figure(
                "memory", f"forward and backward, {problem}", name, "bytes", size, beside={"frames": size / frame}
            )
