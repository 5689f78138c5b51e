"""Linear recurrences and orthogonal convolutions: errors against float64, times beside the roofline, memory.

Nothing of this was taken on a GPU yet: a CPU ran it in its smoke form, and Triton's interpreter the programs.

The roofline of a scan is that of its bytes: states are read once and written once forward, twice as much for the
gradient, at the speed of a copy on the same device.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import stiefelkit as sk
from benchmarks import convolutions
from benchmarks.gpu.parts import Cells, LeftOut
from benchmarks.gpu.recurrences import lowered
from benchmarks.gpu.scale import Scale
from stiefelkit.measuring.races.clock import Run, clock_of, peak_bytes, race
from stiefelkit.measuring.report.record import Figure
from stiefelkit.scan import rotation_scan
from stiefelkit.scan.engines import planes

__all__ = ["of_scans_and_convolutions"]

EPS = torch.finfo(torch.float32).eps


def of_scans_and_convolutions(scale: Scale, device: str) -> Cells:
    """The scan of rotations in one pass and in chunks, a layer of it, and convolutions."""
    place = torch.device(device)
    with lowered(False):
        for steps, batch, units in scale.rotations:
            yield from _errors(steps, batch, units, place)
            yield from _times(steps, batch, units, place, scale.race)
        yield from _of_convolutions(scale, device)


def _errors(steps: int, batch: int, units: int, device: torch.device) -> Cells:
    """Errors of states in eps of the largest, for each way to compute them."""
    source = torch.Generator().manual_seed(0)
    x = torch.randn(steps, batch, units // 2, dtype=torch.complex64, generator=source).to(device)
    angle = (6 * torch.rand(units // 2, dtype=torch.float64, generator=source)).to(device)
    table = f"error of states / eps, T = {steps}, B = {batch}, n = {units}"
    for decay in (0.999, 1.0):
        factor = torch.polar(torch.full_like(angle, decay), angle)
        exact = planes.by_chunks(x.to(torch.complex128), None, factor, False, False)[0]
        ways: dict[str, Callable[[], Tensor]] = {
            "chunks": lambda f=factor: planes.by_chunks(x, None, f, False, False)[0]
        }
        if device.type == "cuda":
            for name, chunks in (("triton, one pass", 1), ("triton, chunks", 8), ("triton", None)):
                ways[name] = lambda f=factor, c=chunks: planes.on_gpu(x, None, f, False, False, c)[0]
        for name, states in ways.items():
            error = float((states() - exact).abs().max() / exact.abs().max()) / EPS
            holds = error < 16
            words = "" if holds else f"{error:.3g} eps"
            yield Figure("linear", table, f"{name}, g = {decay:g}", "eps", error, holds=holds, words=words)


def _times(steps: int, batch: int, units: int, device: torch.device, rules: dict[str, Any]) -> Cells:
    """Forward and backward, beside a copy of the states, and the memory of each."""
    table = f"forward and backward, T = {steps}, B = {batch}, n = {units}, m = {units // 2}"
    torch.manual_seed(0)
    states = torch.randn(steps, batch, units, device=device, requires_grad=True)
    angle = torch.rand(units // 2, device=device, requires_grad=True)
    x, g = torch.randn(steps, batch, units // 2, device=device), torch.randn(steps, batch, units, device=device)
    first = torch.randn(1, batch, units, device=device)
    rnn = sk.nn.RotationRNN(units // 2, units, device=device)
    leaves = list(rnn.parameters())

    def scan() -> Any:
        return torch.autograd.grad(rotation_scan(states, angle, 0.999)[0], [states, angle], g)  # type: ignore[arg-type]

    runs: dict[str, Run] = {
        "copy": g.clone,
        "rotation_scan": scan,
        "RotationRNN": lambda: torch.autograd.grad(rnn(x)[0], leaves, g),
        "RotationRNN, last state": lambda: torch.autograd.grad(rnn(x, last_only=True)[1], leaves, first),
        "OrthogonalRNN": _layer(sk.nn.OrthogonalRNN(units // 2, units, device=device), x, g),
        "torch.nn.LSTM": _layer(torch.nn.LSTM(units // 2, units, device=device), x, g),
    }
    found = race(runs, clock_of(device), **rules)
    for name, timing in found.items():
        beside: dict[str, float | None] = {
            "copies": timing.median / found["copy"].median,
            "states": peak_bytes(runs[name], device) / (4 * g.numel()),
        }
        yield Figure("linear", table, name, "s", timing.median, timing.spread, len(timing.samples), beside)


def _layer(layer: torch.nn.Module, x: Tensor, g: Tensor) -> Run:
    leaves = list(layer.parameters())
    return lambda: torch.autograd.grad(layer(x)[0], leaves, g)


def _of_convolutions(scale: Scale, device: str) -> Cells:
    place, size = torch.device(device), scale.image
    runs, words = {}, f"{convolutions.CHANNELS} channels, {size} x {size}"
    for name in convolutions.CONTENDERS:
        try:
            runs[name] = convolutions.forward_backward(name, size, device)
        except NotImplementedError as error:
            yield LeftOut(f"{name}, {words}", str(error))
    for name, timing in race(runs, clock_of(place), **scale.race).items():
        beside: dict[str, float | None] = {"MiB": peak_bytes(runs[name], place) / 2**20}
        table = f"convolutions, {words}, 32 images"
        yield Figure("linear", table, name, "s", timing.median, timing.spread, len(timing.samples), beside)
    for name in runs:
        if name != convolutions.UNIT:
            error = convolutions.distance(name, size, device)
            table = f"singular values from one / eps, {words}"
            words_of = "" if error < 16 else f"{error:.3g} eps"
            yield Figure("linear", table, name, "eps", error, holds=error < 16, words=words_of)
