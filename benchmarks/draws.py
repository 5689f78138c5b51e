"""How far optimizers leave frames, over random draws of shape, field, gradient, length of step and optimizer.

    python -m benchmarks.draws --count 2000
    python -m benchmarks.draws --only 1234

prints the worst draws of each precision beside what is promised, and ends with 1 if a promise is broken.
"""

import argparse
import math
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stiefelkit import init
from stiefelkit.measuring.moved_frames import MovedFrame, own_optimizers, rate
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.optim.steps import PROMISED

KINDS = ("random", "fixed", "rank 1", "outlier", "rank 1, fixed", "rotation", "constant")
LARGEST = 600
SHORTEST, LONGEST = 1e-4, 2.0
"""The angles by which first steps turn."""
SETTINGS: dict[str, dict[str, tuple[object, ...]]] = {
    "multiplicative_cayley": {"precondition": (None, "rmsprop"), "momentum": (0.0, 0.9)},
    "pogo": {"base": ("sgd", "adam")},
    **{name: {"q": (0.5, math.inf)} for name in ("cayley_sgd", "cayley_adam", "sgdg")},
}


@dataclass(frozen=True)
class Draw:
    """One run of an optimizer on one n x p frame, in a metric; the seed repeats it, `length` is its first step's."""

    seed: int
    n: int
    p: int
    dtype: torch.dtype
    kind: str
    length: float
    steps: int
    optimizer: str
    settings: dict[str, object]
    metric: str

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return (
            f"seed {self.seed}: {self.n} x {self.p} {str(self.dtype).removeprefix('torch.')}, {self.kind}, "
            f"{self.steps} steps of {self.length:.2g}, {self.optimizer}({settings}), {self.metric}"
        )

    def make(self, frame: Tensor, lr: float) -> MovedFrame:
        """Returns a frame and the optimizer that moves it."""
        point = nn.Parameter(frame)
        cls: Any = own_optimizers()[self.optimizer]
        return MovedFrame(
            point, cls([{"params": [point], "manifold": f"stiefel:{self.metric}"}], lr=lr, **self.settings)
        )


def draw(seed: int) -> Draw:
    rng = random.Random(seed)
    n = round(math.exp(rng.uniform(0, math.log(LARGEST))))
    p = n if rng.random() < 0.4 else max(1, round(n ** rng.random()))
    optimizer = rng.choice(list(own_optimizers()))
    settings = {name: rng.choice(values) for name, values in SETTINGS.get(optimizer, {}).items()}
    settings["precision"] = rng.choice(("exact", "fast"))
    length = math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST)))
    steps = rng.choice((1, 2, 3, 5, 10, 20, 40) if n < 200 else (1, 2, 3, 5, 10))
    dtype = rng.choice((torch.float32, torch.float32, torch.complex64, torch.float64, torch.complex128))
    metric = rng.choice(("canonical", "euclidean"))
    return Draw(seed, n, p, dtype, rng.choice(KINDS), length, steps, optimizer, settings, metric)


def gradient(d: Draw, w: Tensor, number: int) -> Tensor:
    """Returns the gradient of a step, of the kind that is asked for and of one size; "rotation" turns every plane."""
    generator = torch.Generator().manual_seed(1000 * d.seed + (0 if d.kind.endswith("fixed") else number))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=d.dtype, generator=generator)

    if d.kind == "rotation":
        pairs, a = torch.arange(0, d.n - 1, 2), torch.zeros(d.n, d.n, dtype=d.dtype)
        a[pairs, pairs + 1], a[pairs + 1, pairs] = 1, -1
        return a @ w
    if d.kind.startswith("rank 1"):
        return normal(d.n, 1) @ normal(1, d.p)
    g = normal(d.n, d.p)
    if d.kind == "constant":
        return 1 + 0.01 * g
    if d.kind == "outlier":
        g *= 0.03
        g.view(-1)[int(torch.randint(g.numel(), (1,), generator=generator))] = math.sqrt(d.p)
    return g


def worst(d: Draw) -> float:
    """The largest ||W^H W - I||_F over the steps, in rounding limits; below p = 16 less one eps."""
    exact = init.haar((d.n, d.p), working_dtype(d.dtype), torch.Generator().manual_seed(d.seed))
    start = exact.to(d.dtype)
    moved = d.make(start, rate(d.make, exact, gradient(d, start, 0), d.length))
    found, limit, eps = 0.0, rounding_limit(d.p, d.dtype), torch.finfo(d.dtype).eps
    for number in range(d.steps):
        moved.step(gradient(d, moved.frame.detach(), number))
        found = max(found, (orthogonality_error(moved.frame).item() - (eps if d.p < 16 else 0)) / limit)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="how many draws")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", type=int, help="one seed alone")
    parser.add_argument("--rows", type=int, default=8, help="how many of the worst are shown")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(asked.first, asked.first + asked.count) if asked.only is None else [asked.only]
    groups: dict[str, list[tuple[float, Draw]]] = {}
    for d in map(draw, seeds):
        name = "float64" if d.dtype in (torch.float64, torch.complex128) else str(d.settings["precision"])
        groups.setdefault(name, []).append((worst(d), d))
    broken = 0
    for name, found in sorted(groups.items()):
        over = sum(not excess <= PROMISED[name] for excess, _ in found)
        broken += over
        print(f"{name}: {len(found)} draws, {over} above the {PROMISED[name]:g} limits that are promised; the worst:")
        for excess, d in sorted(found, key=lambda row: -row[0])[: asked.rows]:
            print(f"  {excess:8.3g}  {d}")
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
