"""How many operators a device launches for a parametrization, or for a step of an optimizer of frames.

    python -m benchmarks.launches

prints launches and reads, the operators that are waited for. They are counted on a CPU, by the road of a device; a
Triton program is one launch, which leaves its results as they stand in memory.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

import stiefelkit as sk
from benchmarks.suite import Suite, size_of
from stiefelkit._torch import TorchDispatchMode, is_view_operator
from stiefelkit.errors import StiefelkitError
from stiefelkit.functional._arithmetic.devices import without_reads
from stiefelkit.functional._kernels import launch
from stiefelkit.measuring.clock import Run
from stiefelkit.measuring.implementations import (
    OPERATIONS,
    FrameProblem,
    Implementation,
    dtype_of,
    own_implementations,
    peers,
)
from stiefelkit.measuring.moved_frames import peer_optimizers, start
from stiefelkit.measuring.plans import OptimizerRace
from stiefelkit.testing.portable import READS

SIZES = ("64x64", "512x512", "128x32")
DTYPES = {"float32": torch.float32, "complex64": torch.complex64}
DEVICES = ("cpu",)
_IDLE = frozenset(
    "_record_function_enter_new _record_function_exit _unsafe_view alias detach empty empty_like empty_strided "
    "lift_fresh new_empty new_empty_strided promote_types resize_ scalar_tensor set_".split()
)
"""Operators that take memory or make a number of the host's a tensor, and launch nothing."""


MAPS = own_implementations(sk.available(), (), {})
OPTIMIZERS = OptimizerRace().implementations()


class _Counter(TorchDispatchMode):
    launches = reads = 0

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        name = func.overloadpacket.__name__
        self.reads += name in READS
        self.launches += not (name in _IDLE or name in READS or is_view_operator(func))
        return func(*args, **(kwargs or {}))


def counts_of(run: Run) -> tuple[int, int]:
    """Counts operators that are no views, programs, and operators that read a value, of one run, as on a device."""
    programs = mock.MagicMock()  # in the place of each program
    of_a_device = mock.patch.object(launch.Interpreter, "is_on", True)
    of_a_scan = mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"})
    with without_reads(), of_a_device, of_a_scan, mock.patch.object(launch, "programs", return_value=programs):
        run()  # what is made at first use
        programs.reset_mock()
        with _Counter() as counter:
            run()
    starts = sum(name.endswith("__getitem__()") for name, *_ in programs.mock_calls)
    return counter.launches + starts, counter.reads


def of_map(entrant: Implementation, size: str, dtype: str) -> Run:
    """Forward and backward; in the complex dtype of that size where it has to be."""
    problem = FrameProblem(*size_of(size), dtype=DTYPES[dtype])
    entry = entrant.enter(problem)
    problem.dtype = entry.dtype or problem.dtype
    return OPERATIONS["forward_backward"](entry, problem.gradient())


def of_layer(name: str, width: str) -> Run:
    """Forward and backward of a recurrent layer of 128 units over 784 steps, or of a convolution of 3 x 3 taps."""
    if name.endswith("Conv2d"):
        conv, images = getattr(sk.nn, name)(int(width), int(width), 3), torch.randn(2, int(width), 28, 28)
        return lambda: torch.autograd.grad(conv(images), [*conv.parameters()], torch.ones_like(images))
    layer: Any = getattr(sk.nn, name)(int(width), 128, backend="triton")
    x, g, leaves = torch.randn(784, 4, int(width)), torch.randn(784, 4, 128), [*layer.parameters()]
    return lambda: torch.autograd.grad(layer(x)[0], leaves, g)


def of_optimizer(method: str, size: str, dtype: str) -> Run:
    """One step."""
    problem = FrameProblem(*size_of(size), dtype=DTYPES[dtype])
    frame, gradient = problem.exact_frame(), problem.gradient()
    moved = start(method, frame, gradient, 0.1, problem.dtype)
    return lambda: moved.step(gradient.clone())


def _takes(contender: str, dtype: str) -> bool:
    return dtype_of(sk.available()[contender.partition(" ")[0]], DTYPES[dtype]) == DTYPES[dtype]


class Parametrizations(Suite, track="launches"):
    """Forward and backward."""

    unit = "launches"
    axes = (tuple(MAPS), SIZES, tuple(DTYPES), DEVICES)
    param_names = ("contender", "size", "dtype", "device")

    def level(self, *cell: str) -> str:
        contender, size, dtype, _ = cell
        return "smoke" if size != "128x32" and dtype == "float32" and _takes(contender, dtype) else "quick"

    def measure(self, *cell: str) -> float:
        contender, size, dtype, _ = cell
        if not _takes(contender, dtype):
            raise NotImplementedError(f"{contender} needs a complex weight")
        return counts_of(of_map(MAPS[contender], size, dtype))[0]


class Layers(Suite, track="launches"):
    """Forward and backward of recurrent layers of 128 units, over 784 steps of a batch of four, and of convolutions."""

    unit = "launches"
    axes = tuple("RotationRNN LRU ReflectorRNN OrthogonalRNN OrthogonalConv2d CayleyConv2d".split()), ("64",), DEVICES
    param_names = ("layer", "width", "device")

    def level(self, *cell: str) -> str:
        return "smoke"

    def measure(self, *cell: str) -> float:
        return counts_of(of_layer(*cell[:2]))[0]


class Optimizers(Suite, track="launches"):
    """One step."""

    unit = "launches"
    axes = (tuple(OPTIMIZERS), SIZES, tuple(DTYPES), DEVICES)
    param_names = ("optimizer", "size", "dtype", "device")

    def level(self, *cell: str) -> str:
        return "smoke" if cell[1:3] == ("64x64", "float32") else "quick"

    def measure(self, *cell: str) -> float:
        return counts_of(of_optimizer(OPTIMIZERS[cell[0]], *cell[1:3]))[0]


def main() -> None:
    """Prints the table, ours and others'."""
    print(f"{'launches / reads, float32':36}" + "".join(f"{size:>12}" for size in SIZES))
    rows: dict[str, Callable[[str], Run]] = {
        **{name: partial(of_map, each, dtype="float32") for name, each in (MAPS | peers).items()},
        **{name: partial(of_optimizer, method, dtype="float32") for name, method in OPTIMIZERS.items()},
        **{name: partial(of_optimizer, name, dtype="float32") for name in peer_optimizers},
    }
    for name in Layers.axes[0]:
        print(f"{name + ', a layer of 64':36}" + "{:>6} / {}".format(*counts_of(of_layer(name, "64"))))
    for name, make in rows.items():
        cells = []
        for size in SIZES:
            try:
                cells.append("{} / {}".format(*counts_of(make(size))))
            except (ImportError, StiefelkitError):
                cells.append("-")
        print(f"{name:36}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
