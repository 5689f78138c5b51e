"""The adding problem: add two marked numbers of a long sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.numbers import FLAG, integer, validate_fields_
from stiefelkit.training.recipes import recipes_of
from stiefelkit.training.tasks.task import Drawn

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Adding(Drawn):
    """Reads T numbers from [0, 1), two of them marked, and must give the sum of the two at the last step.

    Input: pairs (number, marker); one marker is uniform in the steps [0, f), the other in [f, T), f = floor((T-1)/2).
    Target: the sum. The loss is the squared error; always answering 1 scores 1/6.

    A model stays at the baseline for a while and then leaves it quickly; the longer T, the later. The recipes
    do four of the papers' ten epochs, in which scoRNN gets well below 0.01 at T = 200; scuRNN has not left the
    baseline by then (0.159) and wants more --steps. At T = 50, 4000 steps bring the error of scoRNN under 0.01.
    The paper of full_urnn has no adding problem: its recipe takes the rates that it has for copying. Size,
    reflections and rate of ornn are its paper's. The recipes of models other than scornn, scurnn and lstm have been
    tried for a hundred steps only.

    Reference: Hochreiter and Schmidhuber 1997, in the form of Arjovsky et al. 2016; set sizes of Helfrich et al. 2018
    but for the test set, which has 10,000 sequences there.

    Args:
        T: length of the sequence.
        train_size: training sequences, fixed and visited in order, epoch after epoch.
        test_size: held-out sequences.
        fresh: draw new sequences at each step, in place of a fixed training set; an epoch is still `train_size` long.
    """

    T: int = 200
    train_size: int = 100_000
    test_size: int = 2_000
    fresh: bool = False

    name: ClassVar[str] = "adding"
    input_size: ClassVar[int] = 2
    output_size: ClassVar[int] = 1
    last_only: ClassVar[bool] = True
    headline: ClassVar[str] = "loss"
    loss_label: ClassVar[str] = "mean squared error"
    recipes = recipes_of("adding")

    def __post_init__(self) -> None:
        # below T = 3 the first half is empty
        validate_fields_(self, "Adding", T=integer(3), train_size=integer(1), test_size=integer(1), fresh=FLAG)

    @property
    def baseline(self) -> dict[str, float]:
        """The variance of a sum of two uniform numbers."""
        return {"loss": 1 / 6}

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the mean squared error of the last output."""
        from torch.nn import functional as F

        return F.mse_loss(output.squeeze(-1), y)

    def draw(self, count: int, source: torch.Generator) -> tuple[Tensor, ...]:
        """Returns the numbers, (count, T), and the steps of both markers, (count, 1) each."""
        import torch

        half = (self.T - 1) // 2
        numbers = torch.rand(count, self.T, generator=source, device="cpu")
        first = torch.randint(0, half, (count, 1), generator=source, device="cpu")
        return numbers, first, torch.randint(half, self.T, (count, 1), generator=source, device="cpu")

    def made(self, *drawn: Tensor) -> tuple[Tensor, Tensor]:
        """Returns numbers beside markers, (count, T, 2), and sums, (count,)."""
        import torch

        numbers, first, second = drawn
        markers = torch.zeros_like(numbers).scatter_(1, first, 1.0).scatter_(1, second, 1.0)
        return torch.stack([numbers, markers], dim=-1), (numbers * markers).sum(dim=1)
