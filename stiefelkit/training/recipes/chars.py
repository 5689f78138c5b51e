"""How each model is trained on `chars`: nets of about 83,000 parameters for a text of 65 characters.

oRNN's paper has 512 units, 345 reflections, Adam at 1e-4 and one line at a time, which these settings say, too:
--reset line --hidden-size 512 --options.reflections 345 --lr 1e-4 --batch-size 1.
"""

from typing import Any

from stiefelkit.training.recipes import Recipe, Settings

__all__ = ["RECIPES"]


def _settings(hidden_size: int, lr: float = 1e-3, *, optimizer: str = "adam", **rest: Any) -> Settings:
    return Settings(
        hidden_size=hidden_size,
        steps=6000,
        batch_size=50,
        optimizer=optimizer,
        lr=lr,
        eval_every=500,
        checkpoint_every=500,
        **rest,
    )


RECIPES: dict[str, Recipe] = {
    "scornn": Recipe(_settings(297, rates={"skew": 1e-4}), options=lambda n: {"negative": n // 10}),
    "scurnn": Recipe(_settings(185, rates={"skew": 1e-4})),
    "full_urnn": Recipe(_settings(185, optimizer="multiplicative_cayley", rates={"stiefel": 1e-3})),
    "restricted_urnn": Recipe(_settings(307)),
    "ornn": Recipe(_settings(384), options=lambda n: {"reflections": n // 4}),
    "eurnn": Recipe(_settings(410), options=lambda n: {"layers": 2}),
    "exprnn": Recipe(_settings(297, rates={"skew": 1e-4})),
    "lie_urnn": Recipe(_settings(185)),
    "margin_rnn": Recipe(_settings(230, rates={"skew": 1e-4})),
    "goru": Recipe(_settings(128)),
    "irnn": Recipe(_settings(230, clip_norm=1.0)),
    "henaff_rnn": Recipe(_settings(230, clip_norm=1.0)),
    "gru": Recipe(_settings(128, 3e-3, clip_norm=1.0)),
    "lstm": Recipe(_settings(108, 3e-3, clip_norm=1.0)),
}
