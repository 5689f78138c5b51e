"""How far a frame goes."""

import math

import torch
from torch import Tensor

from stiefelkit.functional import Tangent
from stiefelkit.optim.bucket import Bucket

__all__ = ["as_factor", "bounded_steps", "inverse", "second_moments"]


def second_moments(bucket: Bucket, norms: list[float], decay: float) -> list[tuple[int, float]]:
    """Counts the step and updates v <- decay v + (1 - decay) ||G||^2; returns both for each matrix of the batch.

    Raises:
        OverflowError: a moment is not finite in the dtype of the frame; nothing is written.
    """
    counts: list[int] = []
    squares: list[float] = []
    for p, state in zip(bucket.params, bucket.states, strict=True):
        moment = state.get("exp_avg_sq")
        old = [0.0] * math.prod(p.shape[:-2]) if moment is None else moment.reshape(-1).tolist()
        own = norms[len(squares) : len(squares) + len(old)]
        squares += [decay * v + (1 - decay) * x * x for v, x in zip(old, own, strict=True)]
        counts += [state.get("step", 0) + 1] * len(old)
    if not max(squares) < torch.finfo(bucket.params[0].dtype).max:
        raise OverflowError
    written = 0
    for p, state in zip(bucket.params, bucket.states, strict=True):
        count = math.prod(p.shape[:-2])
        new = torch.tensor(squares[written : written + count], dtype=p.real.dtype, device=p.device)
        state["step"], state["exp_avg_sq"] = state.get("step", 0) + 1, new.view(p.shape[:-2])
        written += count
    return list(zip(counts, squares, strict=True))


def inverse(x: float) -> float:
    """1 / x, and 0 where nothing has been measured yet."""
    return 1 / x if x > 0 else 0.0


def bounded_steps(direction: Tangent, scales: list[float], lr: float, q: float) -> list[float]:
    """min(lr, 2 q / ||A||_F) along each direction times its scale, A its generator: factors of the unscaled directions.

    Where the norm of a direction is too small to be told from zero, nothing moves.
    """
    generators = [s * norm for s, norm in zip(scales, direction.generator_norms(), strict=True)]
    return [s * min(lr, 2 * q / a) if a > 0 else 0.0 for s, a in zip(scales, generators, strict=True)]


def as_factor(steps: list[float], like: Tensor) -> float | Tensor:
    """One number if all are the same, else a tensor (*, 1, 1)."""
    if len(set(steps)) == 1:
        return steps[0]
    return torch.tensor(steps, dtype=like.real.dtype, device=like.device)[:, None, None]
