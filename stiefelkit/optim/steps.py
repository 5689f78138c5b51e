"""How far a frame goes."""

from typing import Any

import torch
from torch import Tensor

from stiefelkit.errors import OptionError
from stiefelkit.functional import Tangent
from stiefelkit.optim.bucket import Bucket

__all__ = ["TINY", "bounded_steps", "check_bound", "check_moments", "second_moments"]

TINY = 1e-30
"""What keeps a quotient of two zeros from being NaN."""


def check_bound(name: str, group: dict[str, Any]) -> None:
    """Raises OptionError unless the bound of the step and the tolerance are positive."""
    if not group["q"] > 0:
        raise OptionError(f"{name} needs q > 0, got {group['q']!r}.")
    if group["tolerance"] is not None and not 0 < group["tolerance"] < 1:
        raise OptionError(f"{name} needs a tolerance between 0 and 1, or None, got {group['tolerance']!r}.")


def check_moments(name: str, group: dict[str, Any]) -> None:
    """Raises OptionError unless the decays of two moments and what is added to the second are in range."""
    if len(group["betas"]) != 2 or not all(0 <= b < 1 for b in group["betas"]):
        raise OptionError(f"{name} needs two betas in [0, 1), got {group['betas']!r}.")
    if not group["eps"] >= 0:
        raise OptionError(f"{name} needs eps >= 0, got {group['eps']!r}.")


def second_moments(bucket: Bucket, norms: list[float], decay: float) -> tuple[list[int], list[float]]:
    """Counts the step and updates v <- decay v + (1 - decay) ||G||^2; returns both for each matrix of the batch."""
    counts: list[int] = []
    squares: list[float] = []
    for p, state in zip(bucket.params, bucket.states, strict=True):
        if "exp_avg_sq" not in state:
            state["step"], state["exp_avg_sq"] = 0, torch.zeros(p.shape[:-2], dtype=p.real.dtype, device=p.device)
        moment = state["exp_avg_sq"]
        own = norms[len(squares) : len(squares) + moment.numel()]
        new = [decay * v + (1 - decay) * x * x for v, x in zip(moment.reshape(-1).tolist(), own, strict=True)]
        moment.copy_(torch.tensor(new, dtype=moment.dtype).view(moment.shape))
        state["step"] += 1
        squares += new
        counts += [state["step"]] * len(new)
    return counts, squares


def bounded_steps(
    w: Tensor, direction: Tangent, scales: list[float], group: dict[str, Any]
) -> tuple[float | Tensor, float]:
    """min(lr, 2 q / ||A||_F) along each direction times its scale, A its generator, and the longest increment.

    Args:
        w: the frames.
        direction: tangent vectors at them.
        scales: factor of each direction.
        group: the settings "lr" and "q".

    Returns:
        The factors of the unscaled directions, a number or a tensor (*, 1, 1), and the Frobenius norm of the longest.
    """
    lr, q = float(group["lr"]), group["q"]
    generators = [s * norm for s, norm in zip(scales, direction.generator_norms(), strict=True)]
    steps = [s * (min(lr, 2 * q / a) if a > 0 else lr) for s, a in zip(scales, generators, strict=True)]
    length = max(step * norm for step, norm in zip(steps, direction.norms("euclidean"), strict=True))
    if len(set(steps)) == 1:
        return steps[0], length
    return torch.tensor(steps, dtype=w.real.dtype, device=w.device)[:, None, None], length
