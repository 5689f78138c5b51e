"""`stiefelkit list`."""

from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from stiefelkit import available, models
from stiefelkit.errors import StiefelkitError
from stiefelkit.experiments.config import optimizers
from stiefelkit.experiments.tasks import tasks

__all__ = ["show"]


def show() -> int:
    """Shows the parametrizations with their traits, the optimizers, the models and the tasks, plugins included."""
    console = Console()
    table = Table("parametrization", "map", "image", "fields", "coordinates", "cost", title="Parametrizations")
    for name, cls in available().items():
        table.add_row(name, _first_line(cls), *_traits(cls))
    console.print(table)
    table = Table("optimizer", "moves", title="Optimizers")
    for name, cls in optimizers.available().items():
        table.add_row(name, _moved(cls))
    console.print(table)
    for title, found in (("Models", models.available()), ("Tasks", tasks.available())):
        table = Table(title[:-1].lower(), "what it is", title=title)
        for name, target in found.items():
            table.add_row(name, _first_line(target))
        console.print(table)
    return 0


def _traits(cls: Any) -> list[str]:
    fields, members = [], []
    for field, dtype in (("real", torch.float32), ("complex", torch.complex64)):
        if cls.supports((4, 4), dtype) is not None:
            continue
        try:
            members.append(cls((4, 4), dtype=dtype))
        except StiefelkitError:
            continue
        fields.append(field)
    if not members:
        return ["", "", ", ".join(cls.coordinate_names), ""]
    traits = members[0].traits
    words = ["onto" if traits.onto else traits.component]
    words += [] if traits.invertible else ["not invertible"]
    words += [] if traits.exact else ["not exact"]
    return [", ".join(words), ", ".join(fields), ", ".join(cls.coordinate_names), f"n^{traits.cost_exponent:g}"]


def _moved(optimizer: Any) -> str:
    if not getattr(optimizer, "moves_frames", False):
        return "all parameters but frames"
    plain = getattr(optimizer, "plain", None)
    return "frames" if plain is None else f"frames, and all other parameters as {plain.__name__} does"


def _first_line(target: Any) -> str:
    return (target.__doc__ or "").strip().partition("\n")[0]
