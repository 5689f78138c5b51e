"""The ways to run a scan, by name, and which of them can run a given one."""

from collections.abc import Callable

import torch

from stiefelkit.errors import OptionError, UnknownNameError, did_you_mean, shown
from stiefelkit.scan.activations import Activation
from stiefelkit.scan.checks import GATED, Recurrence
from stiefelkit.scan.engines.engine import Checkpointed, Engine, PlainEngine
from stiefelkit.scan.engines.graphs import GraphLoops
from stiefelkit.scan.engines.inplace import InPlace
from stiefelkit.scan.engines.loops import Loops, StructuredLoops
from stiefelkit.scan.engines.triton import Triton
from stiefelkit.scan.gated.kernel import GatedTriton
from stiefelkit.scan.gated.kernel import supports as supports_gated
from stiefelkit.scan.gated.loops import Gated
from stiefelkit.scan.kernels.launch import supports

BACKENDS = ("auto", "reference", "inplace", "triton", "cuda_graphs")
"""Names that `scan` takes as `backend`."""


def choose(backend: str, device: torch.device, dtype: torch.dtype, n: int, activation: Activation) -> str:
    """Returns the backend to run a scan of n units with: the one asked for, or for "auto" the fastest that can.

    Raises:
        UnknownNameError: there is no such backend.
        OptionError: the one asked for cannot run this scan.
    """
    if backend not in BACKENDS:
        raise UnknownNameError(f"scan has no backend {shown(backend)}{did_you_mean(backend, BACKENDS)}")

    def reason_against(backend: str) -> str | None:
        if backend == "triton":
            return supports(device, dtype, n * (1 + dtype.is_complex), activation)
        is_missing = backend == "cuda_graphs" and device.type != "cuda"
        return f"a GPU, got {device.type}" if is_missing else None

    return _able("The scan", backend, device, reason_against, "cuda_graphs")


def choose_gated(backend: str, device: torch.device, dtype: torch.dtype, n: int, activation: Activation) -> str:
    """Returns the backend to run a gated recurrence with, as `choose`; the name is checked already."""

    def reason_against(backend: str) -> str | None:
        return supports_gated(device, dtype, n, activation) if backend == "triton" else None

    return _able("goru_scan", backend, device, reason_against, "inplace")


def _able(who: str, backend: str, device: torch.device, against: Callable[[str], str | None], without: str) -> str:
    """Returns a backend that can run a scan: where triton cannot, on a GPU, the one without it."""
    if backend == "auto":
        return "inplace" if device.type != "cuda" else without if against("triton") else "triton"
    if reason := against(backend):
        raise OptionError(f"{who}'s backend {backend!r} needs {reason}.")
    return backend


def engine(recurrence: Recurrence) -> Engine:
    """Returns the implementation of a recurrence, by its cell, its backend and what is asked of it."""
    if recurrence.structure:
        runner = InPlace(StructuredLoops)
    elif recurrence.cell == GATED:
        runner = GatedTriton() if recurrence.backend == "triton" else Gated()
    else:
        runner = plain_engine(recurrence.backend)
    return Checkpointed(runner) if recurrence.last_only else runner


def plain_engine(backend: str) -> PlainEngine:
    """Returns the implementation of a fast backend of `scan`."""
    if backend == "triton":
        return Triton()
    return InPlace(GraphLoops if backend == "cuda_graphs" else Loops)
