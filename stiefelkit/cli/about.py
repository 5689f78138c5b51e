"""`stiefelkit list [NAME]`: tables of the registered names, or what is known of one of them."""

import inspect
import re
from collections.abc import Mapping

from rich.table import Column, Table

from stiefelkit.cli.options import options_in
from stiefelkit.errors import StiefelkitError, UnknownNameError, did_you_mean
from stiefelkit.optim import minimizers, optimizers
from stiefelkit.registry import Registry, code_of_others
from stiefelkit.training.display import Screen
from stiefelkit.training.recipes import Settings
from stiefelkit.training.tasks import tasks


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
        rows = registry.map(lambda name, target: (_doc(target).splitlines() or [""])[0])
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


def _doc(target: object) -> str:
    return re.sub(":math:" + r"`([^`]*)`", r"\1", inspect.getdoc(target) or "")


def _describe(name: str, registries: Mapping[str, Registry], console: Screen) -> None:
    """Prints signature, docstring and recipes of a name, once for each kind that has it."""
    known = {kind: registry.available() for kind, registry in registries.items()}
    kinds = [kind for kind, targets in known.items() if name in targets]
    if not kinds:
        raise UnknownNameError(f"Nothing is named {name!r}{did_you_mean(name, set().union(*known.values()))}")
    for kind in kinds:
        target, origin = known[kind][name], registries[kind].origin(name) or "this process"
        console.print(f"{name}: {'an' if kind[0] in 'aeiou' else 'a'} {kind}, from {origin}", style="bold")
        with code_of_others(f"The {kind} {name!r} needs code that runs", StiefelkitError):
            if callable(target):
                console.print(f"{target.__module__}.{target.__qualname__}{inspect.signature(target)}\n")
            console.print(_doc(target))
            for model, recipe in target.recipes.items() if kind == "task" else ():
                options = options_in(recipe.filled(Settings()).given())
                console.print(f"{model}:", ", ".join(f"{key} {word}" for key, word in options.items()), soft_wrap=True)
