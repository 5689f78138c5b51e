"""Tasks whose sequences are drawn: a fixed training set in a fixed order, or new sequences at each step."""

from __future__ import annotations

import functools
from abc import abstractmethod
from typing import TYPE_CHECKING

from stiefelkit.training import data
from stiefelkit.training.tasks.task import Task, generator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Drawn"]

TRAIN, TEST = 0, 1


class Drawn(Task):
    """A task that draws numbers and makes sequences of them.

    On a device other than the CPU the numbers of the whole training set are kept there, and made into sequences there;
    on the CPU each batch is drawn when it is wanted, to the same numbers.
    """

    test_size: int
    """Number of held-out sequences, an option of the task."""
    fresh: bool
    """Whether each step has new sequences, an option of the task."""

    @abstractmethod
    def draw(self, count: int, source: torch.Generator) -> tuple[Tensor, ...]:
        """Returns all that is random in some sequences, each tensor with their number as its first size."""

    @abstractmethod
    def made(self, *drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sequences x and their targets y, on the device of what was drawn."""

    def batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns batch `step` modulo the epoch of the fixed training set, or, if fresh, one of its own."""
        epoch, device = self.batches_per_epoch(batch_size), data.device()
        k = step if self.fresh else step % epoch
        if self.fresh or device == "cpu":
            return self.made(*(part.to(device) for part in self.draw(batch_size, generator(seed, TRAIN, k))))
        return self.made(*(part[k] for part in _training_set(self, batch_size, seed, device)))

    def held_out(self) -> tuple[Tensor, Tensor]:
        """Returns the test sequences, from a stream of their own."""
        return self.made(*_test_set(self, data.device()))


@functools.lru_cache(maxsize=1)
def _training_set(task: Drawn, batch_size: int, seed: int, device: str) -> tuple[Tensor, ...]:
    """What is drawn for all batches of an epoch, (batches, batch_size, ...)."""
    import torch

    epoch = range(task.batches_per_epoch(batch_size))
    batches = [task.draw(batch_size, generator(seed, TRAIN, k)) for k in epoch]
    return tuple(torch.stack(parts).to(device) for parts in zip(*batches, strict=True))


@functools.lru_cache(maxsize=1)
def _test_set(task: Drawn, device: str) -> tuple[Tensor, ...]:
    return tuple(part.to(device) for part in task.draw(task.test_size, generator(0, TEST)))
