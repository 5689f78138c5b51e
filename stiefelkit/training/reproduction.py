"""The options by which an experiment of a paper is run again."""

import shlex
from dataclasses import dataclass, field

from stiefelkit.numbers import optional, settle_, whole
from stiefelkit.training.checks import SEED, THREADS
from stiefelkit.training.papers import Row
from stiefelkit.training.recipes import Settings

__all__ = ["Reproduction"]

WHO = "A reproduction"


@dataclass(frozen=True)
class Reproduction:
    """How an experiment is run again.

    Args:
        epochs: of the training data, in all; a run of fewer may go on later.
        seed: fixes the initial weights and the training data.
        threads: CPU threads; another number may change the last bits.
        device: cpu, cuda, cuda:1, ...
    """

    epochs: int | None = field(default=None, metadata={"shown": "as many as in the paper"})
    seed: int | None = field(default=None, metadata={"shown": "that of the paper"})
    threads: int | None = field(default=None, metadata={"shown": 1})
    device: str | None = field(default=None, metadata={"shown": "cpu"})

    def __post_init__(self) -> None:
        """Checks the ranges."""
        settle_(self, WHO, epochs=optional(whole(1)), seed=optional(SEED), threads=optional(THREADS))

    def settings(self, row: Row) -> Settings:
        """Returns what differs from the settings of the paper."""
        steps = None if self.epochs is None else self.epochs * row.epoch
        return Settings(steps=steps, seed=self.seed, threads=self.threads, device=self.device)

    def command(self, name: str) -> str:
        """Returns the line that runs an experiment so, wherever its options have come from.

        >>> Reproduction(epochs=2).command("scornn-mnist-170")
        'stiefelkit reproduce scornn-mnist-170 --epochs 2'
        """
        given = ((f"--{option}", str(value)) for option, value in vars(self).items() if value is not None)
        return shlex.join(["stiefelkit", "reproduce", name, *(word for pair in given for word in pair)])
