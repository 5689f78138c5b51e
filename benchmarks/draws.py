"""How far optimizers leave frames, over random draws of shape, field, gradient, length of step and optimizer.

    python -m benchmarks.draws --count 2000
    python -m benchmarks.draws --only 1234

prints the worst draws of each precision beside what is promised, and ends with 1 if a promise is broken.
"""

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit import init
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.optim.steps import PROMISED

OPTIMIZERS = (
    sk.optim.MultiplicativeCayley,
    sk.optim.CayleySGD,
    sk.optim.CayleyAdam,
    sk.optim.POGO,
    sk.optim.Landing,
    sk.optim.ManifoldMuon,
    sk.optim.SGDG,
    sk.optim.SPEL,
    sk.optim.StiefelAdam,
    sk.optim.StiefelSGD,
)
KINDS = ("random", "fixed", "rank 1", "outlier", "rank 1, fixed", "rotation", "constant")
LARGEST = 600
SHORTEST, LONGEST = 1e-4, 2.0
"""Lengths of steps over sqrt(p)."""


@dataclass(frozen=True)
class Draw:
    """One run of an optimizer on one frame.

    Attributes:
        seed: repeats it.
        n: rows.
        p: columns.
        dtype: of the frame.
        kind: of the gradients.
        length: of the first step over sqrt(p), in the Euclidean norm.
        steps: how many.
        optimizer: its class.
        settings: of the optimizer.
        metric: of the manifold.
    """

    seed: int
    n: int
    p: int
    dtype: torch.dtype
    kind: str
    length: float
    steps: int
    optimizer: type[torch.optim.Optimizer]
    settings: dict[str, object]
    metric: str

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        return (
            f"seed {self.seed}: {self.n} x {self.p} {str(self.dtype).removeprefix('torch.')}, {self.kind}, "
            f"{self.steps} steps of {self.length:.2g} sqrt(p), {self.optimizer.__name__}({settings}), {self.metric}"
        )


def draw(seed: int) -> Draw:
    rng = random.Random(seed)
    n = round(math.exp(rng.uniform(0, math.log(LARGEST))))
    p = n if rng.random() < 0.4 else max(1, round(n ** rng.random()))
    optimizer = rng.choice(OPTIMIZERS)
    settings: dict[str, object] = {"precision": rng.choice(("exact", "fast"))}
    if optimizer is sk.optim.MultiplicativeCayley:
        settings |= {"precondition": rng.choice((None, "rmsprop")), "momentum": rng.choice((0.0, 0.9))}
    elif optimizer is sk.optim.POGO:
        settings |= {"base": rng.choice(("sgd", "adam"))}
    elif optimizer in (sk.optim.CayleySGD, sk.optim.CayleyAdam, sk.optim.SGDG):
        settings |= {"q": rng.choice((0.5, math.inf))}
    length = math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST)))
    steps = rng.choice((1, 2, 3, 5, 10, 20, 40)) if n < 200 else rng.choice((1, 2, 3, 5, 10))
    dtype = rng.choice((torch.float32, torch.float32, torch.complex64, torch.float64, torch.complex128))
    return Draw(
        seed, n, p, dtype, rng.choice(KINDS), length, steps, optimizer, settings, rng.choice(("canonical", "euclidean"))
    )


def gradients(d: Draw, generator: torch.Generator) -> Iterator[Tensor]:
    """Gradients of one size, of the kind that is asked for."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=d.dtype, generator=generator)

    fixed = normal(d.n, d.p)
    if "rank 1" in d.kind:
        fixed = normal(d.n, 1) @ normal(1, d.p)
    elif d.kind == "constant":
        fixed = torch.ones_like(fixed) + 0.01 * fixed
    while True:
        if d.kind == "random":
            yield normal(d.n, d.p)
        elif d.kind == "rank 1":
            yield normal(d.n, 1) @ normal(1, d.p)
        elif d.kind == "outlier":
            g = 0.03 * normal(d.n, d.p)
            i, j = (int(torch.randint(size, (1,), generator=generator)) for size in (d.n, d.p))
            g[i, j] = math.sqrt(d.p)
            yield g
        else:
            yield fixed


def rotating(w: Tensor, a: Tensor) -> Tensor:
    """A gradient that turns W by the same angle in every plane, again and again."""
    return a[: w.shape[-2], : w.shape[-2]] @ w


def worst(d: Draw) -> float:
    """The largest ||W^H W - I||_F over the steps, in rounding limits; below p = 16 less one eps."""
    generator = torch.Generator().manual_seed(d.seed)
    exact = init.haar((d.n, d.p), working_dtype(d.dtype), generator)
    w = nn.Parameter(exact.to(d.dtype))
    pairs = torch.arange(0, d.n - 1, 2)
    a = torch.zeros(d.n, d.n, dtype=d.dtype)
    a[pairs, pairs + 1], a[pairs + 1, pairs] = 1, -1
    source = gradients(d, generator)
    found, optimizer = 0.0, None
    limit, eps = rounding_limit(d.p, d.dtype), torch.finfo(d.dtype).eps
    for _ in range(d.steps):
        g = rotating(w.detach(), a) if d.kind == "rotation" else next(source)
        if optimizer is None:
            s = exact.mH @ g.to(exact.dtype)
            size = torch.linalg.vector_norm(g.to(exact.dtype) - exact @ (s + s.mH) / 2).item()
            if size == 0:
                return 0.0
            lr = d.length * math.sqrt(d.p) / size
            if d.optimizer is sk.optim.CayleyAdam or d.settings.get("base") == "adam":
                lr = d.length * math.sqrt(d.p)
            if d.optimizer in (sk.optim.ManifoldMuon, sk.optim.SPEL):
                lr = d.length
            if d.optimizer is sk.optim.StiefelAdam:
                lr = d.length / math.sqrt(d.n)
            if d.settings.get("precondition"):
                lr = d.length / math.sqrt(d.n) * 0.3
            group = {"params": [w], "manifold": f"stiefel:{d.metric}"}
            optimizer = d.optimizer([group], lr=lr, **d.settings)  # type: ignore[call-arg]
        w.grad = g.clone()
        optimizer.step()
        error = orthogonality_error(w).item()
        found = max(found, (error - (eps if d.p < 16 else 0)) / limit)
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
    found = [(worst(d), d) for d in map(draw, seeds)]
    broken = 0
    for precision in ("exact", "fast"):
        for double in (False, True):
            those = [
                (excess, d)
                for excess, d in found
                if d.settings["precision"] == precision and (d.dtype in (torch.float64, torch.complex128)) == double
            ]
            if not those:
                continue
            promised = PROMISED["float64" if double else precision]
            over = sum(not excess <= promised for excess, _ in those)
            broken += over
            print(
                f"{precision}, {'float64, complex128' if double else 'float32, complex64'}: {len(those)} draws, ",
                end="",
            )
            print(f"{over} above the {promised:g} limits that are promised; the worst:")
            for excess, d in sorted(those, key=lambda row: -row[0])[: asked.rows]:
                print(f"  {excess:8.3g}  {d}")
    return int(broken > 0)


if __name__ == "__main__":
    raise SystemExit(main())
