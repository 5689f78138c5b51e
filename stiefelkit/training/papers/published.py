"""The rows of published.toml."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

from stiefelkit.training.papers import Row
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import tasks

__all__ = ["ADDING", "CHARS", "COPYING", "MNIST", "SPEECH"]

FILE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
OF_ROW, OF_RUN = ({item.name for item in dataclasses.fields(kind)} for kind in (Row, Settings))


def _row(fields: dict[str, Any]) -> Row:
    task, model, by_recipe, end = (fields.pop(name, None) for name in ("task", "model", "recipe", "end"))
    settings = Settings(**{name: value for name, value in fields.items() if name in OF_RUN})
    if by_recipe:
        settings = tasks.get(task).recipes[model].filled(settings)
    options = {name: value for name, value in fields.items() if name not in OF_RUN | OF_ROW}
    facts = {name: value for name, value in fields.items() if name in OF_ROW}
    if "paper" not in facts:
        facts |= {"paper": FILE["inventors"][model], "note": "not in the paper: rates of its kin", "in_paper": False}
    if not facts.get("in_paper", True):
        facts["parameters"] = None
    name = f"{model}-{task}-{end or options.get('T', settings.hidden_size)}".replace("_", "-")
    return Row(name, task, model, settings, task_options=options, **facts)


def _rows(table: str) -> tuple[Row, ...]:
    """Returns the rows of a table, by their length or by how far they look."""
    blocks = FILE[table]
    rows = [_row({**FILE["common"][table], **block, **own}) for block in blocks for own in block.pop("each", [{}])]
    return tuple(sorted(rows, key=lambda row: [row.task_options.get(name, 0) for name in ("T", "ahead")]))


ADDING, CHARS, COPYING, MNIST, SPEECH = map(_rows, ("adding", "chars", "copying", "mnist", "speech"))
