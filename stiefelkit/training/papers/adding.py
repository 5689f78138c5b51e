"""The adding problem: mean squared error, drawn beside that of answering one."""

import dataclasses
import math
from typing import Any

from stiefelkit.training.papers.row import Row, beside
from stiefelkit.training.recipes import AUTHORS_RMSPROP, TENSORFLOW_RMSPROP, Settings
from stiefelkit.training.tasks.adding import RECIPES

__all__ = ["ROWS"]

HELFRICH = "Helfrich, Willmott, Ye 2018, figure of the adding problem"
MADURANGA = "Maduranga, Helfrich, Ye 2019, figure of the adding problem"
AS_DRAWN = "as drawn by Helfrich, Willmott, Ye 2018"
MHAMMEDI = f"Mhammedi et al. 2017, {AS_DRAWN}"
WISDOM = f"Wisdom et al. 2016, {AS_DRAWN}"
JING = f"Jing et al. 2017, {AS_DRAWN}"
SIZES = {"train_size": 100_000, "test_size": 10_000}
ADAM: dict[str, Any] = {"optimizer": "adam"}
RMSPROP: dict[str, Any] = {"optimizer": "rmsprop", "optimizer_options": TENSORFLOW_RMSPROP}


COMMON: dict[str, Any] = {"batch_size": 50, "seed": 5544, "eval_every": 250, "log_every": 50, "checkpoint_every": 250}
EPOCH = 2_000
GOAL = 1e-2
ABOUT = 15_000
FORGET_BIAS = {200: 2.0, 400: 4.0, 750: 0.0}
"""By length, as scoRNN's text has it."""
OTHERS = ("exprnn", "goru", "lie_urnn", "margin_rnn", "irnn", "henaff_rnn", "gru")


def _options(model: str, length: int) -> dict[str, Any]:
    return {"T": length, **SIZES, "fresh": model == "ornn"}


def _row(
    model: str,
    n: int,
    length: int,
    paper: str,
    note: str = "",
    epochs: int = 10,
    in_paper: bool = True,
    parameters: int = ABOUT,
    **settings: Any,
) -> Row:
    given = {"optimizer": "adam", "lr": 1e-3, **settings, "steps": epochs * EPOCH, **COMMON}
    printed = parameters if in_paper else None
    facts: dict[str, Any] = {"note": note, "in_paper": in_paper, "parameters": printed, "goal": GOAL}
    return Row.of(model, "adding", n, paper, given, length, task_options=_options(model, length), **facts)


def _scornn(length: int) -> Row:
    negative = 85 if length == 200 else 119
    table = {"skew": {"optimizer": "rmsprop", "lr": 1e-4, **TENSORFLOW_RMSPROP}}
    return _row("scornn", 170, length, HELFRICH, optimizers=table, options={"negative": negative})


def _scurnn(length: int) -> Row:
    rest: dict[str, Any] = ADAM if length < 750 else RMSPROP
    table = {
        "skew": {"optimizer": "rmsprop", "lr": 1e-3 if length < 750 else 1e-4, **AUTHORS_RMSPROP},
        "phase": {"optimizer": "adam", "lr": 1e-3},
    }
    drawn = length != 400
    note = "" if drawn else "the paper has no such length: the rates are those of 200"
    options = {"arc": 2 * math.pi}
    return _row("scurnn", 116, length, MADURANGA, note, 30, drawn, **rest, optimizers=table, options=options)


def _beside(model: str, length: int) -> Row:
    settings = Settings(steps=10 * EPOCH, **COMMON)
    return beside(model, "adding", RECIPES, settings, length, task_options=_options(model, length), goal=GOAL)


def _rows(length: int) -> list[Row]:
    rates = "rates are those of its kin"
    mesh: tuple[dict[str, Any], int] = ({"layers": 2}, 3_000) if length < 750 else ({"layout": "fft"}, 7_000)
    cayley: dict[str, Any] = {"optimizer": "multiplicative_cayley", "rates": {"stiefel": 1e-3}}
    lstm = "the bound of the gradient is not in the paper"
    forget = {"forget_bias": FORGET_BIAS[length]}
    return [
        _scornn(length),
        _scurnn(length),
        _row("ornn", 128, length, MHAMMEDI, parameters=2_600, lr=1e-2, options={"reflections": 16}),
        _row("lstm", 60, length, HELFRICH, lstm, lr=1e-2, clip_norm=1.0, options=forget),
        _row("full_urnn", 120, length, WISDOM, rates, **cayley),
        _row("restricted_urnn", 950, length, WISDOM, rates),
        _row("eurnn", 512, length, JING, rates, parameters=mesh[1], options=mesh[0]),
        *(_beside(model, length) for model in OTHERS),
    ]


def _bounded() -> Row:
    """The longest delay for scuRNN with a bound of the gradient, where the authors' modReLU has an epsilon."""
    row = _scurnn(750)
    settings = dataclasses.replace(row.settings, clip_norm=10.0)
    note = "the paper's recipe, but for the bound of the gradient"
    return dataclasses.replace(row, name="scurnn-adding-bounded-750", settings=settings, note=note)


def _unbiased() -> Row:
    """The longest delay for scuRNN from an isometry, by the rates of the shorter ones."""
    options = {"arc": 2 * math.pi, "bias_bound": 0.0}
    settings = dataclasses.replace(_scurnn(400).settings, options=options)
    note = "the bias begins at zero, the rates are those of 200"
    return dataclasses.replace(_scurnn(750), name="scurnn-adding-unbiased-750", settings=settings, note=note)


def _slow() -> Row:
    """As that, W at a tenth of the rates: over T steps a change of a phase counts T times."""
    row = _unbiased()
    table = {name: {**options, "lr": 1e-4} for name, options in row.settings.optimizers.items()}
    settings = dataclasses.replace(row.settings, optimizers=table)
    note = "the bias begins at zero, the rates of W are a tenth of those of 200"
    return dataclasses.replace(row, name="scurnn-adding-slow-750", settings=settings, note=note)


ROWS = (*(row for length in (200, 400, 750) for row in _rows(length)), _bounded(), _unbiased(), _slow())
