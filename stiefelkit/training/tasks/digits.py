"""Handwritten digits, read pixel by pixel."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.numbers import integer, validate_fields_
from stiefelkit.training import data
from stiefelkit.training.recipes import recipes_of
from stiefelkit.training.tasks.task import Task, cross_entropy

if TYPE_CHECKING:
    from torch import Tensor

TEST_SIZE = 360
ALL_TRAIN = 1797 - TEST_SIZE
PERMUTATION_SEED = 92916


class DigitTask(Task):
    """Names a digit out of ten from pixels that are read one by one."""

    input_size: ClassVar[int] = 1
    output_size: ClassVar[int] = 10
    last_only: ClassVar[bool] = True
    headline: ClassVar[str] = "accuracy"
    loss_label: ClassVar[str] = "cross-entropy (nats)"

    @abstractmethod
    def _images(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Returns images and labels to train on, of a validation part if there is one, and of the test, in memory."""

    def _read(self, images: Tensor) -> Tensor:
        return images

    def _moved(self, images: Tensor, step: int, seed: int) -> Tensor:
        """Returns the images of a batch as they are trained on."""
        return images

    def batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns a slice of the epoch's own shuffle, which is drawn from (seed, epoch)."""
        order = self.visited(step, batch_size, seed, data.device())
        images, labels = self._images()["train"]
        return self._read(self._moved(images[order], step, seed)), labels[order]

    def held_out(self) -> tuple[Tensor, Tensor]:
        images, labels = self._images()["test"]
        return self._read(images), labels

    @property
    def baseline(self) -> dict[str, float]:
        """Uniform guesses."""
        return {"loss": math.log(10), "accuracy": 1 / 10}

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y)


@dataclass(frozen=True)
class Digits(DigitTask):
    """Names a handwritten digit from its 8 x 8 pixels, read one after the other in 64 steps.

    The 1797 images are real and ship with scikit-learn (Alpaydin and Kaynak 1998): nothing is downloaded. A fixed
    stratified split holds 360 of them out. The small cousin of pixel-by-pixel MNIST (Le et al. 2015).

    Args:
        permuted: read the pixels in one fixed random order, which hides the local structure.
        train_size: number of the 1437 training images to use.
    """

    permuted: bool = False
    train_size: int = ALL_TRAIN

    name: ClassVar[str] = "digits"
    recipes = recipes_of("digits")

    def __post_init__(self) -> None:
        validate_fields_(self, "Digits", train_size=integer(1, ALL_TRAIN))

    def _images(self) -> dict[str, tuple[Tensor, Tensor]]:
        return images(self.permuted, data.device())


@functools.cache
def images(permuted: bool, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns pixels between 0 and 1, (N, 64, 1), and labels of both parts, on a device."""
    import numpy as np
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    levels, target = load_digits(return_X_y=True)
    pixels, labels = np.asarray(levels, np.float32) / 16, np.asarray(target, np.int64)
    if permuted:
        pixels = pixels[:, np.random.RandomState(PERMUTATION_SEED).permutation(64)]
    train, test = train_test_split(np.arange(len(labels)), test_size=TEST_SIZE, stratify=labels, random_state=0)
    x, y = torch.from_numpy(pixels).unsqueeze(-1), torch.from_numpy(labels)
    return {name: (x[part].to(device), y[part].to(device)) for name, part in (("train", train), ("test", test))}
