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

SUBJECT = "Training on several ranks"
VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
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

    has_gpus, own = torch.cuda.is_available() and dist.is_nccl_available(), int(os.environ.get("LOCAL_RANK", "0"))
    if has_gpus and own < torch.cuda.device_count():
        torch.cuda.set_device(own)  # "cuda" means this one from now on
    with _all_there("to begin with"):
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpus else "gloo", timeout=PATIENCE)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


class Ranks:
    """All processes as one of them knows them; `signal` is that by which all shall stop, as known when all met last."""

    def __init__(self, rank: int = 0, size: int = 1):
        self.rank, self.size, self.is_first = rank, size, rank == 0
        self.signal: int | None = None
        self._noted: int | None = None

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Notes the first SIGINT, SIGTERM or SIGHUP, unless ignored; a second one acts at once."""

        def note(number: int, frame: FrameType | None) -> None:
            if self._noted is not None:
                raise KeyboardInterrupt
            self._noted = number
            self.signal = number if self.size == 1 else None

        self.signal = self._noted = None
        is_main = threading.current_thread() is threading.main_thread()
        heeded = [number for number in SIGNALS if is_main and signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def check(self, config: Config) -> None:
        """Raises OptionError unless each process has a device of its own and a share of every batch."""
        is_own = self.size == 1 or config.device in ("cpu", "cuda")
        needs(is_own, OptionError, SUBJECT, "--device cpu, or cuda for a GPU of each", config.device)
        words = "a sequence for each in a batch; raise batch_size, or start fewer"
        needs(config.batch_size >= self.size, OptionError, SUBJECT, words, f"{config.batch_size} for {self.size}")

    def share(self, batch: Tensor) -> Tensor:
        """Returns the rows of a batch that are this rank's; those of all ranks differ by one at most."""
        return batch if self.size == 1 else batch.tensor_split(self.size)[self.rank]

    def first(self, work: Callable[[], T]) -> T:
        """Calls a function on the first rank, and returns its result on all; what it raises is told to all."""
        with self.together():
            result = work() if self.is_first else None
        return cast(T, self._gathered(result)[0])

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Has all ranks leave together, or raise what the first that failed has raised."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, _ErrorElsewhere):
                self._meet(error)
            raise
        self._meet()

    def same(self, what: str, value: object) -> None:
        """Raises RunError unless all ranks have the same of something."""
        is_same = all(other == value for other in self._gathered(value))
        needs(is_same, RunError, SUBJECT, f"the same {what} on each", "others")

    def average_(self, gradients: Sequence[Tensor], count: float, sums: Sequence[float]) -> list[float]:
        """Averages gradients over the terms of all ranks in place, and returns their `count` and `sums` added up."""
        import torch
        import torch.distributed as dist

        self._meet()
        numbers = torch.tensor([count, *sums], dtype=torch.float64, device=gradients[0].device if gradients else "cpu")
        with _all_there():
            dist.all_reduce(numbers)
            for gradient in gradients:
                total = gradient.to(torch.promote_types(gradient.dtype, torch.float64)) * count
                dist.all_reduce(total)
                gradient.copy_(total / numbers[0])
        return numbers.tolist()

    def _meet(self, error: Exception | None = None) -> None:
        """Learns of signals and failures of others, and tells those of this rank."""
        if self.size == 1:
            return
        failure = error and (str(error) if isinstance(error, StiefelkitError) else repr(error))
        failures, signals = zip(*self._gathered((failure, self._noted)), strict=True)
        self.signal = next(filter(None, signals), None)
        rank = next((rank for rank, sentence in enumerate(failures) if sentence is not None), self.rank)
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
def _all_there(until: str = "to the end") -> Iterator[None]:
    """Turns what torch says when another process is gone into a RunError."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        words = f"{SUBJECT} needs all of them {until}, got one that stopped ({reason}); continue with --resume."
        raise _ErrorElsewhere(words) from error
