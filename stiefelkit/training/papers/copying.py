"""The copying problem: loss, drawn beside that of guessing."""

from typing import Any

from stiefelkit.training.papers.row import Row
from stiefelkit.training.recipes import (
    ADAGRAD,
    AUTHORS_ADAGRAD,
    AUTHORS_RMSPROP,
    TENSORFLOW_RMSPROP,
    THEANO_RMSPROP,
)

__all__ = ["ROWS"]

HELFRICH = "Helfrich, Willmott, Ye 2018, figure of the copying problem"
MADURANGA = "Maduranga, Helfrich, Ye 2019, figure of the copying problem"
WISDOM = "Wisdom et al. 2016, as drawn by Helfrich, Willmott, Ye 2018"
SIZES = {"train_size": 20_000, "test_size": 1_000}
FRESH = {**SIZES, "fresh": True}
ABOUT = 22_000
OF_WISDOM = {"train_size": 100_000, "test_size": 1_000}
LEZCANO = "Lezcano-Casado, Martinez-Rubio 2019, figure of the copying problem"
ONCE = {"train_size": 12_800, "test_size": 1_000, "fresh": True, "at_marker": True}
NOTE_ONCE = "the recall begins at the marker; an epoch is a hundred of the 4,000 steps, each with new sequences"
NOTE = "tested on a thousand sequences, in the paper on ten thousand"
CAYLEY: dict[str, Any] = {"optimizer": "multiplicative_cayley", "lr": 1e-3}
RMSPROP: dict[str, Any] = {"optimizer": "rmsprop", "optimizer_options": TENSORFLOW_RMSPROP}
JING = "Jing et al. 2017, figure of the copying problem"
MHAMMEDI = "Mhammedi et al. 2017, figure of the copying problem"
NOTE_LSTM = "the bound of the gradient is not in the paper"
NOTE_JING = "batches are drawn anew; whether the paper has a delay of 2,000 has not been checked"
NOTE_MHAMMEDI = "units, reflections, delay, batch and rate have not been checked against the paper"
THEANO: dict[str, Any] = {"optimizer": "rmsprop", "optimizer_options": THEANO_RMSPROP}
PLAIN: dict[str, Any] = {"optimizer": "rmsprop", "lr": 2e-4, "rates": {"skew": 2e-5}}
ADAM: dict[str, Any] = {"optimizer": "adam"}


COMMON: dict[str, Any] = {"seed": 5544, "eval_every": 100, "log_every": 25, "checkpoint_every": 250}


def _row(
    model: str,
    n: int,
    delay: int,
    paper: str,
    sizes: dict[str, Any] = SIZES,
    note: str = "",
    parameters: int | None = ABOUT,
    **settings: Any,
) -> Row:
    given = {"steps": 10_000, "batch_size": 20, "lr": 1e-3, **settings, **COMMON}
    facts: dict[str, Any] = {"note": note, "parameters": parameters, "goal": 1e-3}
    return Row.of(model, "copying", n, paper, given, delay, task_options={"T": delay, **sizes}, **facts)


def _table(skew: str, phase: str) -> dict[str, dict[str, Any]]:
    """Tables of A and of the phases, both at 1e-4."""
    of_skew = {"rmsprop": AUTHORS_RMSPROP, "adagrad": AUTHORS_ADAGRAD}[skew]
    of_phase = {"adagrad": ADAGRAD, "adam": {}}[phase]
    return {
        "skew": {"optimizer": skew, "lr": 1e-4, **of_skew},
        "phase": {"optimizer": phase, "lr": 1e-4, **of_phase},
    }


def _rows(delay: int) -> list[Row]:
    of_scurnn: dict[str, Any] = (
        {**ADAM, "optimizers": _table("adagrad", "adagrad")}
        if delay == 1000
        else {**RMSPROP, "optimizers": _table("rmsprop", "adam")}
    )
    return [
        _row("scornn", 190, delay, HELFRICH, **RMSPROP, rates={"skew": 1e-4}, options={"negative": 95}),
        _row("scurnn", 130, delay, MADURANGA, **of_scurnn),
        _row("lstm", 68, delay, HELFRICH, note=NOTE_LSTM, **RMSPROP, clip_norm=1.0),
        _row("full_urnn", 128, delay, WISDOM, OF_WISDOM, NOTE, **THEANO, optimizers={"stiefel": CAYLEY}),
        _row("restricted_urnn", 470, delay, WISDOM, OF_WISDOM, NOTE, **THEANO),
        _row("eurnn", 512, delay, JING, FRESH, NOTE_JING, None, **RMSPROP, batch_size=128, options={"layers": 2}),
        _row("ornn", 128, delay, MHAMMEDI, FRESH, NOTE_MHAMMEDI, None, **ADAM, options={"activation": "oplu"}),
        _row("exprnn", 190, delay, LEZCANO, ONCE, NOTE_ONCE, **PLAIN, batch_size=128, steps=4_000),
    ]


ROWS = (*_rows(1000), *_rows(2000))
