"""Learns the rotation under which a net with outlier channels survives 4 bits, folds it into the weights, exports.

    python examples/quantize.py
    python examples/quantize.py --out rotated.pt2

A residual net learns the handwritten digits that ship with scikit-learn, on a stream in which one channel in 16 is 20
times as large as the others, as in language models. Then all weights (by row) and all that linear layers read (by
example) are rounded to 4 bits: as the net stands, under a random rotation of the stream, and under one that `SGDG`
learns from the rounded net's loss (SpinQuant's R1). For each it prints the relative error of the outputs, that of what
the first layer on the stream gives, and the accuracy; then the orthogonality of the rotation in rounding limits, and
how far the outputs of the net in which it is folded, exported, are from those of the net as it was, both unrounded.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import stiefelkit as sk

Rounding = Callable[[Tensor], Tensor]


def to_bits(t: Tensor, bits: int = 4) -> Tensor:
    """Rounds to a few bits, symmetric, one scale for each row; gradients pass straight through."""
    most = 2 ** (bits - 1) - 1
    scale = t.detach().abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
    return t + (scale * (t.detach() / scale).round() - t.detach())


def as_it_is(t: Tensor) -> Tensor:
    return t


class Residual(nn.Module):
    """A residual stream h that layers read through a norm without weight, which commutes with rotations of h."""

    def __init__(self, n: int):
        super().__init__()
        self.embed, self.head = nn.Linear(64, n), nn.Linear(n, 10)
        self.up = nn.ModuleList(nn.Linear(n, 2 * n) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * n, n) for _ in range(2))
        with torch.no_grad():
            self.embed.weight[::16] *= 20  # the outliers

    def forward(self, x: Tensor, rounding: Rounding = as_it_is, r: Tensor | None = None) -> Tensor:
        return self.head_of(self.stream(x, rounding, r)[-1], rounding, r)

    def stream(self, x: Tensor, rounding: Rounding, r: Tensor | None) -> list[Tensor]:
        """The stream R h after the embedding and after each block."""
        streams = [written(self.embed, x, rounding, r)]
        for up, down in zip(self.up, self.down, strict=True):
            inner = torch.relu(read(up, streams[-1], rounding, r))
            streams.append(streams[-1] + written(down, inner, rounding, r))
        return streams

    def head_of(self, h: Tensor, rounding: Rounding, r: Tensor | None) -> Tensor:
        return read(self.head, h, rounding, r)


def written(layer: Any, x: Tensor, rounding: Rounding, r: Tensor | None) -> Tensor:
    """R (W x + b), with R in the weight."""
    w, b = (layer.weight, layer.bias) if r is None else (r @ layer.weight, r @ layer.bias)
    return F.linear(rounding(x), rounding(w), b)


def read(layer: Any, h: Tensor, rounding: Rounding, r: Tensor | None) -> Tensor:
    """W R^T of the normed stream R h."""
    w = layer.weight if r is None else layer.weight @ r.mT
    return F.linear(rounding(F.rms_norm(h, h.shape[-1:])), rounding(w), layer.bias)


def learn_net(net: Residual, x: Tensor, y: Tensor, steps: int) -> None:
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
    net.requires_grad_(False)


def learn_rotation(net: Residual, r: Tensor, x: Tensor, steps: int, lr: float) -> tuple[Tensor, float]:
    """The rotation, and the orthogonality of the worst on the way, in rounding limits."""
    rotation, expected, worst = nn.Parameter(r.clone()), net(x).softmax(-1), 0.0
    optimizer = sk.optim.SGDG([rotation], lr=lr, stiefel=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x, to_bits, rotation), expected).backward()
        optimizer.step()
        schedule.step()
        worst = max(worst, orthogonality(rotation))
    return rotation.detach(), worst


def orthogonality(r: Tensor) -> float:
    return (sk.metrics.orthogonality_error(r) / sk.metrics.rounding_limit(len(r), r.dtype)).item()


def apart(a: Tensor, b: Tensor) -> float:
    return (torch.dist(a, b) / b.norm()).item()


@torch.no_grad()
def show(name: str, net: Residual, x: Tensor, y: Tensor, rounding: Rounding, r: Tensor | None) -> None:
    outputs, expected = net(x, rounding, r), net(x)
    first, exact = (net.up[0], net.stream(x, as_it_is, r)[0]), net.stream(x, as_it_is, None)[0]
    of_layer = apart(read(*first, rounding, r), read(net.up[0], exact, as_it_is, None))
    accuracy = (outputs.argmax(-1) == y).float().mean().item()
    print(f"{name:26} {apart(outputs, expected):8.4f} {of_layer:8.4f} {accuracy:9.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1.5)
    parser.add_argument("--out", help="where the exported program goes")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data: Any = load_digits()
    order = torch.randperm(len(data.target))
    x, y = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    known, unseen = x[:1200], x[1200:]

    net = Residual(chosen.n)
    learn_net(net, known, y[:1200], chosen.steps)
    drawn = sk.init.haar((chosen.n, chosen.n)).float()
    learned, worst = learn_rotation(net, drawn, known, chosen.steps, chosen.lr)
    print(f"{'':26} {'outputs':>8} {'layer':>8} {'accuracy':>9}")
    for name, rounding, r in (
        ("not rounded", as_it_is, None),
        ("4 bits", to_bits, None),
        ("4 bits, random rotation", to_bits, drawn),
        ("4 bits, learned rotation", to_bits, learned),
    ):
        show(name, net, unseen, y[1200:], rounding, r)

    before = net(unseen)
    sites = sk.nn.RotationSites(net, {}, [net.embed, *net.down], readers=[*net.up, net.head], inputs={"x": unseen})
    sk.nn.rotate_(learned, sites=sites)
    exported: Any = torch.export.export(net, (unseen,))
    if chosen.out:
        torch.export.save(exported, chosen.out)
    away = (exported.module()(unseen) - before).abs().max().item()
    print(f"orthogonality at worst {worst:.2f} limits; folded and exported, outputs are {away:.1g} away")


if __name__ == "__main__":
    main()
