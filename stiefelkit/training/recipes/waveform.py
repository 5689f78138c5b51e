"""How each model is trained on `waveform`: small nets, a step for each reading of the one sequence."""

from typing import Any

from stiefelkit.training.recipes import Recipe, Settings

__all__ = ["RECIPES"]


def _settings(hidden_size: int, *, optimizer: str = "adam", **rest: Any) -> Settings:
    return Settings(
        hidden_size=hidden_size, steps=2000, batch_size=1, optimizer=optimizer, lr=1e-3, clip_norm=1.0, **rest
    )


RECIPES: dict[str, Recipe] = {
    "scornn": Recipe(_settings(64, rates={"skew": 1e-4}), options=lambda n: {"negative": n // 2}),
    "scurnn": Recipe(_settings(48, rates={"skew": 1e-4})),
    "full_urnn": Recipe(_settings(48, optimizer="multiplicative_cayley", rates={"stiefel": 1e-3})),
    "restricted_urnn": Recipe(_settings(128)),
    "ornn": Recipe(_settings(64), options=lambda n: {"reflections": n}),
    "eurnn": Recipe(_settings(64), options=lambda n: {"layers": 8}),
    "exprnn": Recipe(_settings(64, rates={"skew": 1e-4})),
    "lie_urnn": Recipe(_settings(48)),
    "margin_rnn": Recipe(_settings(48, rates={"skew": 1e-4})),
    "goru": Recipe(_settings(32)),
    "irnn": Recipe(_settings(48)),
    "henaff_rnn": Recipe(_settings(48)),
    "gru": Recipe(_settings(28)),
    "lstm": Recipe(_settings(24)),
}
