"""How each model is trained on each task, one file a task."""

from stiefelkit.training.recipes.recipe import Option, Recipe, Settings

__all__ = ["Option", "Recipe", "Settings"]
