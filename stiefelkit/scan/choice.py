"""The ways to run a scan, by name, and which of them can run a given one."""

from dataclasses import dataclass

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

__all__ = ["BACKENDS", "Request", "choose", "choose_gated", "engine", "plain_engine"]


BACKENDS = ("auto", "reference", "inplace", "triton", "cuda_graphs")
"""Names that `scan` takes as `backend`."""


@dataclass(frozen=True)
class Request:
    """What decides whether a backend can run a scan.

    Args:
        device: of the tensors.
        dtype: that is computed with.
        n: units of the state.
        activation: what it is looked up as.
    """

    device: torch.device
    dtype: torch.dtype
    n: int
    activation: Activation


def reason_against(backend: str, request: Request) -> str | None:
    """Returns why a backend cannot run a scan; None if it can."""
    if backend == "triton":
        width = request.n * (1 + request.dtype.is_complex)
        return supports(request.device, request.dtype, width, request.activation)
    if backend == "cuda_graphs" and request.device.type != "cuda":
        return f"a GPU, got {request.device.type}"
    return None


def choose(backend: str, request: Request) -> str:
    """Returns the backend to run a scan with: the one asked for, or for "auto" the fastest that can.

    Raises:
        UnknownNameError: there is no such backend.
        OptionError: the one asked for cannot run this scan.
    """
    if backend not in BACKENDS:
        raise UnknownNameError(f"scan has no backend {shown(backend)}{did_you_mean(backend, BACKENDS)}")
    if backend != "auto":
        if reason := reason_against(backend, request):
            raise OptionError(f"The scan's backend {backend!r} needs {reason}.")
        return backend
    if request.device.type != "cuda":
        return "inplace"
    return "cuda_graphs" if reason_against("triton", request) else "triton"


def choose_gated(backend: str, request: Request) -> str:
    """Returns the backend to run a gated recurrence with, as `choose`.

    Raises:
        OptionError: the one asked for cannot run it.
    """
    if backend == "auto" and request.device.type != "cuda":
        return "inplace"
    if backend in ("reference", "inplace"):
        return backend
    reason = supports_gated(request.device, request.dtype, request.n, request.activation)
    if backend == "auto":
        return "inplace" if reason else "triton"
    if reason:
        raise OptionError(f"goru_scan's backend {backend!r} needs {reason}.")
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
