"""MNIST, read pixel by pixel: in order, or in one fixed random order."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.numbers import integer, validate_fields_
from stiefelkit.training import data
from stiefelkit.training.data import File
from stiefelkit.training.recipes import recipes_of
from stiefelkit.training.tasks.digits import DigitTask
from stiefelkit.training.tasks.task import generator

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SIDE = 28
PIXELS = SIDE * SIDE
IMAGES_FROM, LABELS_FROM = 16, 8  # bytes of the head of an IDX file, whose digest says that it is the right one
SHIFTS = 2  # the stream of what images are moved by
VALIDATION = 5_000  # the first images of the training files, as TensorFlow splits them off
ALL_TRAIN = 55_000
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")


def _file(name: str, sha256: str) -> File:
    return File(name, sha256, tuple(f"{mirror}/{name}.gz" for mirror in MIRRORS), (name.replace("-idx", ".idx"),))


FILES = (
    _file("train-images-idx3-ubyte", "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    _file("train-labels-idx1-ubyte", "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    _file("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    _file("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
)
"""Images and labels to train on, then those to test on."""


@dataclass(frozen=True)
class Mnist(DigitTask):
    """Names a handwritten digit from its 28 x 28 pixels, read one after the other in 784 steps.

    Pixels lie between 0 and 1 and come row by row. The split is TensorFlow's, and the papers': the first 5,000 images
    of the training files are for validation, the other 55,000 are trained on in an order drawn for each epoch, and the
    10,000 of the test files are held out. The four IDX files, gzipped or not, are looked for in the folder of data, in
    mnist/ and in torchvision's MNIST/raw/ there, then fetched; they are known by their digests.

    Reference: LeCun, Cortes, Burges 1998, in the form of Le, Jaitly, Hinton 2015.

    Args:
        train_size: number of the 55,000 training images to use, the first ones.
        shifts: pixels by which a training image is moved at most along each axis, drawn anew at every step.
    """

    train_size: int = ALL_TRAIN
    shifts: int = 0

    name: ClassVar[str] = "mnist"
    test_size: ClassVar[int] = 10_000
    recipes = recipes_of("mnist")

    def __post_init__(self) -> None:
        validate_fields_(self, type(self).__name__, train_size=integer(1, ALL_TRAIN), shifts=integer(0, SIDE))

    def _moved(self, images: Tensor, step: int, seed: int) -> Tensor:
        return _shifted(images, self.shifts, generator(seed, step, SHIFTS)) if self.shifts else images

    def validation(self) -> tuple[Tensor, Tensor]:
        images, labels = self._images()["valid"]
        return self._read(images), labels

    def _images(self) -> dict[str, tuple[Tensor, Tensor]]:
        return images(data.place(), data.device())

    def _read(self, images: Tensor) -> Tensor:
        return (images.float() / 255).unsqueeze(-1)


@dataclass(frozen=True)
class PermutedMnist(Mnist):
    """Names a handwritten digit from its 28 x 28 pixels, read in one fixed random order, which hides what is near.

    As `mnist`, but pixel k of a sequence is pixel permutation[k] of the image, with the permutation of
    `numpy.random.RandomState(permutation_seed).permutation(784)`. The seed 92916 is that of the papers of full_urnn,
    scornn, scurnn and exprnn; others have permutations of their own.

    Args:
        permutation_seed: of the order of the pixels.
    """

    permutation_seed: int = 92916

    name: ClassVar[str] = "pmnist"
    recipes = recipes_of("pmnist")

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_fields_(self, "PermutedMnist", permutation_seed=integer(0, 2**32 - 1))

    def _read(self, images: Tensor) -> Tensor:
        return super()._read(images[:, _permutation(self.permutation_seed, images.device)])


def _shifted(images: Tensor, most: int, drawn_by: torch.Generator) -> Tensor:
    """Returns images (B, 784), each moved by up to `most` pixels along either axis; zeros come in at the edges."""
    import torch
    from torch.nn import functional as F

    padded = F.pad(images.view(-1, SIDE, SIDE), (most,) * 4)
    first = torch.randint(0, 2 * most + 1, (2, len(images), 1), generator=drawn_by, device="cpu")
    rows, columns = (first + torch.arange(SIDE, device="cpu")).to(images.device)
    which = torch.arange(len(images), device=images.device)
    return padded[which[:, None, None], rows[:, :, None], columns[:, None, :]].flatten(1)


@functools.cache
def _permutation(seed: int, device: torch.device) -> Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.random.RandomState(seed).permutation(PIXELS)).to(device)


@functools.cache
def images(place: Path | None, device: str) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns images (N, 784) as bytes and their labels, of each part, on a device."""
    import torch

    contents = [bytearray(data.content(file, "mnist")) for file in FILES]
    x, y, test_x, test_y = (torch.frombuffer(content, dtype=torch.uint8) for content in contents)
    x, test_x = (pixels[IMAGES_FROM:].view(-1, PIXELS).to(device) for pixels in (x, test_x))
    y, test_y = (labels[LABELS_FROM:].long().to(device) for labels in (y, test_y))
    train, valid = slice(VALIDATION, None), slice(VALIDATION)
    return {"train": (x[train], y[train]), "valid": (x[valid], y[valid]), "test": (test_x, test_y)}
