"""What many weights and many frames cost over one batch of them, and what torch's own calls for that cost by hand.

    python -m benchmarks.floors

For each size the batch, the same as tensors of their own, and a batch with the calls of torch that such tensors cannot
do without take turns in one process, on one thread; ratios of medians of process CPU time are printed.
"""

import itertools
from typing import Any

import torch

from stiefelkit._torch import copy_each
from stiefelkit.functional import cayley
from stiefelkit.measuring.moved_frames import own_optimizers, start, start_apart
from stiefelkit.measuring.races.clock import Run, race
from stiefelkit.measuring.races.contenders import GROUPED, OPERATIONS, FrameProblem, our_contenders

__all__ = ["frames", "main", "weights"]


def weights(n: int, count: int = 200, **patience: Any) -> dict[str, float]:
    """Forward and backward of Cayley weights in one model, over those of one weight that is a batch."""
    problem = FrameProblem(n, n, count)
    g = problem.gradient()
    ours = our_contenders(["cayley"], ["exact"], {}, apart=True)
    runs: dict[str, Run] = {
        name: OPERATIONS["forward_backward"](ours[f"cayley (exact){end}"].enter(problem), g)
        for name, end in (("batch", ""), ("grouped", GROUPED))
    }
    skews = [c.detach().requires_grad_() for c in problem.normal(count, n * (n - 1) // 2, size=n**-0.5)]
    signs = torch.ones(n)

    def by_hand() -> None:
        w = cayley(torch.stack(skews), n, n, signs=signs)
        torch.autograd.grad(torch.stack(w.unbind()), skews, g)

    return _over_batch({**runs, "by hand": by_hand}, patience)


def frames(n: int, method: str, count: int = 1000, **patience: Any) -> dict[str, float]:
    """A step of frames that are parameters of their own, over one of a batch; by hand, over it, what copying adds."""
    problem = FrameProblem(n, n, count)
    frame, gradients = problem.exact_frame(), [problem.gradient() for _ in range(16)]
    one, another = (start(method, frame, gradients[0], 0.1, problem.dtype) for _ in range(2))
    apart = start_apart(method, frame, gradients[0], 0.1, problem.dtype)
    turns = [itertools.cycle(gradients) for _ in range(3)]
    theirs, params = ([torch.zeros(n, n) for _ in range(count)] for _ in range(2))
    gathered, rows = torch.empty(count, n, n), torch.zeros(count, n, n).unbind()

    def by_hand() -> None:
        for tensors in (theirs, params):
            torch.stack(tensors, out=gathered)
        another.step(next(turns[2]))
        copy_each(params, rows)

    runs = {
        "batch": lambda: one.step(next(turns[0])),
        "apart": lambda: apart.step(next(turns[1])),
        "by hand": by_hand,
    }
    return _over_batch(runs, patience)


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    print("forward + backward of 200 Cayley weights, over a batch of 200")
    for n in (16, 32, 64):
        print(f"  {n:3} x {n:<3} {_words(weights(n, seconds=3.0))}", flush=True)
    print("a step of 1000 frames, over a batch of 1000")
    for n in (16, 32):
        for name in own_optimizers():
            print(f"  {n:3} x {n:<3} {name:22} {_words(frames(n, f'{name}:exact'))}", flush=True)


def _over_batch(runs: dict[str, Run], patience: dict[str, Any]) -> dict[str, float]:
    seconds = {name: timing.median for name, timing in race(runs, **patience).items()}
    return {name: seconds[name] / seconds["batch"] for name in seconds if name != "batch"}


def _words(ratios: dict[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())


if __name__ == "__main__":
    main()
