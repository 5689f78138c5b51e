"""The first of several bits: a task to begin with."""

from dataclasses import dataclass
from typing import ClassVar

from stiefelkit.numbers import integer, validate_fields_
from stiefelkit.training.recipes import Recipe, Settings
from stiefelkit.training.tasks import Task
from stiefelkit.training.tasks.task import generator

TRAIN, TEST = 0, 1


@dataclass(frozen=True)
class Skeleton(Task):
    """Reads T bits, and must give the first at the last step.

    Args:
        T: how many.
        train_size: training sequences.
        test_size: held-out sequences.
    """

    T: int = 30
    train_size: int = 1000
    test_size: int = 200
    name: ClassVar[str] = "skeleton"
    input_size: ClassVar[int] = 1
    output_size: ClassVar[int] = 1
    last_only: ClassVar[bool] = True
    headline: ClassVar[str] = "loss"
    loss_label: ClassVar[str] = "mean squared error"
    recipes: ClassVar[dict[str, Recipe]] = {"scornn": Recipe(Settings(hidden_size=16, batch_size=20))}

    def __post_init__(self):
        """Checks the ranges."""
        validate_fields_(self, "Skeleton", **dict.fromkeys(vars(self), integer(1)))

    @property
    def baseline(self):
        """Half of a bit."""
        return {"loss": 0.25}

    def batch(self, step, batch_size, seed):
        """A function of its arguments alone."""
        return self._bits(batch_size, generator(seed, TRAIN, step % self.batches_per_epoch(batch_size)))

    def held_out(self):
        """From a stream of its own."""
        return self._bits(self.test_size, generator(0, TEST))

    def loss(self, output, y):
        """The mean over the batch."""
        return (output.squeeze(-1) - y).square().mean()

    def accuracy(self, output, y):
        """None: there is no such thing here."""
        return None

    def _bits(self, count, source):
        import torch  # here, for help does not wait for it

        x = torch.randint(2, (count, self.T, 1), generator=source).float()
        return x, x[:, 0, 0]
