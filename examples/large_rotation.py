"""Learns a large rotation that spreads the outlier channels of activations, as quantisation of language models wants.

    python examples/large_rotation.py --n 4096 --steps 100
    python examples/large_rotation.py --n 4096 --dtype bfloat16 --optimizer SGDG

prints the objective, the orthogonality of the rotation in rounding limits, the time of an optimizer step, in seconds
and in products of two n x n matrices, and a digest of the rotation, the same in every run on one machine. The
activations are drawn: most channels of size 1, one in 64 of size 20. The objective is the mean fourth power of the
rotated activations over the square of their mean square, 3 for normal ones. In a bfloat16 model the rotation is float32
all the same, and rounded where the layer reads it.
"""

import argparse
import hashlib
import statistics
import time

import torch
from torch import nn

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error, rounding_limit


def activations(n: int, tokens: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(0)
    sizes = torch.ones(n)
    sizes[::64] = 20.0
    return torch.randn(tokens, n, generator=source) * sizes


def kurtosis(x: torch.Tensor) -> torch.Tensor:
    return x.pow(4).mean() / x.square().mean().square()


def product_seconds(n: int) -> float:
    a, b = torch.randn(2, n, n)
    taken = []
    for _ in range(3):
        start = time.process_time()
        a @ b
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1.5)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--optimizer", choices=["CayleySGD", "SGDG"], default="CayleySGD")
    parser.add_argument("--precision", choices=["exact", "fast"], default="exact")
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)

    dtype = getattr(torch, chosen.dtype)
    x = activations(chosen.n, chosen.tokens).to(dtype)
    layer = sk.orthogonal(nn.Linear(chosen.n, chosen.n, bias=False, dtype=dtype), "weight", "stiefel", init="identity")
    groups, rotation = sk.optim.parameter_groups(layer, lr=chosen.lr), sk.coordinates(layer, "weight")["stiefel"]
    optimizer = getattr(sk.optim, chosen.optimizer)(groups, lr=chosen.lr, precision=chosen.precision)
    limit, worst, seconds = rounding_limit(chosen.n, torch.float32), 0.0, []
    shown = max(1, chosen.steps // 10)
    for step in range(1, chosen.steps + 1):
        optimizer.zero_grad()
        loss = kurtosis(layer(x).float())
        loss.backward()
        start = time.process_time()
        optimizer.step()
        seconds.append(time.process_time() - start)
        if step % shown == 0 or step == chosen.steps:
            error = orthogonality_error(rotation).item() / limit
            worst = max(worst, error)
            print(f"step {step:4d}  kurtosis {loss.item():8.3f}  orthogonality {error:.2f} limits", flush=True)
    product = product_seconds(chosen.n)
    mean = statistics.mean(seconds)
    print(f"{mean:.4g} s per step, {mean / product:.2f} products of {product:.4g} s; at worst {worst:.2f} limits")
    print(f"rotation {hashlib.sha256(rotation.detach().numpy().tobytes()).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
