"""Speech of TIMIT, the next frame: settings only, since the figures of the papers cannot be compared.

They are means over padding, which depend on the corpus and on how it is padded, and differ between papers for one
system. Neither the epochs nor the batches of scoRNN and scuRNN were published: those here are of Wisdom et al.
"""

from typing import Any

from stiefelkit.training.papers.row import Row
from stiefelkit.training.recipes import TENSORFLOW_RMSPROP, THEANO_RMSPROP

__all__ = ["ROWS"]

HELFRICH = "Helfrich, Willmott, Ye 2018, table of TIMIT"
MADURANGA = "Maduranga, Helfrich, Ye 2019, table of TIMIT"
WISDOM = "Wisdom et al. 2016, table of TIMIT"
LEZCANO = "Lezcano-Casado, Martinez-Rubio 2019, table of TIMIT"
RECORDINGS, BATCH, EPOCHS = 3_696, 28, 98
NOTE = "needs TIMIT; the paper's figures are means over padding, which cannot be compared (docs/tasks.md)"
OPEN = "; batch and steps are those of Wisdom et al."
ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 1e-3}
THEANO: dict[str, Any] = {"optimizer": "rmsprop", "lr": 1e-3, "optimizer_options": THEANO_RMSPROP}


def _row(
    model: str,
    n: int,
    paper: str,
    parameters: int,
    note: str = "",
    batch_size: int = BATCH,
    epochs: int = EPOCHS,
    **settings: Any,
) -> Row:
    epoch = RECORDINGS // batch_size
    every = {"eval_every": epoch, "log_every": epoch // 4, "checkpoint_every": epoch}
    given = {**settings, "batch_size": batch_size, "steps": epochs * epoch, "seed": 5544, **every}
    options = {"train_size": RECORDINGS}
    return Row.of(model, "speech", n, paper, given, task_options=options, note=NOTE + note, parameters=parameters)


def _scornn(n: int, parameters: int, skew: float) -> Row:
    table = {"skew": {"optimizer": "rmsprop", "lr": skew, **TENSORFLOW_RMSPROP}}
    return _row("scornn", n, HELFRICH, parameters, OPEN, **ADAM, optimizers=table, options={"negative": n // 10})


def _lstm(n: int, parameters: int) -> Row:
    """By scuRNN's text."""
    note = OPEN + "; the bound of the gradient is not in the paper"
    rmsprop: dict[str, Any] = {**THEANO, "optimizer_options": TENSORFLOW_RMSPROP}
    return _row("lstm", n, HELFRICH, parameters, note, **rmsprop, clip_norm=1.0, options={"forget_bias": -4.0})


def _exprnn(n: int, parameters: int) -> Row:
    """Batches of 128 for 1,200 epochs, A by RMSprop."""
    table = {"skew": {"optimizer": "rmsprop", "lr": 1e-4}}
    return _row("exprnn", n, LEZCANO, parameters, "", 128, 1_200, **ADAM, optimizers=table)


def _full(n: int, parameters: int) -> Row:
    table = {"stiefel": {"optimizer": "multiplicative_cayley"}}
    return _row("full_urnn", n, WISDOM, parameters, **THEANO, optimizers=table)


SMALL, MIDDLE, LARGE = 83_000, 135_000, 200_000
"""Parameters of the three sizes that the tables compare."""

ROWS = (
    _scornn(224, SMALL, 1e-3),
    _scornn(322, MIDDLE, 1e-4),
    _scornn(425, LARGE, 1e-4),
    *(
        _row("scurnn", n, MADURANGA, size, OPEN, **ADAM, rates={"skew": 1e-4})
        for n, size in ((128, SMALL), (258, LARGE))
    ),
    *(_full(*size) for size in ((128, SMALL), (192, MIDDLE), (256, LARGE))),
    *(_row("restricted_urnn", n, WISDOM, size, **THEANO) for n, size in ((158, SMALL), (256, MIDDLE), (378, LARGE))),
    *(_exprnn(*size) for size in ((224, SMALL), (322, MIDDLE), (425, LARGE))),
    *(_lstm(*size) for size in ((84, SMALL), (120, MIDDLE), (158, LARGE))),
)
