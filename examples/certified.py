"""A 1-Lipschitz ConvNet with l2 certificates, by layers of stiefelkit and, where it is installed, of orthogonium.

    python examples/certified.py --data DIR

trains on MNIST (in DIR/mnist; without --data, on scikit-learn's digits) and prints for each kind of layer the accuracy
on held-out images, the part of them that is certified within 36/255, 72/255 and 108/255, the product of the layers'
largest singular values, CPU time of a step, and what a step keeps for its backward pass.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.training import data
from stiefelkit.training.tasks.mnist import FILES

RADII = (36 / 255, 72 / 255, 108 / 255)


class Oplu(nn.Module):
    """Sorts pairs of channels, which keeps norms."""

    def forward(self, x: Tensor) -> Tensor:
        return sk.functional.oplu(x.movedim(1, -1)).movedim(-1, 1)


def net(conv: Callable[..., nn.Module], linear: Callable[..., nn.Module], side: int) -> nn.Sequential:
    """Three convolutions of circular images and a linear layer; pixels become channels first, an isometry."""
    return nn.Sequential(
        nn.PixelUnshuffle(2),
        conv(4, 16, 3),
        Oplu(),
        conv(16, 32, 4 if side % 4 == 0 else 3, stride=2),
        Oplu(),
        conv(32, 32, 3),
        Oplu(),
        nn.Flatten(),
        linear(32 * (side // 4) ** 2, 10),
    )


def kinds() -> dict[str, Callable[[int], nn.Sequential]]:
    """Returns what makes the net of each kind of layer that is installed."""
    ours, frame = sk.nn.OrthogonalConv2d, sk.nn.OrthogonalLinear

    def by_frequency(rows: int, columns: int, kernel: int, stride: int = 1) -> nn.Module:
        layer = sk.nn.CayleyConv2d(rows * stride**2, columns, kernel)
        return layer if stride == 1 else nn.Sequential(nn.PixelUnshuffle(stride), layer)

    found = {"OrthogonalConv2d": partial(net, ours, frame), "CayleyConv2d": partial(net, by_frequency, frame)}
    if find_spec("orthogonium") is not None:
        from orthogonium.layers import AdaptiveOrthoConv2d, OrthoLinear

        def theirs(rows: int, columns: int, kernel: int, stride: int = 1) -> nn.Module:
            return AdaptiveOrthoConv2d(rows, columns, kernel, stride, (kernel - 1) // 2, padding_mode="circular")

        found["orthogonium's"] = partial(net, theirs, OrthoLinear)
    return found


def images(folder: Path | None) -> tuple[Tensor, Tensor, int]:
    """Returns images, labels, and how many come first to train on."""
    if folder is None:
        digits: Any = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        x = torch.tensor(digits.images, dtype=torch.float32)[order, None] / 16
        return x, torch.tensor(digits.target)[order], 1400
    with data.named(folder):
        x, y, *held_out = (np.frombuffer(data.content(file, "mnist"), np.uint8) for file in FILES)
    pixels = np.concatenate([x[16:], held_out[0][16:]]).reshape(-1, 1, 28, 28)
    labels = np.concatenate([y[8:], held_out[1][8:]])
    return torch.tensor(pixels).float() / 255, torch.tensor(labels).long(), 60_000


def train(model: nn.Sequential, x: Tensor, y: Tensor, epochs: int, margin: float) -> float:
    """Trains for a margin between classes and returns the CPU seconds of a step."""
    order = torch.Generator().manual_seed(0)
    steps = epochs * (len(x) // 200)
    opt = torch.optim.Adam(sk.optim.parameter_groups(model, lr=3e-3))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    start = time.process_time()
    for _ in range(epochs):
        for index in torch.randperm(len(x), generator=order).split(200)[: len(x) // 200]:
            opt.zero_grad()
            F.multi_margin_loss(model(x[index]), y[index], margin=margin).backward()
            opt.step()
            schedule.step()
    return (time.process_time() - start) / steps


@torch.no_grad()
def certified(model: nn.Sequential, x: Tensor, y: Tensor) -> list[float]:
    """Returns the accuracy, and within each radius the accuracy that no perturbation can lower."""
    out = torch.cat([model(part) for part in x.split(1000)])
    best = out.topk(2).values
    radius = torch.where(out.argmax(-1) == y, (best[:, 0] - best[:, 1]) / 2**0.5, -1.0)
    return [(radius > r).float().mean().item() for r in (-0.5, *RADII)]


def bound(model: nn.Sequential, x: Tensor) -> float:
    """Returns the product of the largest singular values of all layers, each measured as an operator."""
    product = 1.0
    for layer in model:
        if not isinstance(layer, Oplu):
            product *= sk.metrics.lipschitz(layer, x.shape[1:], exact=True).largest
        x = layer(x)
    return product


def kept(model: nn.Sequential, x: Tensor) -> float:
    """Returns the MiB that a step keeps for its backward pass, weights included."""
    storages: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        _ = model(x)
    return sum(storages.values()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains and certifies 1-Lipschitz ConvNets.")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--margin", type=float, default=1.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    x, y, count = images(options.data)
    print(f"{'layers':18}{'clean':>8}{'36/255':>8}{'72/255':>8}{'108/255':>8}  norm - 1   ms a step  MiB")
    for name, make in kinds().items():
        torch.manual_seed(0)
        model = make(x.shape[-1])
        seconds = train(model, x[:count], y[:count], options.epochs, options.margin)
        model.eval()
        shares = "".join(f"{share:8.3f}" for share in certified(model, x[count:], y[count:]))
        excess = bound(model, x[:1]) - 1
        print(f"{name:18}{shares}{excess:10.1e}{1e3 * seconds:12.1f}{kept(model.train(), x[:200]):6.1f}", flush=True)


if __name__ == "__main__":
    main()
