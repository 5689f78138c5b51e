"""The plan of a figure of gradients. Read for help, without torch."""

import dataclasses
from dataclasses import dataclass, field

from stiefelkit.errors import OptionError
from stiefelkit.numbers import settle_, whole
from stiefelkit.training.config import Config
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task, tasks

__all__ = ["GradientPlan"]

WHO = "The figure of gradients"
LENGTH = 500
"""Steps of a sequence, where the task has that option and nothing else is asked for."""


@dataclass(frozen=True)
class GradientPlan:
    """What to train, and when to look.

    Args:
        task: name of the task; see stiefelkit list.
        T: length of the sequences, for tasks that have it.
        models: names of models, separated by commas.
        iterations: optimizer steps after which to look, separated by commas; 0 for the initial weights.
        settings: over the recipe of the task for each model.
    """

    task: str = "adding"
    T: int | None = field(default=None, metadata={"shown": LENGTH})
    models: tuple[str, ...] = ("scornn", "lstm")
    iterations: tuple[int, ...] = field(default=(0, 300), metadata={"names": ("--steps", "--iterations")})
    settings: Settings = field(
        default_factory=lambda: Settings(seed=0, threads=1, device="cpu"),
        metadata={
            "fields": ("hidden_size", "batch_size", "lr", "clip_norm", "seed", "threads", "device"),
            "shown": "that of the recipe",
        },
    )

    def __post_init__(self) -> None:
        settle_(self)
        for what, choice in (("model", self.models), ("iteration", self.iterations)):
            if not choice:
                raise OptionError(f"{WHO} needs one {what} or more, got none.")
        for iteration in self.iterations:
            whole(0).require(WHO, "iterations", iteration)
        if self.T is not None and not self._has_length():
            raise OptionError(f"{WHO} needs a task that has the option T, got {self.task!r}; leave T out.")
        self.configs()

    def build_task(self) -> Task:
        """Returns the task."""
        length = {"T": LENGTH if self.T is None else self.T} if self._has_length() else {}
        return tasks.get(self.task)(**length)

    def configs(self) -> dict[str, Config]:
        """Model to the run that its recipe describes, made as long as the last iteration if it is shorter."""
        task, last = self.build_task(), max(self.iterations)
        configs = {name: Config.resolve(task, name, self.settings) for name in self.models}
        return {name: dataclasses.replace(config, steps=max(config.steps, last)) for name, config in configs.items()}

    def _has_length(self) -> bool:
        return "T" in [option.name for option in dataclasses.fields(tasks.get(self.task))]
