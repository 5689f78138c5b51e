"""The complete description of a run: what is written into its folder and can be read back."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from stiefelkit import checks
from stiefelkit.errors import OptimizerError, OptionError, RunError, UnknownNameError, did_you_mean, needs
from stiefelkit.numbers import above, at_least, integer, one_of, validate_fields_
from stiefelkit.optim import optimizers
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import Task, create

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.optim import Optimizer

SUBJECT = "Training"  # the first words of error messages
SIZES = dict.fromkeys(("hidden_size", "steps", "batch_size", "eval_every", "log_every", "checkpoint_every"), integer(1))
TABLES = ("task_options", "rates", "optimizers", "options", "optimizer_options")
KINDS = dict.fromkeys(TABLES, checks.of_type(dict)) | {"seed": checks.SEED, "threads": checks.THREADS}
KINDS |= {"schedule": one_of("constant", "cosine"), "lr": above(0), "clip_norm": at_least(0)}
BY_COORDINATE = ("rates", "optimizers")  # fields whose keys are names of coordinates
HANDLED = ("params", "lr", "capturable", "differentiable", "foreach", "fused")
"""Arguments of optimizers that are no choice of a run: set here, or about how the step is carried out."""
Group = dict[str, Any]  # a parameter group of an optimizer


@dataclass(frozen=True)
class Config:
    """Everything that decides the numbers of a run; see `Settings` for the fields that both have.

    Args:
        task: registry name of the task.
        model: name of the model.
        task_options: the fields of the task.
    """

    task: str
    model: str
    task_options: dict[str, Any] = field(default_factory=dict)
    hidden_size: int = 64
    steps: int = 2000
    batch_size: int = 50
    optimizer: str = "adam"
    lr: float = 1e-3
    rates: dict[str, float] = field(default_factory=dict)
    optimizers: dict[str, dict[str, Any]] = field(default_factory=dict)
    schedule: str = "constant"
    clip_norm: float = 0.0
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    optimizer_options: dict[str, Any] = field(default_factory=dict)
    eval_every: int = 100
    log_every: int = 20
    checkpoint_every: int = 200
    threads: int = 1
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Checks names and ranges, nothing that needs the model."""
        validate_fields_(self, SUBJECT, model=checks.of_type(str), **SIZES, **KINDS)
        checks.finite_tables(SUBJECT, {name: vars(self)[name] for name in TABLES})
        for coordinate, rate in self.rates.items():
            at_least(0).require(SUBJECT, f"rates.{coordinate}", rate)
        optimizers.get(self.optimizer)
        for coordinate, table in self.optimizers.items():
            is_named = isinstance(table, Mapping) and isinstance(table.get("optimizer"), str)
            example = f'optimizers.{coordinate} to be a table such as {{"optimizer": "rmsprop"}}'
            needs(is_named, OptionError, SUBJECT, example, table)
            optimizers.get(table["optimizer"])
            if "lr" in table:
                above(0).require(SUBJECT, f"optimizers.{coordinate}.lr", table["lr"])
        checks.named_device(SUBJECT, self.device)
        task = self.build_task()
        if task.train_size is not None:  # else the data say it, and a run is read where they are not
            task.batches_per_epoch(self.batch_size)
        object.__setattr__(self, "task_options", dataclasses.asdict(task))

    @classmethod
    def resolve(cls, task: Task, model: str, settings: Settings | None = None, strict: bool = True) -> Config:
        """Returns the config of a task and a model: settings over the recipe over the defaults above.

        Rates and optimizers of coordinates that the model does not have are left out, but those of the settings if
        `strict`.
        """
        from stiefelkit import models

        if model not in models.names():
            raise UnknownNameError(f"No model is named {model!r}{did_you_mean(model, models.names())}")
        asked = settings or Settings()
        filled = task.recipe(model).filled(asked)
        config = cls(task=task.name, model=model, task_options=dataclasses.asdict(task), **filled.given())
        if not (asked.options or asked.rates or asked.optimizers) or not (config.rates or config.optimizers):
            return config  # the recipe is that of the model as it is
        names = config.coordinate_names()
        known = {*names, *(name.rpartition(".")[2] for name in names)}  # a bare name stands for those with a prefix
        known |= {*asked.rates, *asked.optimizers} if strict else set()  # which the optimizer will refuse
        tables = {name: vars(config)[name].items() for name in BY_COORDINATE}
        kept = {name: {key: value for key, value in items if key in known} for name, items in tables.items()}
        return dataclasses.replace(config, **kept)

    @property
    def may_be_prolonged(self) -> bool:
        """Whether the run may go on for more steps than it was started with: its rates do not depend on them."""
        return self.schedule == "constant"

    def continued(self, asked: Mapping[str, Any] | Config, source: str) -> Config:
        """Returns the config to resume with: this one, but with other `steps` if asked and the schedule allows.

        `asked` are the fields that the new command names, with some keys of tables only, or all of a config.
        """
        is_whole = isinstance(asked, Config)
        fields = dataclasses.asdict(asked) if isinstance(asked, Config) else asked
        begun, fields = json.loads(json.dumps([dataclasses.asdict(self), fields]))  # tuples were saved as lists
        for name, value in fields.items():
            before = begun[name]
            now = value if is_whole else _merged(before, value)
            if before != now and not (name == "steps" and self.may_be_prolonged):
                raise RunError(
                    f"Run {source} needs {name} = {before!r} to resume as it began, got {now!r}; "
                    f"leave the option out, or start another run with another --out."
                )
        return dataclasses.replace(self, steps=fields.get("steps", self.steps))

    def build_task(self) -> Task:
        """Returns the task."""
        return create(self.task, self.task_options)

    def build_model(self, task: Task | None = None) -> nn.Module:
        """Returns the model with the initial weights that the seed fixes, on its device, for its task."""
        import torch

        from stiefelkit import models

        checks.usable_device(SUBJECT, self.device)
        task = task or self.build_task()
        torch.manual_seed(self.seed)
        sizes = {"input_size": task.input_size, "hidden_size": self.hidden_size, "output_size": task.output_size}
        for option in self.options:
            if option in sizes or option == "name":
                raise OptionError(f"Model {self.model!r} has no option {option!r}; task and --hidden-size set sizes.")
        with checks.within_memory(SUBJECT, f"hidden_size {self.hidden_size}"):
            return models.create(self.model, **sizes, **self.options).to(self.device)

    def coordinate_names(self) -> list[str]:
        """Returns the names of all coordinates of the model, `skew` or `u.skew`, each once."""
        import torch

        from stiefelkit.optim import parameter_groups

        with torch.random.fork_rng(devices=[]):
            groups = parameter_groups(self.build_model(), lr=self.lr)
        return sorted({group["name"] for group in groups if "name" in group})

    def within_memory(self) -> contextlib.AbstractContextManager[None]:
        """Turns a failure to allocate task and model into an OptionError that names their sizes."""
        sizes = {"hidden_size": self.hidden_size, "batch_size": self.batch_size, **self.task_options}
        return checks.within_memory(SUBJECT, ", ".join(f"{name} {value}" for name, value in sizes.items()))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Returns the optimizer, with one parameter group for each coordinate that has its own rate."""
        from stiefelkit.optim import MixedOptimizer, parameter_groups

        given = {name: table["lr"] for name, table in self.optimizers.items() if "lr" in table}
        apart: dict[str, list[Group]] = {}
        for group in parameter_groups(model, lr=self.lr, **{**given, **self.rates}):
            name = str(group.get("name", ""))
            keys = (key for key in (name, name.rpartition(".")[2]) if key in self.optimizers)
            apart.setdefault(next(keys, ""), []).append(group)
        for name in self.optimizers:
            requirement = f"a coordinate {name!r} for optimizers.{name}"
            needs(name in apart, OptionError, f"{SUBJECT} {self.model!r}", requirement, "none")
        shared = {"optimizer": self.optimizer, **self.optimizer_options}
        built = []
        for name in sorted(apart, key=bool):  # what all share comes first
            table = self.optimizers.get(name, shared)
            built.append(_built(self, model, apart[name], **{key: item for key, item in table.items() if key != "lr"}))
        return MixedOptimizer(built) if self.optimizers else built[0]


def check_coordinates(configs: Sequence[Config], settings: Settings) -> None:
    """Raises UnknownNameError for a coordinate with a setting of its own that none of some models has."""
    for table in BY_COORDINATE:
        for name in settings.given().get(table, {}):
            if not any(name in vars(config)[table] for config in configs):
                known = {coordinate for config in configs for coordinate in config.coordinate_names()}
                models = ", ".join(config.model for config in configs)
                raise UnknownNameError(f"None of {models} has a coordinate {name!r}{did_you_mean(name, known)}")


def _merged(begun: Any, asked: Any) -> Any:
    """Returns what was begun with, and in its tables what is asked for."""
    if not (isinstance(begun, dict) and isinstance(asked, dict)):
        return asked
    return begun | {key: _merged(begun.get(key), value) for key, value in asked.items()}


def _built(config: Config, model: nn.Module, groups: list[Group], optimizer: str, **options: Any) -> Optimizer:
    from stiefelkit.weights.find import coordinate_manifolds
    from stiefelkit.weights.optimizer_hooks import moves_frames

    factory, who = optimizers.get(optimizer), f"Optimizer {optimizer!r}"
    parameters = inspect.signature(factory).parameters
    checks.known_words(who, "option", options, [key for key in parameters if key not in HANDLED])
    for option, value in options.items():
        is_switch = parameters[option].annotation in (bool, bool | None, "bool", "bool | None")
        # a word, "no" as well, would count as true
        needs(not is_switch or isinstance(value, bool | None), OptionError, who, f"{option} to be true or false", value)
    bound = any("manifold" in group for group in groups)
    free = getattr(factory, "free_optimizer", None) or factory
    known = inspect.signature(free).parameters
    idle = [] if bound else [option for option in options if option not in known]
    needs(not idle, OptionError, who, f"a frame to act on for {', '.join(idle)}", f"{config.model!r} without one")
    try:
        built = factory(groups, **options)
    except OptionError:
        raise
    except (TypeError, ValueError) as error:
        raise OptionError(f"{who} refuses its options: {error}.") from error
    if bound and not moves_frames(built):
        raise OptimizerError(
            f"{SUBJECT} {config.model!r} needs an optimizer that keeps {next(iter(coordinate_manifolds(model)))} on "
            f"its manifold, got {optimizer!r}; name one with --optimizer, such as multiplicative_cayley."
        )
    return built
