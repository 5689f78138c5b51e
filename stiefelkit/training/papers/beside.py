"""Rows of systems whose papers have no such experiment, by the recipe of the task: so a table holds every system."""

from collections.abc import Mapping
from typing import Any

from stiefelkit.training.papers.row import Row
from stiefelkit.training.recipes import Recipe, Settings

__all__ = ["beside"]

PAPERS = {
    "full_urnn": "Wisdom et al. 2016",
    "restricted_urnn": "Arjovsky, Shah, Bengio 2016",
    "ornn": "Mhammedi et al. 2017",
    "eurnn": "Jing et al. 2017",
    "exprnn": "Lezcano-Casado, Martinez-Rubio 2019",
    "goru": "Jing et al. 2019",
    "lie_urnn": "Hyland, Ratsch 2017",
    "margin_rnn": "Vorontsov et al. 2017",
    "irnn": "Le, Jaitly, Hinton 2015",
    "henaff_rnn": "Henaff, Szlam, LeCun 2016",
    "gru": "Cho et al. 2014",
}


def beside(
    model: str,
    task: str,
    recipes: Mapping[str, Recipe],
    settings: Settings | None = None,
    size: int | None = None,
    **row: Any,
) -> Row:
    """Returns the row of a system.

    Args:
        model: the system.
        task: registry name of the task.
        recipes: those of the task, by model.
        settings: what goes before the recipe.
        size: the end of the row's name; the hidden size if left out.
        row: further fields of the row.
    """
    filled = recipes[model].filled(settings or Settings())
    name = f"{model}-{task}-{size or filled.hidden_size}".replace("_", "-")
    return Row(
        name, task, model, filled, PAPERS[model], note="not in the paper: rates of its kin", in_paper=False, **row
    )
