"""Procrustes, principal components and independent components, each by a frame, a loss and an optimizer; no module.

    python examples/frames.py

prints how far each of five optimizers, and `sk.optim.minimize`, end from the solution, and the orthogonality of the
frame in rounding limits.
"""

import argparse
from collections.abc import Callable
from typing import Any

import geoopt
import torch

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error, rounding_limit

geoopts: Any = geoopt  # its annotations say that momentum is an int

OPTIMIZERS = {
    "MultiplicativeCayley": lambda w: sk.optim.MultiplicativeCayley(sk.optim.frames(w), lr=0.2, momentum=0.9),
    "CayleySGD": lambda w: sk.optim.CayleySGD(sk.optim.frames(w), lr=0.2, momentum=0.9),
    "CayleyAdam": lambda w: sk.optim.CayleyAdam(sk.optim.frames(w), lr=1.0),
    "POGO": lambda w: sk.optim.POGO(sk.optim.frames(w), lr=0.2),
    "geoopt's RiemannianSGD": lambda w: geoopts.optim.RiemannianSGD([w], lr=0.2, momentum=0.9),
}
MINIMIZE = "sk.optim.minimize"
"""The losses are deterministic, so that a trust region ends at the last digit."""


def minimise(
    loss: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, int], name: str, steps: int
) -> torch.Tensor:
    w = sk.init.haar(shape, generator=torch.Generator().manual_seed(1))
    if name == MINIMIZE:
        return sk.optim.minimize(loss, w).point
    w = geoopts.ManifoldParameter(w, sk.manifolds.Stiefel()) if name.startswith("geoopt") else torch.nn.Parameter(w)
    optimizer = OPTIMIZERS[name](w)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(w).backward()
        optimizer.step()
        schedule.step()
    return w.detach()


def procrustes(name: str, steps: int) -> tuple[torch.Tensor, float]:
    """The frame W that takes A to B, min ||A W - B||."""
    a, truth = torch.randn(30, 6).double() / 30**0.5, sk.init.haar((6, 4))
    w = minimise(lambda w: (a @ w - a @ truth).square().sum(), (6, 4), name, steps)
    return w, torch.dist(w, truth).item()


def principal_components(name: str, steps: int) -> tuple[torch.Tensor, float]:
    """The span of the leading eigenvectors of a covariance, max tr W^T C W."""
    x = torch.randn(1000, 20).double() * torch.linspace(0, 1, 20) ** 2
    c = torch.cov(x.mT)
    w = minimise(lambda w: -torch.trace(w.mT @ c @ w), (20, 3), name, steps)
    leading = torch.linalg.eigh(c).eigenvectors[:, -3:]
    return w, torch.dist(w @ w.mT, leading @ leading.mT).item()


def independent_components(name: str, steps: int) -> tuple[torch.Tensor, float]:
    """The rotation of whitened mixtures whose coordinates are independent: of flat sources, with the least kurtosis."""
    sources = torch.rand(5000, 3).double() - 0.5
    mixed = sources @ torch.randn(3, 3).double()
    white = mixed @ torch.linalg.inv(torch.linalg.cholesky(torch.cov(mixed.mT))).mT
    w = minimise(lambda w: (white @ w).pow(4).mean(0).sum(), (3, 3), name, steps)
    match = torch.corrcoef(torch.cat([white @ w, sources], 1).mT)[:3, 3:].abs().max(0).values
    return w, (1 - match.min()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    print(f"{'problem':24} {'optimizer':24} {'error':>9} {'drift / limit':>14}")
    for problem in (procrustes, principal_components, independent_components):
        for name in (*OPTIMIZERS, MINIMIZE):
            torch.manual_seed(0)
            w, error = problem(name, steps)
            drift = orthogonality_error(w).item() / rounding_limit(w.shape[-1], w.dtype)
            print(f"{problem.__name__.replace('_', ' '):24} {name:24} {error:9.1e} {drift:14.1f}")


if __name__ == "__main__":
    main()
