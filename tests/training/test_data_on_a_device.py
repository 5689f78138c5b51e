"""Data that are in memory are moved to the device of a run once, not batch by batch, and are the same there."""

from typing import Any

import pytest
import test_mnist
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stiefelkit.testing import seeds
from stiefelkit.training import data
from stiefelkit.training.tasks import Task, create

arrays = test_mnist.arrays
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
            tensors = read_all(task, range(4, 8))
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert [tensor.shape for tensor in tensors] == [tensor.shape for tensor in read_all(task, range(4, 8))]
    assert moves.count <= 1


@pytest.mark.usefixtures("arrays")
@pytest.mark.parametrize(("name", "options"), [*TASKS, *DRAWN])
def test_data_on_a_device_are_those_of_the_cpu(name: str, options: dict[str, Any]) -> None:
    task = create(name, options)
    with data.on("cpu:0"):  # another name than "cpu": a device, as a GPU is one
        kept = read_all(task, range(6))
    assert all(torch.equal(a, b) for a, b in zip(kept, read_all(task, range(6)), strict=True))
    with data.on("meta"):
        assert all(tensor.device.type == "meta" for tensor in read_all(task, range(2)))
