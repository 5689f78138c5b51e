"""Convolutions that are orthogonal as operators, beside torch's and, where it is installed, orthogonium's.

All take and give 16 channels of a circular image by a 3 x 3 kernel, with as many inputs as outputs.
"""

import importlib
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn

import stiefelkit as sk
from benchmarks.suite import PLACES, Suite, patience
from stiefelkit.machine import threads
from stiefelkit.measuring.clock import Run, clock_of, peak_bytes, race

CHANNELS = 16
UNIT = "torch.nn.Conv2d"


def _orthogonium() -> nn.Module:
    if find_spec("orthogonium") is None:
        raise NotImplementedError("orthogonium is not installed")
    layers = importlib.import_module("orthogonium.layers")
    return layers.AdaptiveOrthoConv2d(CHANNELS, CHANNELS, 3, 1, 1, padding_mode="circular")


CONTENDERS: dict[str, Callable[[], nn.Module]] = {
    UNIT: partial(nn.Conv2d, CHANNELS, CHANNELS, 3, padding="same", padding_mode="circular"),
    "OrthogonalConv2d": partial(sk.nn.OrthogonalConv2d, CHANNELS, CHANNELS, 3),
    "OrthogonalConvTranspose2d": partial(sk.nn.OrthogonalConvTranspose2d, CHANNELS, CHANNELS, 3),
    "CayleyConv2d": partial(sk.nn.CayleyConv2d, CHANNELS, CHANNELS, 3),
    "orthogonium": _orthogonium,
}
"""Name to what makes the layer; NotImplementedError says what it needs."""


def layer(contender: str, device: str) -> nn.Module:
    """Returns a layer with its own initial weights."""
    torch.manual_seed(0)
    return CONTENDERS[contender]().to(device)


def forward_backward(contender: str, size: int, device: str) -> Run:
    """Returns forward and backward for a batch of 32 images of size x size, from a dense gradient."""
    conv = layer(contender, device)
    x = torch.randn(32, CHANNELS, size, size, device=device, requires_grad=True)
    g = torch.randn_like(x)
    leaves = [x, *(p for p in conv.parameters() if p.requires_grad)]  # orthogonium keeps vectors of power iterations
    return lambda: torch.autograd.grad(conv(x), leaves, g)


class _Convolutions(Suite):
    """A contender at a size of images."""

    axes = (tuple(CONTENDERS), ("8", "28"), tuple(PLACES))
    param_names = ("contender", "size", "device")

    def level(self, *cell: str) -> str:
        return "quick" if cell[1] == "28" else "full"

    def figure_of(self, contender: str, size: int, device: str) -> float:
        raise NotImplementedError

    def measure(self, *cell: str) -> float:
        contender, size, device = cell
        with threads(1):
            return self.figure_of(contender, int(size), device)


class Times(_Convolutions, track="time"):
    """Forward and backward of a batch of 32, over those of torch.nn.Conv2d in the same process."""

    unit = "ratio"

    def figure_of(self, contender: str, size: int, device: str) -> float:
        runs = {name: forward_backward(name, size, device) for name in (UNIT, contender)}
        found = race(runs, clock_of(torch.device(device)), **patience())
        return found[contender].median / found[UNIT].median


class Memory(_Convolutions, track="peak"):
    """Allocations of the same, at most."""

    unit = "bytes"

    def figure_of(self, contender: str, size: int, device: str) -> float:
        run = forward_backward(contender, size, device)
        run()
        return peak_bytes(run, torch.device(device))


class Isometry(_Convolutions, track="distance"):
    """Largest distance of a singular value of the operator from one, in units of float32's eps."""

    unit = "eps"
    axes = (tuple(CONTENDERS)[1:], *_Convolutions.axes[1:])

    def figure_of(self, contender: str, size: int, device: str) -> float:
        found = sk.metrics.lipschitz(layer(contender, device).eval(), (CHANNELS, size, size), exact=True)
        return max(found.largest - 1, 1 - found.smallest) / torch.finfo(torch.float32).eps
