"""Pixel-by-pixel MNIST, in order and permuted: test accuracy of the best of seventy epochs."""

import dataclasses
from typing import Any

from stiefelkit.training.papers.row import Row, beside
from stiefelkit.training.recipes import ADAGRAD, AUTHORS_RMSPROP, Settings
from stiefelkit.training.tasks.mnist import ALL_TRAIN, PERMUTED, RECIPES

__all__ = ["ROWS"]

HELFRICH = "Helfrich, Willmott, Ye 2018, table of MNIST"
MADURANGA = "Maduranga, Helfrich, Ye 2019, table of MNIST"
WISDOM = "Wisdom et al. 2016, run by Helfrich, Willmott, Ye 2018"
LEZCANO = "Lezcano-Casado, Martinez-Rubio 2019, table of MNIST"
NOTE_EXP = "figures and rates have not been checked against the paper's text"
NOTE_FIGURES = "figures have not been checked against the paper's text"
NOTE_LSTM = "the bound of the gradient is not in the paper"
NOTE_REFLECTIONS = "drawn in the paper; its numbers of reflections have not been checked"
REFLECTIONS = (2, 8, 32, 128)


def _rows(
    model: str,
    n: int,
    figures: tuple[float | None, float | None],
    paper: str,
    parameters: int,
    note: str = "",
    **settings: Any,
) -> list[Row]:
    """The rows of both tasks, of those that there is a figure of."""
    pairs = zip(("mnist", "pmnist"), (RECIPES, PERMUTED), figures, strict=True)
    return [
        Row(
            f"{model}-{task}-{n}".replace("_", "-"),
            task,
            model,
            recipes[model].filled(Settings(hidden_size=n, **settings)),
            paper,
            figure,
            note=note,
            parameters=parameters,
        )
        for task, recipes, figure in pairs
        if figure is not None
    ]


def _scurnn(skew: float, phase: float) -> dict[str, Any]:
    return {
        "skew": {"optimizer": "rmsprop", "lr": skew, **AUTHORS_RMSPROP},
        "phase": {"optimizer": "adagrad", "lr": phase, **ADAGRAD},
    }


def _exprnn(n: int, figures: tuple[float, float], parameters: int, rates: tuple[float, float]) -> list[Row]:
    """Rows of expRNN: torch's RMSprop as it is, A at a tenth of the rate, batches of 128."""
    epoch = ALL_TRAIN // 128
    settings: dict[str, Any] = {
        "batch_size": 128,
        "steps": 70 * epoch,
        "eval_every": epoch,
        "checkpoint_every": epoch // 2,
        "optimizer_options": {"alpha": 0.99, "eps": 1e-8, "init_acc": 0, "eps_inside": False},
    }
    in_order, permuted = (
        _rows("exprnn", n, of_task, LEZCANO, parameters, NOTE_EXP, lr=rate, rates={"skew": rate / 10}, **settings)
        for of_task, rate in zip(((figures[0], None), (None, figures[1])), rates, strict=True)
    )
    return [*in_order, *permuted]


def _reflections() -> list[Row]:
    """Rows of oRNN with ever more reflections."""
    return [
        Row(
            f"ornn-mnist-m{reflections}-128",
            "mnist",
            "ornn",
            RECIPES["ornn"].filled(Settings(hidden_size=128, options={"reflections": reflections})),
            "Mhammedi et al. 2017, figure of the number of reflections",
            note=NOTE_REFLECTIONS,
        )
        for reflections in REFLECTIONS
    ]


