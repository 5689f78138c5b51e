"""MNIST is what its files say, split and permuted as in the papers, or refused before a run begins; and on a device."""

import dataclasses
import gzip
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stiefelkit.cli import main
from stiefelkit.testing import seeds
from stiefelkit.training import data
from stiefelkit.training.tasks import Task, create, mnist

TRAIN, TEST, VALIDATION = 60, 20, 10
PAPERS_SEED = 92916


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


@pytest.fixture
def arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """Images and labels of a small MNIST, which lies gzipped in a folder of data."""
    drawn = np.random.RandomState(seeds.seed(0))
    made = [drawn.randint(0, 256, (count, 28, 28)).astype(np.uint8) for count in (TRAIN, TEST)]
    found = [made[0], np.arange(TRAIN, dtype=np.uint8) % 10, made[1], np.arange(TEST, dtype=np.uint8) % 10]
    names = [file.name for file in mnist.FILES]
    digests = [hashlib.sha256(idx(array)).hexdigest() for array in found]
    files = tuple(
        dataclasses.replace(file, sha256=digest, urls=()) for file, digest in zip(mnist.FILES, digests, strict=True)
    )
    (tmp_path / "mnist").mkdir()
    for name, array in zip(names, found, strict=True):
        (tmp_path / "mnist" / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
    monkeypatch.setattr(mnist, "FILES", files)
    monkeypatch.setattr(mnist, "VALIDATION", VALIDATION)
    monkeypatch.setenv(data.VARIABLE, str(tmp_path))
    return found


def small(name: str, **options: Any) -> mnist.Mnist:
    task = create(name, {"train_size": TRAIN - VALIDATION, **options})
    assert isinstance(task, mnist.Mnist)
    return task


def as_sequences(images: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(images.reshape(len(images), 784, 1).astype(np.float32) / np.float32(255))


def test_pixels_come_row_by_row_between_zero_and_one(arrays: list[np.ndarray]) -> None:
    x, y = small("mnist").held_out()
    assert torch.equal(x, as_sequences(arrays[2]))
    assert torch.equal(y, torch.from_numpy(arrays[3]).long())
    assert (x.min(), x.max()) == (0, 1)


def test_the_first_images_are_for_validation_and_an_epoch_visits_each_of_the_others_once(
    arrays: list[np.ndarray],
) -> None:
    task = small("mnist")
    validation = task.validation()
    assert torch.equal(validation[0], as_sequences(arrays[0][:VALIDATION]))
    epochs = [torch.cat([task.batch(5 * e + k, 10, seeds.seed())[0] for k in range(5)]) for e in range(2)]
    others = as_sequences(arrays[0][VALIDATION:])
    assert not torch.equal(*epochs)
    for epoch in epochs:
        assert sorted(row.numpy().tobytes() for row in epoch) == sorted(row.numpy().tobytes() for row in others)
    part = small("mnist", train_size=7)
    assert {row.numpy().tobytes() for row in part.batch(0, 7, 0)[0]} == {row.numpy().tobytes() for row in others[:7]}


def test_permuted_pixels_are_in_the_order_of_the_papers_or_of_another_seed(arrays: list[np.ndarray]) -> None:
    order = np.random.RandomState(PAPERS_SEED).permutation(784)
    assert order[:8].tolist() == [319, 576, 323, 107, 355, 716, 197, 20]
    plain, permuted = small("mnist"), small("pmnist")
    assert torch.equal(permuted.held_out()[0], plain.held_out()[0][:, order])
    assert torch.equal(permuted.validation()[0], plain.validation()[0][:, order])
    assert torch.equal(permuted.batch(3, 10, 1)[0], plain.batch(3, 10, 1)[0][:, order])
    other = small("pmnist", permutation_seed=seeds.seed(1)).held_out()[0]
    assert torch.equal(other, plain.held_out()[0][:, np.random.RandomState(seeds.seed(1)).permutation(784)])


@pytest.mark.parametrize("name", ["mnist", "pmnist"])
def test_shifts_move_training_images_alone_by_whole_pixels_and_anew_at_every_step(
    arrays: list[np.ndarray], name: str
) -> None:
    still, moved = small(name), small(name, shifts=1)
    seed, places = seeds.seed(2), slice(None)
    if name == "pmnist":
        places = np.argsort(np.random.RandomState(PAPERS_SEED).permutation(784))
    x, y = (part.numpy() for part in still.batch(3, 10, seed))
    shifted, labels = (part.numpy() for part in moved.batch(3, 10, seed))
    assert (y == labels).all()
    assert (shifted == moved.batch(3, 10, seed)[0].numpy()).all()
    offsets = set()
    for image, other in zip(x[:, places].reshape(-1, 28, 28), shifted[:, places].reshape(-1, 28, 28), strict=True):
        padded = np.pad(image, 1)
        fits = [(i, j) for i in range(3) for j in range(3) if (padded[i : i + 28, j : j + 28] == other).all()]
        assert len(fits) == 1
        offsets.update(fits)
    assert len(offsets) > 3
    again = moved.batch(8, 10, seed)[0]  # of another epoch
    assert not any(torch.equal(a, b) for a in torch.from_numpy(shifted) for b in again)
    for part in ("held_out", "validation"):
        assert torch.equal(getattr(still, part)()[0], getattr(moved, part)()[0])


@pytest.mark.parametrize(
    ("home", "named", "mark", "ending"),
    [("MNIST/raw", ".", "-idx", ".gz"), ("MNIST/raw", "MNIST", ".idx", ""), (".", ".", ".idx", ".gz")],
)
def test_files_are_found_where_torchvision_puts_them_and_by_dotted_names(
    home: str, named: str, mark: str, ending: str, arrays: list[np.ndarray], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    (other / home).mkdir(parents=True)
    for file in mnist.FILES:
        content = (tmp_path / "mnist" / f"{file.name}.gz").read_bytes()
        (other / home / (file.name.replace("-idx", mark) + ending)).write_bytes(
            content if ending else gzip.decompress(content)
        )
    with data.named(other / named):
        assert torch.equal(small("mnist").held_out()[0], as_sequences(arrays[2]))


@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_run_on_data_that_are_not_whole_ends_before_it_begins(
    damage: str, arrays: list[np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mnist.images.cache_clear()
    file = tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz"
    content = file.read_bytes()
    file.unlink()
    if damage != "missing":
        file.write_bytes(content[:-9])
    words = ["train", "pmnist", "--model", "lstm", "--out", str(tmp_path / "run"), "--data", str(tmp_path)]
    assert main(words) == 2
    assert "t10k-labels-idx1-ubyte needs" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# On a device


TASKS = [
    ("digits", {"train_size": 40}),
    ("mnist", {"train_size": 40}),
    ("pmnist", {"train_size": 40}),
]
DRAWN = [
    ("copying", {"T": 3, "train_size": 40, "test_size": 20}),
    ("adding", {"T": 5, "train_size": 40, "test_size": 20}),
]


class Moves(TorchDispatchMode):
    """Counts the tensors that are moved to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        target = (kwargs or {}).get("device")
        if func is torch.ops.aten._to_copy.default and target is not None and target != args[0].device:
            self.count += 1
        return func(*args, **(kwargs or {}))


def read_all(task: Task, steps: range) -> list[torch.Tensor]:
    batches = [task.batch(step, 10, seeds.seed()) for step in steps]
    examples = [task.held_out(), task.validation()]
    return [tensor for pair in [*batches, *filter(None, examples)] for tensor in pair]


@pytest.mark.usefixtures("arrays")
@pytest.mark.parametrize(("name", "options"), TASKS)
def test_an_epoch_moves_nothing_but_its_order(name: str, options: dict[str, Any]) -> None:
    task = create(name, options)
    with data.on("meta"):
        read_all(task, range(4))
        with Moves() as moves:
            read_all(task, range(4, 8))
    assert moves.count <= 1


@pytest.mark.usefixtures("arrays")
@pytest.mark.parametrize(("name", "options"), [*TASKS, *DRAWN])
def test_data_on_a_device_are_those_of_the_cpu(name: str, options: dict[str, Any]) -> None:
    task = create(name, options)
    with data.on("cpu:0"):  # another name than "cpu": a device, as a GPU is one
        kept = read_all(task, range(6))
    assert all(torch.equal(a, b) for a, b in zip(kept, read_all(task, range(6)), strict=True))
    with data.on("meta"):
        tensors = read_all(task, range(6))
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in kept]
