"""How each model is trained on `speech`: nets of about 83,000 parameters, the smallest size of the papers' tables.

The sizes and rates of scornn, scurnn, lstm, full_urnn and restricted_urnn are the papers', but for the optimizer of
scornn's `skew`, RMSprop there, and the rate of scurnn, 1e-3 there, with which it takes several times the steps: its
first answers are far too loud. The mesh of goru wants a power of two, which leaves it larger. Batches of 28 are those
of Wisdom et al. 2016; models other than scornn, scurnn and lstm have not been tried.
"""

from typing import Any

from stiefelkit.training.recipes import Recipe, Settings

__all__ = ["RECIPES"]


def _settings(hidden_size: int, lr: float = 1e-3, *, optimizer: str = "adam", **rest: Any) -> Settings:
    return Settings(
        hidden_size=hidden_size,
        steps=3000,
        batch_size=28,
        optimizer=optimizer,
        lr=lr,
        eval_every=300,
        checkpoint_every=300,
        **rest,
    )


RECIPES: dict[str, Recipe] = {
    "scornn": Recipe(_settings(224, rates={"skew": 1e-3}), options=lambda n: {"negative": n // 10}),
    "scurnn": Recipe(_settings(128, 5e-3, rates={"skew": 1e-4})),
    "full_urnn": Recipe(_settings(128, optimizer="multiplicative_cayley", rates={"stiefel": 1e-3})),
    "restricted_urnn": Recipe(_settings(158)),
    "ornn": Recipe(_settings(256), options=lambda n: {"reflections": n // 4}),
    "eurnn": Recipe(_settings(212), options=lambda n: {"layers": 2}),
    "exprnn": Recipe(_settings(224, rates={"skew": 1e-4})),
    "lie_urnn": Recipe(_settings(128)),
    "margin_rnn": Recipe(_settings(187, rates={"skew": 1e-4})),
    "goru": Recipe(_settings(128)),
    "irnn": Recipe(_settings(187, clip_norm=1.0)),
    "henaff_rnn": Recipe(_settings(187, clip_norm=1.0)),
    "gru": Recipe(_settings(101, clip_norm=1.0)),
    "lstm": Recipe(_settings(84, clip_norm=1.0)),
}
