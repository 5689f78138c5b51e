"""The base class of tasks: stateless batches, a held-out set, a loss, a baseline, and recipes.

A task's options are part of the help of the command line, which does not wait for torch: the files of tasks import it
where they need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from stiefelkit.errors import DataError, OptionError, needs
from stiefelkit.training import data
from stiefelkit.training.recipes import Recipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

TRAIN, TEST = 0, 1  # streams of what is drawn
CHUNK = 2**18  # steps of all sequences of a chunk together, at most, in an evaluation


def generator(*key: int) -> torch.Generator:
    """Returns a CPU generator whose stream is a function of the integers alone, each >= 0 and of 64 bits at most.

    Up to four of them give streams of their own, but that zeros at their end count for nothing.

    >>> import torch
    >>> a, b = (torch.rand(3, generator=generator(5, 1, 0)) for _ in range(2))
    >>> torch.equal(a, b)
    True
    """
    import numpy as np
    import torch

    # NumPy puts the words of 32 bits one after the other: 2^32, 0 would be what 0, 1 is.
    low, high = [number % 2**32 for number in key], [number >> 32 for number in key]
    (seed,) = np.random.SeedSequence(low, spawn_key=high if any(high) else ()).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seed) >> 1)


@functools.lru_cache(maxsize=2)
def shuffle(size: int, seed: int, epoch: int, device: str = "cpu") -> Tensor:
    """Returns the order in which an epoch visits a training set, a function of the arguments alone, on a device.

    >>> shuffle(5, 0, 0).sort().values.tolist()
    [0, 1, 2, 3, 4]
    """
    import torch

    return torch.randperm(size, generator=generator(seed, epoch), device="cpu").to(device)


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Context in which a model evaluates, without gradients, and its device."""
    import torch

    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        with torch.no_grad():
            yield next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    finally:
        for part in training:  # some parts may have been frozen
            part.training = True


