"""The experiments of papers: a row of their tables, the rows by name, and the options by which one is run again."""

import dataclasses
import functools
import itertools
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stiefelkit.errors import UnknownNameError, did_you_mean
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task, create, tasks


@dataclass(frozen=True)
class Row:
    """One experiment of a paper.

    Args:
        settings: how it was trained; what the paper leaves open has the defaults of a run.
        paper: authors, year, and where in the paper.
        figure: what the paper reports, in the task's headline; None where nothing can be compared.
        note: in what this differs from the paper, or what the paper leaves open.
        goal: a loss of the held-out set; the report says at which step a run was first below it.
        parameters: trained numbers, as the paper prints them, rounded.
    """

    name: str
    task: str
    model: str
    settings: Settings
    paper: str
    figure: float | None = None
    task_options: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    goal: float | None = None
    in_paper: bool = True
    parameters: int | None = None

    @classmethod
    def of(cls, name: str, config: Config) -> "Row":
        """Returns what a run is that no paper has, with the goal of others of its task."""
        goal = next((row.goal for row in rows() if row.task == config.task), None)
        settings = Settings(**{item.name: vars(config)[item.name] for item in dataclasses.fields(Settings)})
        return cls(name, config.task, config.model, settings, "", None, config.task_options, "", goal, False)

    def build_task(self) -> Task:
        """Returns the task."""
        return create(self.task, self.task_options)

    def config(self, settings: Settings | None = None) -> Config:
        """Returns the config of a run, other settings over those of the paper."""
        filled = (settings or Settings()).with_defaults(self.settings)
        return Config(
            task=self.task, model=self.model, task_options=dataclasses.asdict(self.build_task()), **filled.given()
        )

    @property
    def printed(self) -> str:
        """The figure of the paper, or what stands in its place."""
        if self.figure is not None:
            return self.said(self.figure)
        return "none" if not self.in_paper else "curve" if self.goal is not None else "table"

    @property
    def by_accuracy(self) -> bool:
        """True if figures are accuracies, False if losses."""
        return self.build_task().headline == "accuracy"

    def said(self, value: float) -> str:
        """Returns a score in words."""
        return f"{value:.4f}" if self.by_accuracy else f"{value:.3g}"

    @property
    def label(self) -> str:
        """Model, units, what the name has besides, and the paper's figure: its own among the rows of a picture."""
        own = self.name.removeprefix(f"{self.model}-{self.task}".replace("_", "-"))
        words = [self.model, str(self.settings.hidden_size), *own.split("-")[1:-1]]
        return " ".join(words + [f"({self.printed})"] * (self.figure is not None))

    @property
    def group(self) -> str:
        """The task of the rows of one figure and, where papers have several, its length or how far it looks."""
        own = (f"{name}={self.task_options[name]}" for name in ("T", "ahead") if name in self.task_options)
        return " ".join([self.task, *own])

    @property
    def epoch(self) -> int:
        """Steps of an epoch of the training data."""
        return self.build_task().batches_per_epoch(self.settings.batch_size or 0)

    @property
    def epochs(self) -> float:
        """Epochs of the paper."""
        return (self.settings.steps or 0) / self.epoch


def find(name: str) -> Row:
    """Returns the row of a name; raises UnknownNameError if there is none.

    >>> find("scornn-mnist-170").figure
    0.973
    """
    known = {row.name: row for row in rows()}
    if name not in known:
        raise UnknownNameError(f"No experiment is named {name!r}{did_you_mean(name, known)}")
    return known[name]


@functools.cache
def rows() -> tuple[Row, ...]:
    """Returns all rows of papers.toml, table by table: those of a table by their length, or by how far they look."""
    file = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    common, inventors = file.pop("common"), file.pop("inventors")
    read = []
    for table in sorted(common):
        blocks = [
            _with_defaults(own, _with_defaults(block, common[table]))
            for block in file[table]
            for own in block.get("each", [{}])
        ]
        found = [_row(fields, inventors) for block in blocks for fields in _each(block, common[table])]
        read += sorted(found, key=lambda row: [row.task_options.get(option, 0) for option in ("T", "ahead")])
    return tuple(read)


def _with_defaults(own: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys of both, those of `own` before the defaults, in tables of tables, too."""
    both = {key: value for key, value in own.items() if isinstance(value, dict) and key in defaults}
    return defaults | own | {key: _with_defaults(value, defaults[key]) for key, value in both.items()}


def _each(block: dict[str, Any], common: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Gives the fields of each row of a block, in which several models, tasks or lengths are lists."""
    lists = {key: block[key] for key in ("model", "task", "T") if isinstance(block.get(key), list)}
    for values in itertools.product(*lists.values()):
        fields = block | dict(zip(lists, values, strict=True))
        if isinstance(fields.get("figure"), list):
            fields["figure"] = fields["figure"][common["task"].index(fields["task"])]
        yield fields


def _row(fields: dict[str, Any], inventors: Mapping[str, str]) -> Row:
    own, of_run = ({item.name for item in dataclasses.fields(kind)} for kind in (Row, Settings))
    task, model, by_recipe, end, _ = (fields.pop(name, None) for name in ("task", "model", "recipe", "end", "each"))
    fields |= {f"{what}_every": steps for what, steps in fields.pop("every", {}).items()}
    settings = Settings(**{name: value for name, value in fields.items() if name in of_run})
    if by_recipe:
        settings = tasks.get(task).recipes[model].filled(settings)
    options = {name: value for name, value in fields.items() if name not in of_run | own}
    facts = {name: value for name, value in fields.items() if name in own}
    if "paper" not in facts:
        facts |= {"paper": inventors[model], "note": "not in the paper: the rates of a similar row", "in_paper": False}
    if not facts.get("in_paper", True):
        facts["parameters"] = None
    name = f"{model}-{task}-{end or options.get('T', settings.hidden_size)}".replace("_", "-")
    return Row(name, task, model, settings, task_options=options, **facts)
