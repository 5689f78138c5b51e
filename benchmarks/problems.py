"""Deterministic problems on frames, solved here and by pymanopt from the same starts.

    python -m benchmarks.problems
    python -m benchmarks.problems --problems pca --sizes 500x10 --tolerance 1e-8 --rounds 5

prints for each problem and method how far its value is from the least that any method found, relative to it, the length
of the Riemannian gradient (in the Euclidean metric) and the orthogonality of the end, iterations, and process CPU time.
Methods take turns, and the median of the rounds counts. pymanopt gets the same loss, differentiated by torch as well;
where it is not installed (`pip install pymanopt`), its rows are left out.
"""

import argparse
import importlib
import importlib.util
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import stiefelkit as sk
from stiefelkit.functional import tangent_part
from stiefelkit.metrics import orthogonality_error, rounding_limit

Loss = Callable[[Tensor], Tensor]
Posed = tuple[Loss, Tensor]
"""A loss, and where to start."""


def pca(n: int, p: int) -> Posed:
    """The leading components of a covariance whose variances fall by a tenth from each to the next."""
    basis = sk.init.haar((n, n))
    c = basis * 0.9 ** torch.arange(n) @ basis.mT
    return lambda w: -(w * (c @ w)).sum(), sk.init.haar((n, p))


def procrustes(n: int, p: int) -> Posed:
    """The frame that takes A nearest to B, from 2 n rows with noise."""
    a = torch.randn(2 * n, n, dtype=torch.float64) / (2 * n) ** 0.5
    b = a @ sk.init.haar((n, p)) + 0.1 * torch.randn(2 * n, p, dtype=torch.float64)
    return lambda w: (a @ w - b).square().sum(), sk.init.haar((n, p))


def ica(n: int, p: int) -> Posed:
    """p flat sources among n that were mixed by a rotation, by the contrast log cosh.

    There are many stationary points; the start is near enough to the solution for all methods to find that.
    """
    sources = torch.randn(100 * n + 1000, n, dtype=torch.float64)
    sources[:, :p] = (torch.rand(len(sources), p, dtype=torch.float64) - 0.5) * 12**0.5
    mixing = sk.init.haar((n, n))
    x = sources @ mixing.mT
    start = mixing[:, :p] + 0.1 * torch.randn(n, p, dtype=torch.float64) / n**0.5
    return lambda w: -torch.logaddexp(x @ w, -(x @ w)).mean(0).sum(), sk.functional.nearest_frame(start)


def joint_diagonalisation(n: int, p: int) -> Posed:
    """The frame in which eight noisy matrices of common eigenvectors have the largest diagonals."""
    basis = sk.init.haar((n, n))
    spectra = torch.rand(8, 1, n, dtype=torch.float64)
    noise = torch.randn(8, n, n, dtype=torch.float64) * 0.01 / n**0.5
    c = (basis * spectra) @ basis.mT + noise + noise.mT
    return lambda w: -(w * (c @ w)).sum(-2).square().sum(), sk.init.haar((n, p))


PROBLEMS = {"pca": pca, "procrustes": procrustes, "ica": ica, "joint_diagonalisation": joint_diagonalisation}
SIZES = {
    "pca": ("50x3", "500x10"),
    "procrustes": ("20x20", "500x10"),
    "ica": ("10x10", "100x4"),
    "joint_diagonalisation": ("20x20", "500x5"),
}
MOST = 3000
"""Iterations at most."""


@dataclass(frozen=True)
class Solved:
    """Where a method ended, and what that took."""

    point: Tensor
    iterations: int
    seconds: float


def ours(method: str) -> Callable[[Loss, Tensor, float], Solved]:
    """A method of this package, as a function of the loss, the start and the length of the gradient at the end."""

    def solve(loss: Loss, start: Tensor, tolerance: float) -> Solved:
        began = time.process_time()
        result = sk.optim.minimize(
            loss, start, method, manifold="stiefel:euclidean", max_iter=MOST, tolerance_grad=tolerance
        )
        return Solved(result.point, result.iterations, time.process_time() - began)

    return solve


def pymanopts(name: str) -> Callable[[Loss, Tensor, float], Solved]:
    """An optimizer of pymanopt, as such a function."""
    pymanopt: Any = importlib.import_module("pymanopt")

    def solve(loss: Loss, start: Tensor, tolerance: float) -> Solved:
        manifold = pymanopt.manifolds.Stiefel(*start.shape)
        cost = pymanopt.function.pytorch(manifold)(lambda w: loss(w))
        optimizer: Any = getattr(pymanopt.optimizers, name)(
            min_gradient_norm=tolerance, max_iterations=MOST, verbosity=0
        )
        began = time.process_time()
        result = optimizer.run(pymanopt.Problem(manifold, cost), initial_point=start.numpy().copy())
        return Solved(torch.from_numpy(result.point), result.iterations, time.process_time() - began)

    return solve


def methods() -> dict[str, Callable[[Loss, Tensor, float], Solved]]:
    """Name to solver; those of pymanopt only where it is installed."""
    here = {name: ours(name) for name in sk.optim.minimizers.names()}
    if importlib.util.find_spec("pymanopt") is None:
        return here
    return {
        **here,
        "pymanopt TrustRegions": pymanopts("TrustRegions"),
        "pymanopt ConjugateGradient": pymanopts("ConjugateGradient"),
    }


def race(name: str, size: str, tolerance: float, rounds: int) -> None:
    """Solves one problem by all methods in turns, and prints a line for each."""
    torch.manual_seed(0)
    n, p = (int(number) for number in size.split("x"))
    (loss, start), entered = PROBLEMS[name](n, p), methods()
    solved: dict[str, list[Solved]] = {method: [] for method in entered}
    for turn in range(rounds):
        for method, solve in entered.items():
            if turn == 0:
                solve(loss, start, 1e9)  # whatever is done once only
            solved[method].append(solve(loss, start, tolerance))
    ends = {method: runs[-1] for method, runs in solved.items()}
    values = {method: loss(end.point).item() for method, end in ends.items()}
    least = min(values.values())
    print(f"\n{name} {size}, least value {least:.15g}")
    print(f"{'':28} {'value off':>9} {'gradient':>9} {'drift / limit':>13} {'iterations':>10} {'CPU s':>8}")
    for method, end in ends.items():
        w = end.point.clone().requires_grad_()
        (g,) = torch.autograd.grad(loss(w), w)
        print(
            f"{method:28} {(values[method] - least) / abs(least):9.1e} {tangent_part(end.point, g).norm().item():9.1e} "
            f"{orthogonality_error(end.point).item() / rounding_limit(p, torch.float64):13.1f} {end.iterations:10} "
            f"{statistics.median(run.seconds for run in solved[method]):8.3f}",
            flush=True,
        )


def main() -> None:
    """Reads the command line, and races."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--sizes", nargs="+", help="n x p, as 500x10; two for each problem by default")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="length of the gradient at which a method ends")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if importlib.util.find_spec("pymanopt") is None:
        print("pymanopt is not installed, so its rows are left out; pip install pymanopt adds them.")
    for name in arguments.problems:
        for size in arguments.sizes or SIZES[name]:
            race(name, size, arguments.tolerance, arguments.rounds)


if __name__ == "__main__":
    main()
