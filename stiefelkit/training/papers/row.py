"""A line of a table in a paper: what was trained, and what came of it."""

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task, create

if TYPE_CHECKING:
    from stiefelkit.training.config import Config

__all__ = ["Row"]


@dataclass(frozen=True)
class Row:
    """One experiment of a paper.

    Args:
        name: by which it is asked for: the model, the task, the size.
        task: registry name of the task.
        model: name of the model.
        settings: how it was trained; what the paper leaves open has the defaults of a run.
        paper: authors, year, and where in the paper.
        figure: what the paper reports, in the task's headline; None where it draws a curve only, has no such
            experiment, or reports what cannot be compared.
        task_options: the options of the task.
        note: in what this differs from the paper, or what the paper leaves open.
        goal: a loss of the held-out set; the report says at which step a run was first below it.
        in_paper: whether the paper has this experiment.
        parameters: trained numbers, as the paper prints them: rounded; None where it does not.
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

    def build_task(self) -> Task:
        """Returns the task."""
        return create(self.task, self.task_options)

    def config(self, settings: Settings | None = None) -> "Config":
        """Returns the config of a run, other settings over those of the paper."""
        from stiefelkit.training.config import Config

        filled = (settings or Settings()).over(self.settings)
        return Config(task=self.task, model=self.model, task_options=self.build_task().options(), **filled.given())

    @property
    def authors(self) -> str:
        """Authors and year: `paper` without the place in it."""
        return re.sub(r"(\d{4}).*", r"\1", self.paper)

    @property
    def kind_of_figure(self) -> str:
        """What stands where a figure in numbers would."""
        if not self.in_paper:
            return "none"
        return "curve" if self.goal is not None else "table"

    @property
    def label(self) -> str:
        """Model, units, and what the name has besides: "scornn 170 cosine"; its own among the rows of a figure."""
        own = self.name.removeprefix(f"{self.model}-{self.task}".replace("_", "-"))
        return " ".join([self.model, str(self.settings.hidden_size), *own.split("-")[1:-1]])

    @property
    def group(self) -> str:
        """What rows of one figure share: the task and, where papers have several, its length or how far it looks."""
        own = (f"{name}={self.task_options[name]}" for name in ("T", "ahead") if name in self.task_options)
        return " ".join([self.task, *own])

    @property
    def epoch(self) -> int:
        """Steps of an epoch of the training data."""
        return self.build_task().batches_per_epoch(self.settings.batch_size or 0)
