"""The processes that train one model together: one alone, or those that torchrun has started.

Gradients of their shares of a batch are averaged; the first has the run folder, the log and the evaluations. All learn
of an error or a signal of one where they meet: at the gradients of each step, and around `together`.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, TypeVar, cast

from stiefelkit.errors import OptionError, RunError, StiefelkitError, needs

if TYPE_CHECKING:
    from torch import Tensor

    from stiefelkit.training.config import Config

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PATIENCE = datetime.timedelta(days=1)
"""The others wait while the first evaluates; processes that die are noticed by torchrun."""
T = TypeVar("T")


class _ErrorElsewhere(RunError):
    """An error of another rank."""


def launched() -> bool:
    """Returns whether torchrun, or what sets the same variables, has started this process and others."""
    return all(name in os.environ for name in VARIABLES) and os.environ["WORLD_SIZE"] != "1"


def is_first_of_launched() -> bool:
    """Returns whether this is the process that speaks for all."""
    return not launched() or os.environ["RANK"] == "0"


@contextlib.contextmanager
def joined() -> Iterator[Ranks]:
    """Joins the processes that torchrun has started, by gloo on CPUs and by NCCL between GPUs."""
    if not launched():
        yield Ranks()
        return
    import torch
    import torch.distributed as dist

    has_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    if has_gpus and _local_rank() < torch.cuda.device_count():
        torch.cuda.set_device(_local_rank())  # "cuda" means this one from now on
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo", timeout=PATIENCE)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise RunError(f"Training on several ranks needs all of them, got none of the others: {reason}.") from error
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


class Interruption:
    """Notes the first SIGINT, SIGTERM or SIGHUP, unless ignored, in `signal`; a second one acts at once."""

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


class Ranks:
    """All processes as one of them knows them."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size = rank, size
        self.interruption: Interruption | None = None
        self._signal: int | None = None

    @property
    def is_first(self) -> bool:
        """Whether this process has the run folder, and speaks for all."""
        return self.rank == 0

    @property
    def signal(self) -> int | None:
        """Signal by which all shall stop, as known when all met last."""
        return self._noted if self.size == 1 else self._signal

    @property
    def _noted(self) -> int | None:
        return None if self.interruption is None else self.interruption.signal

    def check(self, config: Config) -> None:
        """Raises OptionError unless each process has a device and a share of every batch."""
        if self.size == 1:
            return
        import torch

        device, who = torch.device(config.device), "Training on several ranks"
        enough = device.type == "cpu" or _local_rank() < torch.cuda.device_count()
        fits = device.index is None and enough
        needs(fits, OptionError, who, "--device cpu or cuda, and a GPU for each; lower --nproc-per-node", str(device))
        sequences = "a sequence for each in a batch; raise batch_size, or start fewer"
        needs(config.batch_size >= self.size, OptionError, who, sequences, f"{config.batch_size} for {self.size}")

    def share(self, batch: Tensor) -> Tensor:
        """Returns the rows of a batch that are this rank's; those of all ranks differ by one at most."""
        return batch if self.size == 1 else batch.tensor_split(self.size)[self.rank]

    def first(self, work: Callable[[], T]) -> T:
        """Calls a function on the first rank, and returns its result on all; what it raises is told to all."""
        if self.size == 1:
            return work()
        import torch.distributed as dist

        with self.together():
            result: list[object] = [work() if self.is_first else None]
        with _all_there():
            dist.broadcast_object_list(result, src=0)
        return cast(T, result[0])

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Has all ranks leave together, or raise what the first that failed has raised."""
        try:
            yield
        except Exception as error:
            if self.size > 1 and not isinstance(error, _ErrorElsewhere):
                self._meet(str(error) if isinstance(error, StiefelkitError) else repr(error), error)
            raise
        self._meet()

    def same(self, what: str, value: object) -> None:
        """Raises RunError unless all ranks have the same of something."""
        others = [other for other in self._gathered(value) if other != value]
        needs(not others, RunError, "Training on several ranks", f"the same {what} on each", "others")

    def average_(self, gradients: Sequence[Tensor], count: float, sums: Sequence[float]) -> list[float]:
        """Averages gradients over the terms of all ranks in place, and returns their `count` and `sums` added up."""
        import torch
        import torch.distributed as dist

        self._meet()
        device = gradients[0].device if gradients else torch.device("cpu")
        numbers = torch.tensor([count, *sums], dtype=torch.float64, device=device)
        flat = torch.cat([numbers, *(_real(gradient).double().flatten() * count for gradient in gradients)])
        with _all_there():
            dist.all_reduce(flat)
        start, totals = len(numbers), flat[: len(numbers)].tolist()
        for gradient in gradients:
            real = _real(gradient)
            mean = flat[start : start + real.numel()].view(real.shape).div_(totals[0])
            gradient.copy_(torch.complex(*mean.unbind(-1)) if gradient.is_complex() else mean)
            start += real.numel()
        return totals

    def _meet(self, failure: str | None = None, error: Exception | None = None) -> None:
        """Learns of signals and failures of others, and tells those of this rank."""
        if self.size == 1:
            return
        import torch
        import torch.distributed as dist

        word = torch.tensor([failure is not None, self._noted or 0], dtype=torch.int64, device="cpu")
        with _all_there():
            dist.all_reduce(word, dist.ReduceOp.MAX)
        has_failed, signal = word.tolist()
        self._signal = signal or None
        if not has_failed:
            return
        failures = self._gathered(failure)
        rank = next(rank for rank, sentence in enumerate(failures) if sentence is not None)
        if rank != self.rank:
            who = "" if failures.count(failures[rank]) == self.size else f"Rank {rank} of {self.size} has failed: "
            raise _ErrorElsewhere(f"{who}{failures[rank]}") from error

    def _gathered(self, value: T) -> list[T]:
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values = [value] * self.size
        with _all_there():
            dist.all_gather_object(values, value)
        return values


@contextlib.contextmanager
def _all_there() -> Iterator[None]:
    """Turns what torch says when another process is gone into a RunError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise _ErrorElsewhere(
            f"Training on several ranks needs all of them to the end, got one that stopped ({reason}); "
            f"continue with --resume."
        ) from error


def _real(gradient: Tensor) -> Tensor:
    import torch

    return torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
