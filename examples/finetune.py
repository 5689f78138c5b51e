"""Fine-tunes a trained net by rotations of its frozen layers: blocks (OFT), reflectors (HRA), beside all weights.

    python examples/finetune.py

A small net learns the handwritten digits that ship with scikit-learn, and then the same digits lying on their side. For
each way to fine-tune it prints how many numbers are trained, the accuracy before and after, the orthogonality of the
rotations in rounding limits, how far the frozen weights are from what they were after `merge` and `unmerge`, and the
largest difference of outputs between the net with adapters and the plain one that `fold` leaves.
"""

import argparse
import copy
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stiefelkit as sk

WAYS: dict[str, dict[str, Any] | None] = {
    "all weights": None,
    "blocks of 32": {"block_size": 32},
    "8 reflectors": {"parametrization": "householder", "reflections": 8},
}


def digits() -> tuple[Tensor, Tensor]:
    found: Any = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(found.images, dtype=torch.float32)[order] / 16, torch.tensor(found.target)[order]


def train(net: nn.Module, x: Tensor, y: Tensor, steps: int, lr: float) -> None:
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


@torch.no_grad()
def accuracy(net: nn.Module, x: Tensor, y: Tensor) -> float:
    return (net(x).argmax(-1) == y).float().mean().item()


def restored(net: nn.Module) -> float:
    """How far frozen weights are from what they were after a merge and its end: nothing, to the last bit."""
    held = sk.nn.adapters(net).values()
    before = [adapter.layer.weight.clone() for adapter in held]
    for adapter in held:
        adapter.merge()
        adapter.unmerge()
    return max((torch.dist(a.layer.weight, w).item() for a, w in zip(held, before, strict=True)), default=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    images, y = digits()
    upright, lying = images.flatten(1), images.mT.flatten(1)
    learned, unseen = slice(1200), slice(1200, None)

    trained = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    train(trained, upright[learned], y[learned], steps, 3e-3)
    print(f"upright digits: accuracy {accuracy(trained, upright[unseen], y[unseen]):.3f}; lying ones:")
    print(f"{'':14} {'trained':>8} {'before':>7} {'after':>7} {'limits':>7} {'restored':>9} {'folded':>9}")
    for way, options in WAYS.items():
        net = copy.deepcopy(trained)
        if options is not None:
            net.requires_grad_(False)
            sk.nn.adapt(net, ["0.weight", "2.weight"], **options)
        numbers = sum(p.numel() for p in net.parameters() if p.requires_grad)
        before = accuracy(net, lying[unseen], y[unseen])
        train(net, lying[learned], y[learned], steps, 1e-2)
        after = accuracy(net, lying[unseen], y[unseen])
        limits = max((drift.error / drift.limit for drift in sk.drift(net).values()), default=0.0)
        away, outputs = restored(net), net(lying)
        folded = 0.0 if options is None else (sk.nn.fold(net)(lying) - outputs).abs().max().item()
        print(f"{way:14} {numbers:8} {before:7.3f} {after:7.3f} {limits:7.2f} {away:9.1g} {folded:9.1g}")


if __name__ == "__main__":
    main()
