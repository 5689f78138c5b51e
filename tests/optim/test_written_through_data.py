"""Optimizers of frames go on from what averages write through `.data`, which torch does not count."""

from typing import Any

import pytest
import torch
from optimizers_at_hand import OPTIMIZERS, every_optimizer
from torch import nn

from stiefelkit import init
from stiefelkit.metrics import orthogonality_error, rounding_limit, working_dtype
from stiefelkit.testing import seeds


def excess(w: torch.Tensor) -> float:
    """||W^H W - I||_F in limits, less the scatter of one eps."""
    p, dtype = w.shape[-1], w.dtype
    return (orthogonality_error(w).max().item() - torch.finfo(dtype).eps) / rounding_limit(p, dtype)


def step(optimizer: Any, ws: list[nn.Parameter], seed: int) -> None:
    for k, w in enumerate(ws):
        w.grad = torch.randn(w.shape, dtype=w.dtype, generator=seeds.generator(7 * seed + k))
        w.grad /= w.grad.norm()
    optimizer.step()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(6, 6), (40, 20)], ids=str)
@every_optimizer
def test_ten_steps_after_a_mean_that_was_written_through_data_end_at_a_frame(
    name: str, shape: tuple[int, int], dtype: torch.dtype, count: int
) -> None:
    exact = [init.haar(shape, working_dtype(dtype), seeds.generator(k)) for k in range(count)]
    ws = [nn.Parameter(w.to(dtype).contiguous()) for w in exact]
    optimizer = OPTIMIZERS[name]([{"params": ws, "manifold": "stiefel:canonical"}], lr=0.1)
    step(optimizer, ws, 0)
    before = [w.detach().clone() for w in ws]
    step(optimizer, ws, 1)
    for w, old in zip(ws, before, strict=True):
        w.data.lerp_(old, 0.5)
    assert all(excess(w) > 100 for w in ws)
    for seed in range(2, 12):
        step(optimizer, ws, seed)
    assert all(excess(w) <= (20 if dtype == torch.float64 else 2) for w in ws)
