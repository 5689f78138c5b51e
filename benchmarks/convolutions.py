"""Orthogonal convolutions beside torch's: time, forward and backward, and how far singular values are from 1."""

import torch
from torch import nn

import stiefelkit as sk
from benchmarks.suite import PLACES, Suite, of_race, patience
from stiefelkit.measuring.races.clock import Run, clock_of, race
from stiefelkit.metrics import lipschitz

__all__ = ["CHANNELS", "KINDS", "PLAIN", "Norms", "Times", "norm_error", "runs"]

PLAIN = "torch.nn.Conv2d"
KINDS: dict[str, type[nn.Module]] = {"OrthogonalConv2d": sk.nn.OrthogonalConv2d, "CayleyConv2d": sk.nn.CayleyConv2d}
CHANNELS = ("16", "64")
IMAGES, SIDE = 16, 16
SECONDS = {PLAIN: 2e-8, "OrthogonalConv2d": 3e-8, "CayleyConv2d": 2e-7}
"""Predicted seconds of a call, over pixels of the batch and the square of the channels."""


def layer(kind: str, channels: int, device: str = "cpu") -> nn.Module:
    """Returns a 3 x 3 layer of as many outputs as inputs, circular."""
    if kind == PLAIN:
        return nn.Conv2d(channels, channels, 3, padding=1, padding_mode="circular", device=device)
    return KINDS[kind](channels, channels, 3, device=device)


def runs(channels: int, device: str = "cpu") -> dict[str, Run]:
    """Returns forward and backward of each layer, to weights and images, the map to the weight included."""
    x, g = (torch.randn(IMAGES, channels, SIDE, SIDE, device=device) for _ in range(2))
    x.requires_grad_()
    made = {kind: layer(kind, channels, device) for kind in (PLAIN, *KINDS)}
    return {kind: lambda net=net: net(x).backward(g) for kind, net in made.items()}


def norm_error(kind: str, channels: int, device: str = "cpu") -> float:
    """Returns how far the singular values on images of SIDE x SIDE are from 1 at most, in float32's eps."""
    found = lipschitz(layer(kind, channels, device), (channels, SIDE, SIDE))
    return max(abs(found.largest - 1), abs(found.smallest - 1)) / torch.finfo(torch.float32).eps


class Times(Suite):
    """Forward and backward over that of torch's layer of the same sizes, which is not orthogonal."""

    unit = "ratio"
    axes = (tuple(KINDS), CHANNELS, tuple(PLACES))
    param_names = ("layer", "channels", "device")

    def level(self, *cell: str) -> str:
        return "quick"

    def predicted(self, named: str, *cell: str) -> float:
        scale = IMAGES * SIDE**2 * int(cell[1]) ** 2
        return of_race(named, [scale * SECONDS[kind] for kind in (PLAIN, cell[0])])

    def measure(self, *cell: str) -> float:
        kind, channels, device = cell
        racing = {name: run for name, run in runs(int(channels), device).items() if name in (PLAIN, kind)}
        for run in racing.values():
            run()
        times = race(racing, clock_of(torch.device(device)), **patience())
        return times[kind].median / times[PLAIN].median

    def track_ratio(self, *cell: str) -> float:
        return self.figure


class Norms(Suite):
    """How far singular values of the operator are from 1."""

    unit = "eps"
    axes = (tuple(KINDS), CHANNELS, tuple(PLACES))
    param_names = ("layer", "channels", "device")

    def level(self, *cell: str) -> str:
        return "smoke" if cell[1] == CHANNELS[0] else "quick"

    def measure(self, *cell: str) -> float:
        kind, channels, device = cell
        return norm_error(kind, int(channels), device)

    def track_error(self, *cell: str) -> float:
        return self.figure
