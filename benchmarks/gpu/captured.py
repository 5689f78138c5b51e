"""Whole training steps as one graph: that it does what the step does, and how long either takes."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import stiefelkit as sk
from benchmarks.gpu.parts import Cells, LeftOut
from benchmarks.gpu.scale import Scale
from stiefelkit.measuring.moved_frames import own_optimizers
from stiefelkit.measuring.races.clock import WARM_UPS, clock_of, race, replayed
from stiefelkit.measuring.report.record import Figure

__all__ = ["TOLERANCE", "of_training_steps"]

TOLERANCE = 1e-5
"""What parameters may be off, of their length, after the same steps by a graph: sums may be in another order."""
STEPS = 5


def of_training_steps(scale: Scale, device: str) -> Cells:
    """A small net with two orthogonal weights by every optimizer of frames, and maps by torch's."""
    n = scale.sizes[0][0]
    own = {name: cls for name, cls in own_optimizers().items() if not scale.optimizers or name in scale.optimizers}
    movers = [(f"{name}, frames", "stiefel", cls) for name, cls in own.items()]
    maps = [(f"{name}, Adam", name, torch.optim.Adam) for name in scale.maps or ("cayley", "householder", "matrix_exp")]
    for name, parametrization, cls in [*movers, *maps]:
        try:
            yield from _of_one(name, parametrization, cls, n, scale, torch.device(device))
        except (RuntimeError, TypeError) as error:
            yield Figure("capture", "law", name, "law", None, holds=False, words=str(error).partition("\n")[0])
        except sk.errors.StiefelkitError as error:
            yield LeftOut(name, str(error))


def _of_one(
    name: str,
    parametrization: str,
    cls: Callable[..., torch.optim.Optimizer],
    n: int,
    scale: Scale,
    device: torch.device,
) -> Cells:
    nets = [_net(n, parametrization, device)]
    nets.append(copy.deepcopy(nets[0]))
    x, y = (torch.randn(32, n, generator=torch.Generator().manual_seed(1)).to(device) for _ in range(2))
    plain, graphed = (_step(net, cls, x, y) for net in nets)
    graphed = replayed(graphed, device) if device.type == "cuda" else graphed
    for _ in range(WARM_UPS if device.type == "cuda" else 0):  # as many as the capture has made
        plain()
    for _ in range(STEPS):
        plain()
        graphed()
    off = max(_off(a, b) for a, b in zip(*(net.parameters() for net in nets), strict=True))
    words = "" if off <= TOLERANCE else f"a parameter is off by {off:.3g} of its length"
    yield Figure("capture", "a replay makes the same step", name, "law", off, holds=not words, words=words)
    timings = race({"step by step": plain, "replayed": graphed}, clock_of(device), **scale.race)
    for how, timing in timings.items():
        beside: dict[str, float | None] = {"step by step / this": timings["step by step"].median / timing.median}
        table = f"one training step, n = {n}"
        yield Figure("capture", table, f"{name}, {how}", "s", timing.median, timing.spread, len(timing.samples), beside)


def _net(n: int, parametrization: str, device: torch.device) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n), nn.Tanh(), nn.Linear(n, n))
        for layer in (net[0], net[2]):
            sk.orthogonal(layer, "weight", parametrization, init="haar")
    return net.to(device)


def _step(net: nn.Module, cls: Callable[..., Any], x: Tensor, y: Tensor) -> Callable[[], None]:
    is_cuda = x.is_cuda
    groups = sk.optim.parameter_groups(net, lr=1e-3)
    # On a CPU torch's own optimizers refuse it.
    optimizer = cls(groups, lr=1e-3, **({"capturable": True} if is_cuda else {}))

    def step() -> None:
        optimizer.zero_grad(set_to_none=not is_cuda)
        F.mse_loss(net(x), y).backward()
        optimizer.step()

    return step


def _off(a: Tensor, b: Tensor) -> float:
    return (torch.dist(a, b) / torch.linalg.vector_norm(a).clamp_min(1e-30)).item()