def cross_entropy(output: Tensor, y: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the cross-entropy of classes, mean over batch and steps, a share of targets spread over all classes."""
    from torch.nn import functional as F

    return F.cross_entropy(output.flatten(0, -2), y.flatten(), label_smoothing=smoothing)


class Task(ABC):
    """A supervised problem on sequences.

    A task is a frozen dataclass of its options, among them `train_size`. Laws, held by tests/training/test_tasks.py:

    * `batch` is a function of its arguments, the options and nothing else, so that a run can stop and resume
      anywhere;
    * one epoch, `train_size // batch_size` batches, never repeats an example, and held-out examples are never
      drawn from the training set;
    * `evaluate` returns the keys of `baseline`, and a model that knows nothing cannot beat the baseline.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    """The registry name."""
    input_size: ClassVar[int]
    output_size: ClassVar[int]
    last_only: ClassVar[bool]
    """True when only the last step's output is scored."""
    headline: ClassVar[str]
    """The key of `baseline` by which models are compared: "accuracy" or "loss"."""
    loss_label: ClassVar[str]
    """The loss in words and its unit, for axes."""
    recipes: ClassVar[Mapping[str, Recipe]]
    """Model name to default training settings."""
    train_size: int
    """Number of training sequences, an option of every task; None, where it may be: all that the data hold."""

    @property
    @abstractmethod
    def baseline(self) -> dict[str, float]:
        """The best that a model without memory can do, by the keys of `evaluate`."""

    @abstractmethod
    def batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns the batch of one step: x of shape (B, T, input_size), and y."""

    @abstractmethod
    def held_out(self) -> tuple[Tensor, Tensor]:
        """Returns the whole test set, the same for every seed."""

    def validation(self) -> tuple[Tensor, Tensor] | None:
        """Returns what models are chosen by, neither trained on nor held out; None where nothing is set apart."""
        return None

    @abstractmethod
    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the mean loss over the batch (and over the steps unless `last_only`)."""

    def accuracy(self, output: Tensor, y: Tensor) -> Tensor | float | None:
        """Returns the share of targets, below 0 none, that are the likeliest class; None if it is none of `scores`."""
        if "accuracy" not in self.scores:
            return None
        is_target = y >= 0
        return (output.argmax(-1) == y)[is_target].double().mean()

    @property
    def scores(self) -> Collection[str]:
        """The keys of `baseline`, which a member whose baseline is that of its data knows without them."""
        return self.baseline

    @property
    def known_baseline(self) -> dict[str, float]:
        """The baseline, or nothing where it is that of data which are not at hand: for tables and figures."""
        try:
            return self.baseline
        except DataError:
            return {}

    @property
    def sequences(self) -> int:
        """Number of training sequences, which a member overrides that asks its data for it."""
        return self.train_size

    def data_digest(self) -> str | None:
        """Returns what the user's files are known by, so that a run does not go on with others; None without files."""
        return None

    def batches_per_epoch(self, batch_size: int) -> int:
        """Returns how many whole batches the training set holds; raises OptionError if there is none."""
        words = f"a batch size between 1 and its {self.sequences} training sequences"
        needs(1 <= batch_size <= self.sequences, OptionError, f"Task {self.name!r}", words, batch_size)
        return self.sequences // batch_size

    def evaluate(
        self, model: nn.Module, chunk: int | None = None, examples: tuple[Tensor, Tensor] | None = None
    ) -> dict[str, float]:
        """Returns the scores of a model on the held-out set: those that `totals` sums up.

        Args:
            model: maps (B, T, input_size) to (B, T, output_size); put into evaluation mode for the time of the call.
            chunk: sequences per forward pass, which bounds the memory; by their length if left out.
            examples: other ones than the held-out set.
        """
        x, y = self.held_out() if examples is None else examples
        chunk = chunk or max(1, min(500, CHUNK // x.shape[1]))
        sums, counts = defaultdict[str, float](float), defaultdict[str, float](float)
        with evaluating(model) as device:
            for xs, ys in zip(x.split(chunk), y.split(chunk), strict=True):
                xs, ys = self.trimmed(xs.to(device), ys.to(device))
                for key, (total, count) in self.totals(self.answer(model, xs), ys).items():
                    sums[key] += total
                    counts[key] += count
        return {key: total / counts[key] for key, total in sums.items()}

    def trimmed(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns some examples without the steps at the end that are padding in all of them."""
        return x, y

    def totals(self, output: Tensor, y: Tensor) -> dict[str, tuple[float, float]]:
        """Returns what a part of the held-out set adds to each score: a sum, and the number that it is divided by.

        Sequences count alike here; where some are longer, a task divides by what it averages over.
        """
        scores = {"loss": self.loss(output, y), "accuracy": self.accuracy(output, y)}
        return {key: (float(score) * len(y), len(y)) for key, score in scores.items() if score is not None}

    def answer(self, model: nn.Module, x: Tensor) -> Tensor:
        """Returns the outputs that the loss scores: (B, output_size) if `last_only`, else (B, T, output_size)."""
        return model(x, last_only=True) if self.last_only else model(x)

    def visited(self, step: int, batch_size: int, seed: int, device: str = "cpu") -> Tensor:
        """Returns which training examples a batch has, by the epoch's own shuffle, drawn from (seed, epoch)."""
        epoch, k = divmod(step, self.batches_per_epoch(batch_size))
        return shuffle(self.sequences, seed, epoch, device)[k * batch_size : (k + 1) * batch_size]

    def recipe(self, model: str) -> Recipe:
        """Returns the default settings for a model: its own recipe, or the general one for a model without."""
        return self.recipes.get(model, Recipe())


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of some length each, of which a model reads all but the last `ahead` steps and predicts all but the first.

    Batches are padded behind the end of a piece, x and y with a `filling` each.
    """

    pieces: list[Tensor]
    filling: tuple[float, float]
    ahead: int = 1

    def __len__(self) -> int:
        return len(self.pieces)

    def read(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        from torch.nn.utils.rnn import pad_sequence

        chosen, (of_x, of_y) = [self.pieces[i] for i in rows.tolist()], self.filling
        x = pad_sequence([piece[: -self.ahead] for piece in chosen], batch_first=True, padding_value=of_x)
        return x, pad_sequence([piece[self.ahead :] for piece in chosen], batch_first=True, padding_value=of_y)

    def all(self) -> tuple[Tensor, Tensor]:
        """Returns x and y of all pieces, in order."""
        import torch

        return self.read(torch.arange(len(self), device="cpu"))


class Parted(Task):
    """A task on the user's data, cut into sequences of three parts: "train", "valid" and "test"."""

    train_size: int | None

    @abstractmethod
    def _split(self, name: str) -> Pieces:
        """Returns the sequences of a part."""

    @property
    def sequences(self) -> int:
        return len(self._split("train")) if self.train_size is None else self.train_size

    def batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        train = self._split("train")
        words = f"train_size <= {len(train)}, the sequences that there are"
        needs(self.sequences <= len(train), OptionError, type(self).__name__, words, self.sequences)
        return train.read(self.visited(step, batch_size, seed))

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self._split("test").all()

    def validation(self) -> tuple[Tensor, Tensor]:
        return self._split("valid").all()


class Drawn(Task):
    """A task that draws numbers, the same ones for every device, and makes sequences of them on the device."""

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
        epoch = self.batches_per_epoch(batch_size)
        drawn = self.draw(batch_size, generator(seed, TRAIN, step if self.fresh else step % epoch))
        return self.made(*(part.to(data.device()) for part in drawn))

    def held_out(self) -> tuple[Tensor, Tensor]:
        return self.made(*_test_set(self, data.device()))


@functools.lru_cache(maxsize=1)
def _test_set(task: Drawn, device: str) -> tuple[Tensor, ...]:
    return tuple(part.to(device) for part in task.draw(task.test_size, generator(0, TEST)))
