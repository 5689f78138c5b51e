"""One step of a large rotation by `SGDG` and `CayleyAdam`, beside the step that rotation quantizers carry copies of.

    python -m benchmarks.rotation_step --n 1024
    python -m benchmarks.rotation_step --n 4096 --seconds 0.1 --steps 1

That step by its published formula (Li, Fuxin, Todorovic 2020, algorithm 1): with the skew A of the gradient, A W its
tangent part, and a = min(lr, 1 / ||A||_1), the solution Y of Y = W - a A (W + Y) / 2 by five iterations from
Y = W - a A W; before each step vectors are brought to unit length, and before one in 101, drawn at random, W is
replaced by the Q of its QR decomposition.

Times are medians of process CPU time in float32, on one thread, versions interleaved in one process, on one and the
same gradient; the unit is a product of two n x n matrices. The QR decomposition is timed by itself. Errors are
||W^H W - I||_F in float64, over the rounding limit: the worst after the first step, and over all of them, while each
learns to flatten activations with outlier channels (the 8-norm of a row over its 2-norm), at the rate 1.5 of SpinQuant,
CayleyAdam at 0.01.
"""

import argparse
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.measuring.races.clock import race
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing import seeds

ITERATIONS = 5
QR_EVERY = 101
TOKENS = 256


class FixedPoint(torch.optim.Optimizer):
    """The published step: a fixed number of iterations, whatever the error."""

    def __init__(self, params: list[Tensor], lr: float, qr_every: int = QR_EVERY):
        super().__init__(params, {"lr": lr})
        self.qr_every, self.chance = qr_every, random.Random(0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for w in group["params"]:
                x, g = w.mT / w.norm(dim=-1), w.grad.mT  # the published code has frames in rows
                if self.qr_every and self.chance.randrange(self.qr_every) == 0:
                    x = orthonormal(x)
                along = g @ x.mT
                along = along - x @ (x.mT @ along) / 2
                skew = along - along.mT
                a = min(group["lr"], 1 / (torch.linalg.matrix_norm(skew, ord=1).item() + 1e-8))
                y = x - a * skew @ x
                for _ in range(ITERATIONS):
                    y = x - a / 2 * skew @ (x + y)
                w.copy_(y.mT)


def orthonormal(w: Tensor) -> Tensor:
    """Returns the Q of a QR decomposition whose R has a positive diagonal."""
    q, r = torch.linalg.qr(w)
    return q * r.diagonal().sign()


MAKERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "fixed point": lambda params: FixedPoint(params, 1.5),
    "fixed point, no QR": lambda params: FixedPoint(params, 1.5, 0),
    "SGDG": lambda params: sk.optim.SGDG(params, lr=1.5, stiefel=True),
    "CayleyAdam": lambda params: sk.optim.CayleyAdam(sk.optim.frames(params), lr=0.01),
}
"""Name to what makes an optimizer of rotations."""


def activations(n: int) -> Tensor:
    """Draws rows of n features, a few of them 30 times as large as the others."""
    h = torch.randn(TOKENS, n, generator=seeds.generator(1))
    h[:, :: max(1, n // 4)] *= 30
    return h


def flatness(w: Tensor, h: Tensor) -> Tensor:
    """Returns the sum over rows of the 8-norm over the 2-norm."""
    y = h @ w
    return (y.norm(p=8, dim=-1) / y.norm(dim=-1)).sum()


def error(w: Tensor) -> float:
    """Returns the orthogonality error in rounding limits."""
    return (orthogonality_error(w.detach()) / rounding_limit(len(w), torch.float32)).item()


def times(w: Tensor, h: Tensor, seconds: float) -> None:
    """Prints what a step takes, and a QR decomposition."""
    runs: dict[str, Callable[[], Any]] = {}
    for name, make in MAKERS.items():
        if name != "fixed point":  # its median is that without QR
            rotation = nn.Parameter(w.clone())
            flatness(rotation, h).backward()
            runs[name] = make([rotation]).step
    unit = "product"
    found = race({unit: lambda: w @ w, **runs, "QR decomposition": lambda: orthonormal(w)}, seconds=seconds)
    for name, timing in found.items():
        print(
            f"{name:20} {1e3 * timing.median:10.4g} ms {timing.median / found[unit].median:8.3g} products", flush=True
        )


def errors(w: Tensor, h: Tensor, steps: int) -> None:
    """Prints how far from orthogonal each gets, and where its loss ends."""
    print(f"{'':20} loss {flatness(w, h).item() / len(h):.3f} at first")
    for name, make in MAKERS.items():
        rotation, found = nn.Parameter(w.clone()), []
        optimizer = make([rotation])
        for _ in range(steps):
            optimizer.zero_grad()
            flatness(rotation, h).backward()
            optimizer.step()
            found.append(error(rotation))
        end = flatness(rotation, h).item() / len(h)
        print(
            f"{name:20} after 1: {found[0]:8.3g} limits, worst of {steps}: {max(found):8.3g}, loss {end:.3f}",
            flush=True,
        )


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to time each version, about")
    parser.add_argument("--steps", type=int, default=100, help="over which errors are measured")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    w, h = sk.init.haar((asked.n, asked.n), torch.float32, seeds.generator(0)), activations(asked.n)
    print(f"n = {asked.n}, float32; a limit is {rounding_limit(asked.n, torch.float32):.2g}")
    times(w, h, asked.seconds)
    errors(w, h, asked.steps)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
