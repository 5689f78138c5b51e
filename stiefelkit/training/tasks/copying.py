"""The copying problem: remember ten symbols over T steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.numbers import FLAG, integer, validate_fields_
from stiefelkit.training.recipes import recipes_of
from stiefelkit.training.tasks.task import Drawn, cross_entropy

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SYMBOLS = 10


@dataclass(frozen=True)
class Copying(Drawn):
    """Reads ten symbols out of eight, waits, and must repeat them after a marker.

    Input: 10 symbols drawn from 1..8, T-1 blanks (0), the marker 9, 10 blanks, as one-hot vectors of length 10, so
    T+20 steps. Target: T+10 blanks, then the ten symbols; 9 classes. The loss is the cross-entropy averaged over all
    steps; the accuracy counts the ten recalled symbols only. Without memory the best loss is 10 ln 8 / (T+20).

    Reference: Hochreiter and Schmidhuber 1997, in the form of Arjovsky et al. 2016; set sizes of Helfrich et al. 2018.

    Args:
        T: steps between the first symbol's end and the recall.
        train_size: training sequences, fixed and visited in order, epoch after epoch.
        test_size: held-out sequences.
        fresh: draw new sequences at each step, in place of a fixed training set; an epoch is still `train_size` long.
        at_marker: the marker comes one step later, so that the first symbol is wanted at it, not after it, as in the
            code of expRNN's authors.
    """

    T: int = 100
    train_size: int = 20_000
    test_size: int = 1_000
    fresh: bool = False
    at_marker: bool = False

    name: ClassVar[str] = "copying"
    input_size: ClassVar[int] = 10
    output_size: ClassVar[int] = 9
    last_only: ClassVar[bool] = False
    headline: ClassVar[str] = "loss"
    loss_label: ClassVar[str] = "cross-entropy (nats per step)"
    recipes = recipes_of("copying")

    def __post_init__(self) -> None:
        sizes = dict.fromkeys(("T", "train_size", "test_size"), integer(1))
        validate_fields_(self, "Copying", **sizes, fresh=FLAG, at_marker=FLAG)

    @property
    def baseline(self) -> dict[str, float]:
        """Blank for T+10 steps, then uniform guesses."""
        return {"loss": SYMBOLS * math.log(8) / (self.T + 2 * SYMBOLS), "accuracy": 1 / 8}

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output, y)

    def accuracy(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the share of the ten recalled symbols that are right."""
        return (output[:, -SYMBOLS:].argmax(-1) == y[:, -SYMBOLS:]).double().mean()

    def draw(self, count: int, source: torch.Generator) -> tuple[Tensor]:
        """Returns the symbols, (count, 10), from 1 to 8."""
        import torch

        return (torch.randint(1, 9, (count, SYMBOLS), generator=source, device="cpu"),)

    def made(self, *drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Returns one-hot vectors, (count, T + 20, 10), and classes, (count, T + 20)."""
        from torch.nn import functional as F

        (symbols,) = drawn
        x, y = symbols.new_zeros(2, len(symbols), self.T + 2 * SYMBOLS)
        x[:, :SYMBOLS] = symbols
        x[:, self.T + SYMBOLS - 1 + self.at_marker] = 9
        y[:, -SYMBOLS:] = symbols
        return F.one_hot(x, self.input_size).float(), y
