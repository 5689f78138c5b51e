"""Speech of TIMIT, the next frame: settings only, since the figures of the papers cannot be compared.

They are means over padding, which depend on the corpus and on how it is padded, and differ between papers for one
system. Neither the epochs nor the batches of scoRNN and scuRNN were published: those here are of Wisdom et al.
"""

from typing import Any

from stiefelkit.training.papers.row import Row
from stiefelkit.training.recipes import Settings
from stiefelkit.training.recipes.papers import TENSORFLOW_RMSPROP, THEANO_RMSPROP

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
    model: str, n: int, paper: str, note: str, batch_size: int = BATCH, epochs: int = EPOCHS, **settings: Any
) -> Row:
    epoch = RECORDINGS // batch_size
    return Row(
        f"{model}-speech-{n}".replace("_", "-"),
        "speech",
        model,
        Settings(
            **settings,
            hidden_size=n,
            batch_size=batch_size,
            steps=epochs * epoch,
            seed=5544,
            eval_every=epoch,
            log_every=epoch // 4,
            checkpoint_every=epoch,
        ),
        paper,
        task_options={"train_size": RECORDINGS},
        note=NOTE + note,
    )


def _scornn(n: int, skew: float) -> Row:
    table = {"skew": {"optimizer": "rmsprop", "lr": skew, **TENSORFLOW_RMSPROP}}
    return _row("scornn", n, HELFRICH, OPEN, **ADAM, optimizers=table, options={"negative": n // 10})


def _lstm(n: int) -> Row:
    note = "; rate and bound are not in the paper"
    return _row("lstm", n, HELFRICH, OPEN + note, **ADAM, clip_norm=1.0, options={"forget_bias": -4.0})


def _exprnn(n: int) -> Row:
    """Batches of 128 for 1,200 epochs, A by RMSprop."""
    table = {"skew": {"optimizer": "rmsprop", "lr": 1e-4}}
    return _row("exprnn", n, LEZCANO, "", 128, 1_200, **ADAM, optimizers=table)


ROWS = (
    _scornn(224, 1e-3),
    _scornn(322, 1e-4),
    _scornn(425, 1e-4),
    *(_row("scurnn", n, MADURANGA, OPEN, **ADAM, rates={"skew": 1e-4}) for n in (128, 258)),
    *(
        _row("full_urnn", n, WISDOM, "", **THEANO, optimizers={"stiefel": {"optimizer": "multiplicative_cayley"}})
        for n in (128, 192, 256)
    ),
    *(_row("restricted_urnn", n, WISDOM, "", **THEANO) for n in (128, 192, 256)),
    *(_exprnn(n) for n in (224, 322, 425)),
    *(_lstm(n) for n in (84, 120, 158)),
)
