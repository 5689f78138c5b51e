"""How each model is trained on `digits`; docs/models.md says what each reaches."""

from typing import Any

from stiefelkit.training.recipes import Recipe, Settings

__all__ = ["RECIPES"]


def _settings(hidden_size: int, optimizer: str, lr: float, **rest: Any) -> Settings:
    return Settings(
        **{"steps": 2400, "batch_size": 64, "schedule": "cosine", **rest},
        hidden_size=hidden_size,
        optimizer=optimizer,
        lr=lr,
    )


RECIPES: dict[str, Recipe] = {
    "scornn": Recipe(
        _settings(96, "rmsprop", 3e-3, rates={"skew": 3e-4}, optimizer_options={"alpha": 0.9}),
        options=lambda n: {"negative": n // 10},
    ),
    "scurnn": Recipe(_settings(64, "adam", 2e-3, rates={"skew": 1e-3})),
    "full_urnn": Recipe(
        _settings(
            64,
            "multiplicative_cayley",
            2e-3,
            batch_size=32,
            rates={"stiefel": 3e-4},
            optimizer_options={"precondition": "rmsprop"},
        )
    ),
    "restricted_urnn": Recipe(_settings(64, "adam", 2e-3, steps=1600)),
    "ornn": Recipe(_settings(96, "adam", 2e-3), options=lambda n: {"reflections": n // 4}),
    "eurnn": Recipe(_settings(64, "adam", 2e-3), options=lambda n: {"layers": 8}),
    "exprnn": Recipe(_settings(96, "adam", 2e-3, rates={"skew": 3e-4})),
    "lie_urnn": Recipe(_settings(64, "adam", 2e-3, rates={"skew": 1e-3})),
    "margin_rnn": Recipe(_settings(96, "adam", 1e-3, rates={"skew": 3e-4})),
    "irnn": Recipe(_settings(96, "adam", 2e-3, steps=6000, clip_norm=1.0)),
    "henaff_rnn": Recipe(_settings(96, "adam", 1e-3, clip_norm=1.0)),
    "goru": Recipe(_settings(64, "adam", 3e-3)),
    "gru": Recipe(_settings(64, "adam", 5e-3, clip_norm=1.0)),
    "lstm": Recipe(_settings(96, "adam", 3e-3, clip_norm=1.0)),
}
