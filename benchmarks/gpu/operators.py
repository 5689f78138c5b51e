"""Linear recurrences in parallel over time and orthogonal convolutions: errors, times beside others, memory."""

import torch

from benchmarks import convolutions, linear_recurrences
from benchmarks.gpu.parts import Cells
from benchmarks.gpu.scale import Scale
from stiefelkit.measuring.races.clock import Run, clock_of, peak_bytes, race
from stiefelkit.measuring.report.record import Figure

__all__ = ["of_rotations_and_convolutions"]

EPS = {"scan": 32.0, "FFT": None}
"""What states may be off, in eps of the largest; a convolution by FFT is measured and promises nothing."""
OF_NORMS = 32.0
"""The same for singular values that should be 1."""


def of_rotations_and_convolutions(scale: Scale, device: str) -> Cells:
    """Errors first: they are over in a second."""
    for steps in scale.lengths:
        for decay in (0.999, 1.0):
            for how, error in linear_recurrences.errors(steps, decay, device).items():
                yield _law(f"states after {steps} steps, g = {decay}, float32", how, error, EPS[how])
    for channels in scale.channels:
        for kind in convolutions.KINDS:
            error = convolutions.norm_error(kind, channels, device)
            yield _law(f"singular values, {channels} channels, float32", kind, error, OF_NORMS)
    for steps, batch in scale.lengths.items():
        table = f"linear recurrence, T = {steps}, B = {batch}, {linear_recurrences.UNITS} units"
        yield from _times(table, linear_recurrences.runs(steps, batch, device), "RotationRNN", scale, device)
    for channels in scale.channels:
        yield from _times(
            f"3 x 3, {channels} channels", convolutions.runs(channels, device), convolutions.PLAIN, scale, device
        )


def _law(table: str, name: str, error: float, bound: float | None) -> Figure:
    if bound is None:
        return Figure("operators", table, name, "eps", error)
    words = "" if error <= bound else f"{error:.3g} eps, more than {bound:g}"
    return Figure("operators", table, name, "law", error, holds=not words, words=words)


def _times(table: str, runs: dict[str, Run], yardstick: str, scale: Scale, device: str) -> Cells:
    place = torch.device(device)
    for run in runs.values():
        run()
    times = race(runs, clock_of(place), **scale.race)
    for name, timing in times.items():
        beside: dict[str, float | None] = {
            f"/ {yardstick}": timing.median / times[yardstick].median,
            "bytes": float(peak_bytes(runs[name], place)),
        }
        yield Figure("operators", table, name, "s", timing.median, timing.spread, len(timing.samples), beside)
