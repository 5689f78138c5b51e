"""`stiefelkit list [NAME]`: tables of the registered names, or what is known of one of them."""

import inspect
import re
from collections.abc import Mapping

from rich.table import Column, Table

from stiefelkit.errors import StiefelkitError, UnknownNameError, did_you_mean
from stiefelkit.optim import minimizers, optimizers
from stiefelkit.registry import Registry, code_of_others
from stiefelkit.training.display import Screen
from stiefelkit.training.recipes import Settings, written
from stiefelkit.training.tasks import Task, tasks


def show(name: str | None = None, /) -> int:
    """List maps, optimizers, models and tasks, or describe one NAME.

    Plugins are among them, with the package that each comes from.

    Args:
        name: one of them, to describe with its options and their defaults.
    """
    console, registries = Screen(), tables()
    if name is not None:
        _describe(name, registries, console)
        return 0
    for kind, registry in registries.items():
        rows = registry.map(lambda name, target: _summary(target))
        columns = [Column(title, overflow="fold") for title in ("what it is", "from")]
        table = Table(Column(kind, no_wrap=True), *columns, title=f"{kind.capitalize()}s")
        for key, line in rows.items():
            table.add_row(key, line, registry.origin(key) or "this process")
        console.print(table)
    console.print("stiefelkit list NAME describes one of them.")
    return 0


def tables() -> dict[str, Registry]:
    """Returns the registries, by kind."""
    from stiefelkit import models
    from stiefelkit.contract import table
    from stiefelkit.scan import activations

    nets = activations._activations, models._models
    return {known.kind: known for known in (table.registered, optimizers, minimizers, *nets, tasks)}


def _summary(target: object) -> str:
    return (_doc(target).splitlines() or [""])[0].removeprefix("Builds ").removesuffix(".")


def _doc(target: object) -> str:
    return re.sub(":math:" + r"`([^`]*)`", r"\1", inspect.getdoc(target) or "")


def _describe(name: str, registries: Mapping[str, Registry], console: Screen) -> None:
    """Prints signature, docstring and recipes of a name, once for each kind that has it."""
    found = {kind: registry.available()[name] for kind, registry in registries.items() if name in registry.available()}
    if not found:
        known = {other for registry in registries.values() for other in registry.names()}
        raise UnknownNameError(f"Nothing is named {name!r}{did_you_mean(name, known)}")
    for kind, target in found.items():
        article, origin = "an" if kind[0] in "aeiou" else "a", registries[kind].origin(name) or "this process"
        console.print(f"{name}: {article} {kind}, from {origin}", style="bold")
        with code_of_others(f"The {kind} {name!r} needs code that runs", StiefelkitError):
            if callable(target):
                console.print(f"{target.__module__}.{target.__qualname__}{inspect.signature(target)}\n")
            console.print(_doc(target))
            if isinstance(target, type) and issubclass(target, Task):
                console.print(_recipes(target))


def _recipes(task: type[Task]) -> Table:
    table = Table("model", "settings", title=f"Recipes of {task.name}")
    for model, recipe in task.recipes.items():
        settings = recipe.filled(Settings()).given()
        flat = {f"{name}.{key}": item for name, value in settings.items() if isinstance(value, dict)
                for key, item in value.items()}  # fmt: skip
        flat = {name: value for name, value in settings.items() if not isinstance(value, dict)} | flat
        table.add_row(model, ", ".join(f"{name.replace('_', '-')} {written(value)}" for name, value in flat.items()))
    return table
