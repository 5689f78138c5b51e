"""How each model is trained on `copying`: nets of 64 units, in a thousand steps."""

from typing import Any

from stiefelkit.training.recipes import Option, Recipe, Settings

__all__ = ["RECIPES"]


def _settings(lr: float, hidden_size: int = 64, *, optimizer: str = "rmsprop", **rest: Any) -> Settings:
    options: dict[str, Option] = {"alpha": 0.9} if optimizer == "rmsprop" else {}
    return Settings(
        hidden_size=hidden_size,
        steps=1000,
        batch_size=20,
        optimizer=optimizer,
        lr=lr,
        optimizer_options=options,
        **rest,
    )


RECIPES: dict[str, Recipe] = {
    "scornn": Recipe(_settings(2e-3, rates={"skew": 2e-4}), options=lambda n: {"negative": n // 2}),
    "scurnn": Recipe(_settings(1e-3, rates={"skew": 1e-4})),
    "full_urnn": Recipe(_settings(1e-3, optimizer="multiplicative_cayley", rates={"stiefel": 1e-3})),
    "restricted_urnn": Recipe(_settings(1e-3)),
    "ornn": Recipe(_settings(1e-3)),
    "eurnn": Recipe(_settings(1e-3), options=lambda n: {"layers": 2}),
    "exprnn": Recipe(_settings(2e-3, rates={"skew": 2e-4})),
    "lie_urnn": Recipe(_settings(1e-3)),
    "margin_rnn": Recipe(_settings(1e-3, rates={"skew": 1e-4})),
    "goru": Recipe(_settings(1e-3)),
    "irnn": Recipe(_settings(1e-3, clip_norm=1.0)),
    "henaff_rnn": Recipe(_settings(1e-3, clip_norm=1.0)),
    "gru": Recipe(_settings(1e-3, 68, clip_norm=1.0)),
    "lstm": Recipe(_settings(1e-3, 68, clip_norm=1.0)),
}
