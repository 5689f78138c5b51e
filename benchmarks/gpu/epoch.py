"""An epoch of scoRNN with 170 units on MNIST pixel by pixel, by the paper's recipe, where the data are at hand."""

import statistics
import time
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import stiefelkit as sk
from benchmarks.gpu.parts import Cells, LeftOut
from benchmarks.gpu.scale import Scale
from stiefelkit import models
from stiefelkit.measuring.report.record import Figure
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.training import data
from stiefelkit.training.tasks.adding import Adding
from stiefelkit.training.tasks.mnist import FILES, Mnist
from stiefelkit.training.tasks.task import Task

__all__ = ["MOST_SECONDS", "of_scornn"]

UNITS, BATCH = 170, 128
MOST_SECONDS = 15.0
"""Batches end here; the time of the whole epoch follows from those that were made."""
EVERY = 20
"""Batches between two looks at the clock."""


def of_scornn(scale: Scale, device: str) -> Cells:
    """Time and loss of an epoch, and the drift after it; a dry run reads short sequences that it draws itself."""
    if scale.epoch:
        yield from _trained(Adding(T=12, train_size=4 * BATCH), 8, scale.epoch, device)
        return
    place = data.place()
    folders = [] if place is None else [place, place / Mnist.name]
    if not any(all(_has(folder, file.name) for file in FILES) for folder in folders):
        yield LeftOut("scoRNN", f"MNIST was not found; name its folder with {data.VARIABLE}.")
        return
    yield from _trained(Mnist(), UNITS, Mnist().batches_per_epoch(BATCH), device)


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file() or (folder / f"{name}.gz").is_file()


def _trained(task: Task, units: int, batches: int, device: str) -> Cells:
    torch.manual_seed(0)
    net = models.create("scornn", task.input_size, units, task.output_size, negative=units // 10).to(device)
    optimizer = torch.optim.RMSprop(sk.optim.parameter_groups(net, lr=1e-3, skew={"lr": 1e-4}), alpha=0.9)
    losses, seconds, done, begun = [], [], 0, time.monotonic()
    with data.on(device):
        task.batch(0, BATCH, 0)  # what is read once only
        while done < batches and time.monotonic() - begun < MOST_SECONDS:
            start, steps = time.monotonic(), range(done, min(done + EVERY, batches))
            for step in steps:
                losses.append(_step(net, optimizer, task, step, device))
            done += len(steps)
            losses[-1].item()
            seconds.append((time.monotonic() - start) / len(steps))
    w = cast(Any, net).rnn.weight_hh_l0
    beside: dict[str, float | None] = {
        "batches": float(done),
        "s / epoch": statistics.median(seconds) * batches,
        "loss": torch.stack(losses[-EVERY:]).mean().item(),
        "error / limit": float(orthogonality_error(w)) / rounding_limit(units, w.dtype),
    }
    table = f"{type(task).__name__}, {units} units, batches of {BATCH}: one batch"
    yield Figure("epoch", table, "scornn", "s", statistics.median(seconds), 0.0, len(seconds), beside)


def _step(net: nn.Module, optimizer: torch.optim.Optimizer, task: Task, step: int, device: str) -> torch.Tensor:
    x, y = (t.to(device) for t in task.batch(step, BATCH, 0))
    optimizer.zero_grad()
    loss = task.loss(net(x, last_only=True), y)
    loss.backward()
    optimizer.step()
    return loss.detach()
