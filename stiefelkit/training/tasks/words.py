"""The word problem of a group: follow the product of elements over a sequence of any length."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.numbers import FLAG, integer, one_of, validate_fields_
from stiefelkit.training.recipes import recipes_of
from stiefelkit.training.tasks.task import Drawn, cross_entropy

if TYPE_CHECKING:
    from torch import Generator, Tensor

GROUPS = ("A5", "S5", "S3", "Z60", "D30")


@functools.lru_cache(maxsize=len(GROUPS))
def products(group: str) -> Tensor:
    """Returns the table of a group: entry (a, b) is the number of the element ab, 0 that of the identity.

    Permutations, ab being "b, then a", are in lexical order; D30, the symmetries of a 30-gon, has rotations first.

    >>> products("S3")[1:3, 1:3].tolist()
    [[0, 4], [3, 0]]
    """
    import torch

    n = int(group[1:])
    if group[0] in "ZD":
        flip, turn = torch.arange(60, device="cpu").reshape(60, 1) // n, torch.arange(60, device="cpu") % n
        return (turn[:, None] + (1 - 2 * flip) * turn) % n + n * (flip ^ flip.T)
    eye = torch.eye(n, device="cpu")
    found = [p for p in itertools.permutations(range(n)) if group[0] == "S" or eye[[*p]].det() > 0]
    return torch.tensor([[found.index(tuple(a[i] for i in b)) for b in found] for a in found], device="cpu")


@dataclass(frozen=True)
class Words(Drawn):
    """Reads elements of a finite group, and must say the product of all so far, at each step (Merrill et al. 2024).

    Input: uniform elements as one-hot vectors. Loss: cross-entropy, a tenth of each target spread over all classes.
    The log also has, as accuracy_at_P, that of the last eighth of the first P held-out steps, P = 16, 32, ..., test_T.

    Args:
        group: A5, S5, S3, Z60 or D30.
        T: steps of a training sequence at most.
        rise: training steps over which the length grows to T, by a constant factor.
        test_T: steps of a held-out sequence.
        train_size: training sequences of an epoch.
        test_size: held-out sequences.
        fresh: draw new sequences at each step, in place of a fixed training set.
    """

    group: str = GROUPS[0]
    T: int = 32
    rise: int = 1500
    test_T: int = 256
    train_size: int = 100_000
    test_size: int = 64
    fresh: bool = True

    name: ClassVar[str] = "words"
    last_only: ClassVar[bool] = False
    headline: ClassVar[str] = "accuracy"
    loss_label: ClassVar[str] = "cross-entropy (nats per step)"
    recipes = recipes_of("words")

    def __post_init__(self) -> None:
        sizes = {"T": integer(2), "test_T": integer(2), "train_size": integer(1), "test_size": integer(1)}
        validate_fields_(self, "Words", **sizes, group=one_of(*GROUPS), rise=integer(0), fresh=FLAG)

    @property
    def input_size(self) -> int:
        return len(products(self.group))

    output_size: ClassVar[property] = input_size

    @property
    def baseline(self) -> dict[str, float]:
        chance = 1 / self.input_size
        ends = [*(2**k for k in range(4, self.test_T.bit_length()) if 2**k < self.test_T), self.test_T]
        return {"loss": -math.log(chance), "accuracy": chance} | {f"accuracy_at_{end}": chance for end in ends}

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the cross-entropy with smoothed targets, mean over batch and steps."""
        return cross_entropy(output, y, smoothing=0.1)

    def totals(self, output: Tensor, y: Tensor) -> dict[str, tuple[float, float]]:
        found, right = super().totals(output, y), (output.argmax(-1) == y).double().sum(0)
        ends = {key: int(key.rpartition("_")[2]) for key in [*self.baseline][2:]}
        return found | {key: (float(right[end * 7 // 8 : end].mean()), len(y)) for key, end in ends.items()}

    def batch(self, step: int, batch_size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns the beginning of each sequence of a batch, which grows with the step."""
        x, y = super().batch(step, batch_size, seed)
        length = round(2 * (self.T / 2) ** min(1.0, step / max(1, self.rise)))
        return x[:, :length], y[:, :length]

    def held_out(self) -> tuple[Tensor, Tensor]:
        return super(Words, replace(self, T=self.test_T)).held_out()

    def draw(self, count: int, source: Generator) -> tuple[Tensor]:
        """Returns the numbers of elements, (count, T)."""
        return (products(self.group).new_empty((count, self.T)).random_(self.input_size, generator=source),)

    def made(self, *drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Returns one-hot vectors, (count, T, G), and the numbers of the products, (count, T)."""
        import torch

        table = products(self.group).to(drawn[0].device)
        so_far = itertools.accumulate(drawn[0].unbind(1), lambda a, b: table[a, b])
        return torch.eye(len(table), device=table.device)[drawn[0]], torch.stack([*so_far], dim=1)