def _ours() -> list[Row]:
    """Recipes that were chosen on validation examples, at the sizes of the papers'."""
    note = "a recipe of our own, chosen on validation examples; the figure is that of the paper's recipe"
    adam: dict[str, Any] = {"optimizer": "adam", "optimizer_options": {}, "rates": {"skew": 1e-4}}
    return [
        Row(
            f"{model}-pmnist-{schedule}-{n}",
            "pmnist",
            model,
            PERMUTED[model].filled(_along_cosine(**settings)),
            paper,
            figure,
            note=note,
        )
        for model, schedule, n, figure, paper, settings in (
            ("scornn", "cosine", 170, 0.943, HELFRICH, {"batch_size": 25, "lr": 7e-4, **adam}),
            ("scornn", "long-cosine", 170, 0.943, HELFRICH, {"batch_size": 50, "epochs": 50, **adam}),
            ("scurnn", "cosine", 116, 0.949, MADURANGA, {"batch_size": 50}),
        )
    ]


def _epsilon(row: Row) -> Row:
    """That of scuRNN with the modReLU of its paper."""
    settings = dataclasses.replace(row.settings, options={**row.settings.options, "activation": "modrelu_epsilon"})
    name = row.name.replace("-116", "-epsilon-116")
    return dataclasses.replace(row, name=name, settings=settings, note="with the modReLU of equation 5")


def _along_cosine(batch_size: int, epochs: int = 30, **settings: Any) -> Settings:
    epoch = ALL_TRAIN // batch_size
    return Settings(
        schedule="cosine",
        batch_size=batch_size,
        steps=epochs * epoch,
        eval_every=epoch,
        checkpoint_every=epoch // 2,
        **settings,
    )


ROWS = (
    *_rows("scornn", 170, (0.973, 0.943), HELFRICH, 16_000),
    *_ours(),
    *_rows("scornn", 360, (0.983, 0.962), HELFRICH, 69_000, rates={"skew": 1e-5}),
    *_rows("scornn", 512, (0.985, 0.966), HELFRICH, 137_000, rates={"skew": 1e-5}),
    *_rows("scurnn", 116, (0.976, 0.949), MADURANGA, 16_000),
    *map(_epsilon, _rows("scurnn", 116, (0.976, 0.949), MADURANGA, 16_000)),
    *_rows("scurnn", 250, (0.983, None), MADURANGA, 69_000, optimizers=_scurnn(1e-5, 1e-4)),
    *_rows("scurnn", 250, (None, 0.962), MADURANGA, 69_000, optimizers=_scurnn(1e-5, 1e-3)),
    *_rows("lstm", 128, (0.987, 0.920), HELFRICH, 68_000, NOTE_LSTM),
    *_rows("lstm", 256, (0.989, 0.929), HELFRICH, 270_000, NOTE_LSTM),
    *_rows("lstm", 512, (0.985, 0.920), HELFRICH, 1_058_000, NOTE_LSTM),
    *_rows("restricted_urnn", 512, (0.976, 0.945), WISDOM, 16_000),
    *_rows("restricted_urnn", 2170, (0.984, 0.953), WISDOM, 69_000, NOTE_FIGURES),
    *_rows("full_urnn", 116, (0.947, 0.925), WISDOM, 16_000),
    *_rows("full_urnn", 512, (0.974, 0.947), WISDOM, 270_000, lr=1e-4),
    *_exprnn(170, (0.980, 0.949), 16_000, (7e-4, 1e-3)),
    *_exprnn(360, (0.984, 0.962), 69_000, (5e-4, 7e-4)),
    *_exprnn(512, (0.987, 0.966), 137_000, (3e-4, 5e-4)),
    *_rows("ornn", 256, (0.972, None), "Mhammedi et al. 2017", 11_000, "batch and rate are not in the paper"),
    *_reflections(),
    *_rows("eurnn", 512, (None, 0.937), "Jing et al. 2017", 9_000, "the paper's permutation is another"),
    beside("ornn", "pmnist", PERMUTED),
    *(
        beside(model, task, recipes)
        for model in ("eurnn", "goru", "lie_urnn", "margin_rnn", "irnn", "henaff_rnn", "gru")
        for task, recipes in (("mnist", RECIPES), ("pmnist", PERMUTED))
    ),
)
