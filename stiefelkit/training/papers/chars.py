"""The Penn Treebank, line by line, the character that comes next or five steps later: settings only.

The authors' code has Adam and twenty epochs. Sizes, rate and batch have not been checked against the paper's text, and
its figures are not here.
"""

from typing import Any

from stiefelkit.training.papers.row import Row

__all__ = ["ROWS"]

MHAMMEDI = "Mhammedi et al. 2017, table of the Penn Treebank"
NOTE = "needs the Penn Treebank, its first 42,000 lines; size and rate have not been checked against the paper"
LINES, EPOCHS = 42_000, 20


COMMON: dict[str, Any] = {
    "batch_size": 1,
    "steps": EPOCHS * LINES,
    "optimizer": "adam",
    "lr": 1e-4,
    "seed": 5544,
    "eval_every": LINES,
    "log_every": LINES // 20,
    "checkpoint_every": LINES // 20,
}


def _row(model: str, n: int, ahead: int, note: str = "", **settings: Any) -> Row:
    end = n if ahead == 1 else f"ahead-{ahead}-{n}"
    options = {"reset": "line", "ahead": ahead, "train_size": LINES}
    return Row.of(model, "chars", n, MHAMMEDI, {**settings, **COMMON}, end, task_options=options, note=NOTE + note)


ROWS = tuple(
    row
    for ahead in (1, 5)
    for row in (
        _row("ornn", 512, ahead, options={"reflections": 345}),
        _row("lstm", 183, ahead, "; the bound is ours", clip_norm=1.0),
    )
)
