"""How each model is trained on `adding`: four of the papers' ten epochs."""

from typing import Any

from stiefelkit.training.recipes import Recipe, Settings

__all__ = ["RECIPES"]


def _settings(hidden_size: int, lr: float = 1e-3, *, optimizer: str = "adam", **rest: Any) -> Settings:
    return Settings(hidden_size=hidden_size, steps=8000, batch_size=50, optimizer=optimizer, lr=lr, **rest)


RECIPES: dict[str, Recipe] = {
    "scornn": Recipe(_settings(170, rates={"skew": 1e-4}), options=lambda n: {"negative": n // 2}),
    "scurnn": Recipe(_settings(116, rates={"skew": 1e-3})),
    "full_urnn": Recipe(_settings(116, optimizer="multiplicative_cayley", rates={"stiefel": 1e-3})),
    "restricted_urnn": Recipe(_settings(128)),
    "ornn": Recipe(_settings(128, 1e-2), options=lambda n: {"reflections": n // 8}),
    "eurnn": Recipe(_settings(128), options=lambda n: {"layers": 2}),
    "exprnn": Recipe(_settings(170, rates={"skew": 1e-4})),
    "lie_urnn": Recipe(_settings(116)),
    "margin_rnn": Recipe(_settings(128, rates={"skew": 1e-4})),
    "goru": Recipe(_settings(128)),
    "irnn": Recipe(_settings(100, 1e-4, clip_norm=1.0)),
    "henaff_rnn": Recipe(_settings(128, clip_norm=1.0)),
    "gru": Recipe(_settings(60, 1e-2, clip_norm=1.0)),
    "lstm": Recipe(_settings(60, 1e-2, clip_norm=1.0)),
}
