"""How each model is trained on `mnist` and `pmnist`: seventy epochs, as the papers do, at about 16,000 parameters.

Models without such a figure in a paper get the rates of their kin. scoRNN's rho is n/10 where the pixels come in order
and n/2 where they are permuted.
"""

from typing import Any

from stiefelkit.training.recipes import Recipe, Settings
from stiefelkit.training.recipes.papers import ADAGRAD, AUTHORS_RMSPROP, TENSORFLOW_RMSPROP

__all__ = ["PERMUTED", "RECIPES", "TRAIN"]

EPOCHS = 70
TRAIN = 55_000
PLAIN_RMSPROP = {"alpha": 0.9}


def _settings(hidden_size: int, lr: float = 1e-3, *, batch_size: int = 50, **rest: Any) -> Settings:
    epoch = TRAIN // batch_size
    return Settings(
        **{"optimizer": "rmsprop", "optimizer_options": TENSORFLOW_RMSPROP, **rest},
        hidden_size=hidden_size,
        steps=EPOCHS * epoch,
        batch_size=batch_size,
        lr=lr,
        seed=5544,
        eval_every=epoch,
        log_every=100,
        checkpoint_every=epoch // 2,
    )


def _recipes(share: int) -> dict[str, Recipe]:
    adam: dict[str, Any] = {"optimizer": "adam", "optimizer_options": {}}
    return {
        "scornn": Recipe(_settings(170, rates={"skew": 1e-4}), options=lambda n: {"negative": n // share}),
        "scurnn": Recipe(
            _settings(
                116,
                **adam,
                optimizers={
                    "skew": {"optimizer": "rmsprop", "lr": 1e-4, **AUTHORS_RMSPROP},
                    "phase": {"optimizer": "adagrad", "lr": 1e-3, **ADAGRAD},
                },
            )
        ),
        "full_urnn": Recipe(
            _settings(
                116,
                optimizer="multiplicative_cayley",
                optimizer_options={"precondition": "rmsprop"},
                rates={"stiefel": 1e-6},
            )
        ),
        "restricted_urnn": Recipe(_settings(512, 1e-4, optimizer_options=PLAIN_RMSPROP)),
        "ornn": Recipe(_settings(256, 1e-2, **adam), options=lambda n: {"reflections": n // 8}),
        "eurnn": Recipe(_settings(1024, 1e-4, batch_size=128), options=lambda n: {"layers": 2}),
        "exprnn": Recipe(_settings(170, rates={"skew": 1e-4})),
        "lie_urnn": Recipe(_settings(116, rates={"skew": 1e-4}, clip_norm=1.0)),
        "margin_rnn": Recipe(_settings(120, 1e-4, optimizer_options=PLAIN_RMSPROP, clip_norm=100.0)),
        "goru": Recipe(_settings(64)),
        "irnn": Recipe(_settings(116, 1e-4, clip_norm=1.0)),
        "henaff_rnn": Recipe(_settings(116, 1e-4, clip_norm=1.0)),
        "gru": Recipe(_settings(70, clip_norm=1.0)),
        "lstm": Recipe(_settings(128, clip_norm=1.0)),
    }


RECIPES, PERMUTED = _recipes(10), _recipes(2)
