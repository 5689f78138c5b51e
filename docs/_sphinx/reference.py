"""Which public names there are, and on which page of the API reference each one stands. Needs no Sphinx."""

import importlib
import inspect
from dataclasses import dataclass, field
from types import ModuleType

import stiefelkit

FURTHER = (
    "stiefelkit.scan.activations",
    "stiefelkit.optim.settings",
    "stiefelkit.optim.steps",
    "stiefelkit.registry",
    "stiefelkit.training.tasks",
    "stiefelkit.training.recipes",
    "stiefelkit.measuring.races.contenders",
    "stiefelkit.measuring.moved_frames",
)
"""Modules that stand in no `__all__`, but in the guides: what those build on who add something of their own."""


@dataclass
class Room:
    """A module, the names that its page describes, and those that another page does."""

    name: str
    module: ModuleType
    described: dict[str, object] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The first sentence about the module."""
        return first_sentence(self.module)


def first_sentence(target: object) -> str:
    """The first line of a docstring."""
    return (inspect.getdoc(target) or "").strip().split("\n\n")[0].replace("\n", " ")


def rooms() -> list[Room]:
    """Every public module with its names, each name described once: in the most special module that hands it on."""
    subpackages = [f"stiefelkit.{name}" for name in stiefelkit.__all__ if inspect.ismodule(getattr(stiefelkit, name))]
    homes: dict[int, str] = {}
    made = []
    for name in [*subpackages, *FURTHER, "stiefelkit"]:
        module = importlib.import_module(name)
        room = Room(name, module)
        for public in module.__all__:
            target = getattr(module, public)
            if inspect.ismodule(target):
                continue
            known = homes.get(id(target)) if callable(target) else None
            if known is not None:
                room.elsewhere[public] = known
                continue
            homes[id(target)] = f"{name}.{public}"
            room.described[public] = target
        made.append(room)
    return [made[-1], *made[:-1]]


def page(room: Room) -> str:
    """The page of a module, in reStructuredText."""
    lines = [room.name, "=" * len(room.name), "", f".. py:module:: {room.name}", "", _plain(room.module.__doc__), ""]
    for name, home in room.elsewhere.items():
        lines += [f"* ``{name}``: :py:obj:`{home}`"]
    for name, target in room.described.items():
        lines += ["", name, "-" * len(name), "", f".. {_directive(target)}:: {room.name}.{name}"]
        if inspect.isclass(target):
            lines += ["   :members:", "   :show-inheritance:"]
        elif not callable(target):
            lines += ["   :no-value:"]
    return "\n".join(lines) + "\n"


def _directive(target: object) -> str:
    if inspect.isclass(target):
        return "autoexception" if issubclass(target, Exception) else "autoclass"
    return "autofunction" if callable(target) else "autodata"


def _plain(text: str | None) -> str:
    return "\n".join(f"| {line}".rstrip() for line in (text or "").strip().split("\n\n")[0].splitlines()).replace("`", "``")
