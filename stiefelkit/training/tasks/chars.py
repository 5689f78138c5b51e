"""Text, character by character: predict the next one, or the one k steps ahead."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from stiefelkit.checks import known_words, of_type
from stiefelkit.numbers import integer, optional, validate_fields_
from stiefelkit.training import data
from stiefelkit.training.recipes import LRU_RATES, Recipe, of_planes
from stiefelkit.training.tasks.task import Parted, cross_entropy

if TYPE_CHECKING:
    from torch import Tensor

    from stiefelkit.training.tasks.texts import Pieces, Text

RESETS = ("window", "line")

_of = functools.partial(Recipe.of, steps=6000, batch_size=50, eval_every=500, checkpoint_every=500)
RECIPES = {
    "scornn": _of(297, rates={"skew": 1e-4}, options=lambda n: {"negative": n // 10}),
    "scurnn": _of(185, rates={"skew": 1e-4}),
    "full_urnn": _of(185, optimizer="multiplicative_cayley", rates={"stiefel": 1e-3}),
    "restricted_urnn": _of(307),
    "ornn": _of(384, options=lambda n: {"reflections": n // 4}),
    "eurnn": _of(410, options=lambda n: {"layers": 2}),
    "exprnn": _of(297, rates={"skew": 1e-4}),
    "lie_urnn": _of(185),
    "margin_rnn": _of(230, rates={"skew": 1e-4}),
    "goru": _of(128),
    "rotrnn": _of(156, 4e-3, optimizer="adamw", rates={"angle": 1e-3, "log_rate": 1e-3}, options=of_planes),
    "lru": _of(156, 4e-3, optimizer="adamw", rates=LRU_RATES),
    "irnn": _of(230, clip_norm=1.0),
    "henaff_rnn": _of(230, clip_norm=1.0),
    "gru": _of(128, 3e-3, clip_norm=1.0),
    "lstm": _of(108, 3e-3, clip_norm=1.0),
}
"""About 83,000 parameters for a text of 65 characters.

oRNN's paper has 512 units, 345 reflections, Adam at 1e-4 and one line at a time, which these settings say, too:
--reset line --hidden-size 512 --options.reflections 345 --lr 1e-4 --batch-size 1.
"""


@dataclass(frozen=True)
class Chars(Parted):
    """Reads text character by character, and must predict the character that comes next, or `ahead` steps later.

    Input: one-hot vectors over the characters of the training part. Target: the character `ahead` steps after. The loss
    is the cross-entropy in bits per character, averaged over all targets. A sequence begins with the model's initial
    state: each window of T characters, whose first ones are predicted with little to go by (a longer T makes that
    matter less), or each line. The baseline knows how often each character is there, and nothing of those before.

    The data are a folder of yours (--data DIR or STIEFELKIT_DATA) with one text, of which the first nine tenths are for
    training, then a twentieth for validation and the last for the test; or three, with train, valid and test in their
    names, as the Penn Treebank comes. Characters that the training part does not have are neither input nor target.

    Reference: Mikolov et al. 2012; per line and with ahead = 1 or 5 in the form of Mhammedi et al. 2017.

    Args:
        file: the text in the folder of data, or a pattern for three, such as ptb.*.txt; what ends in .txt if left out.
        ahead: steps from the last character that has been read to the one that is to be predicted.
        reset: where the state begins anew: window, every T characters; line, whose end is no character then.
        T: characters of a window.
        train_size: sequences to train on; all if left out.
    """

    file: str = ""
    ahead: int = 1
    reset: str = RESETS[0]
    T: int = 100
    train_size: int | None = None

    name: ClassVar[str] = "chars"
    last_only: ClassVar[bool] = False
    headline: ClassVar[str] = "loss"
    loss_label: ClassVar[str] = "bits per character"
    recipes: ClassVar[dict[str, Recipe]] = RECIPES
    scores: ClassVar[tuple[str, ...]] = ("loss", "accuracy")

    def __post_init__(self) -> None:
        sizes = {"T": integer(1), "ahead": integer(1), "train_size": optional(integer(1))}
        validate_fields_(self, "Chars", **sizes, file=of_type(str), reset=of_type(str))
        known_words("Chars", "reset", [self.reset], RESETS)

    @property
    def input_size(self) -> int:
        """Number of characters that the training part has."""
        return len(self._text().alphabet)

    @property
    def output_size(self) -> int:
        """The number of inputs, too."""
        return self.input_size

    @property
    def baseline(self) -> dict[str, float]:
        """The frequencies of the training part, and its commonest character."""
        return dict(self._text().unigram(self.T, self.ahead))

    def _split(self, name: str) -> Pieces:
        """Returns the windows, or the lines, of a part of the text."""
        return self._text().sequences(name, self.T, self.ahead)

    def data_digest(self) -> str:
        """Returns that of the three parts of the text."""
        return self._text().digest

    def loss(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the cross-entropy in bits, mean over all characters that are targets."""
        return cross_entropy(output, y) / math.log(2)

    def accuracy(self, output: Tensor, y: Tensor) -> Tensor:
        """Returns the share of targets that are the likeliest character."""
        real = y >= 0
        return (output.argmax(-1) == y)[real].double().mean()

    def totals(self, output: Tensor, y: Tensor) -> dict[str, tuple[float, float]]:
        """Returns sums over targets, and how many there are."""
        count = int((y >= 0).sum())
        scores = {"loss": self.loss(output, y), "accuracy": self.accuracy(output, y)}
        return {key: (float(score) * count if count else 0.0, count) for key, score in scores.items()}

    def _text(self) -> Text:
        from stiefelkit.training.tasks.texts import text

        return text(data.folder(self.name), self.file, self.reset == "line")
