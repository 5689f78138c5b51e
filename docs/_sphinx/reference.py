"""Which public names there are, and on which page of the API reference each one stands. Needs no Sphinx."""

import ast
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import GenericAlias, ModuleType

import stiefelkit

DOCS = Path(__file__).parents[1]
FURTHER = (
    "stiefelkit.nn.decoders",
    "stiefelkit.scan.activations",
    "stiefelkit.optim.batch",
    "stiefelkit.optim.settings",
    "stiefelkit.optim.steps",
    "stiefelkit.optim.deterministic.objective",
    "stiefelkit.registry",
    "stiefelkit.training.tasks",
    "stiefelkit.training.recipes",
    "stiefelkit.measuring.implementations",
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
    """The first line of a docstring, in Markdown."""
    line = (inspect.getdoc(target) or "").strip().split("\n\n")[0].replace("\n", " ")
    return re.sub(r":math:`([^`]*)`", r"$\1$", line)


def rooms() -> list[Room]:
    """Every public module with its names, each name described once: in the most special module that hands it on.

    Modules and names that the guides call most come first.
    """
    guides = "\n".join(page.read_text() for page in DOCS.glob("*.md"))
    uses = Counter(f"stiefelkit.{name}" for name in re.findall(r"\bsk\.((?:[a-z]\w*\.)?\w+)", guides))
    uses.update(f"stiefelkit.{name}" for name in re.findall(r"\bsk\.([a-z]+)(?=\.\w)", guides))
    subpackages = [f"stiefelkit.{name}" for name in stiefelkit.__all__ if inspect.ismodule(getattr(stiefelkit, name))]
    homes: dict[int, str] = {}
    made = []
    for name in [*subpackages, *FURTHER, "stiefelkit"]:
        module = importlib.import_module(name)
        room = Room(name, module)
        for public in sorted(module.__all__, key=str.lower):
            target = getattr(module, public)
            if inspect.ismodule(target):
                continue
            known = homes.get(id(target)) if callable(target) else None
            if known is not None:
                room.elsewhere[public] = known
                continue
            homes[id(target)] = f"{name}.{public}"
            room.described[public] = target
        room.described = dict(sorted(room.described.items(), key=lambda item: -uses[f"{room.name}.{item[0]}"]))
        made.append(room)
    return sorted(made, key=lambda room: (room.name != "stiefelkit", room.name in FURTHER, -uses[room.name]))


def page(room: Room) -> str:
    """The page of a module, in reStructuredText."""
    lines = [
        room.name,
        "=" * len(room.name),
        "",
        f".. py:module:: {room.name}",
        f"   :synopsis: {re.sub(':math:|`', '', _plain(room.module.__doc__))}",
        "",
    ]
    lines += [_plain(room.module.__doc__), ""]
    for name, home in room.elsewhere.items():
        lines += [f"* ``{name}``: :py:obj:`{home}`"]
    for name, target in room.described.items():
        lines += ["", name, "-" * len(name), ""]
        if inspect.isclass(target):
            kind = "autoexception" if issubclass(target, Exception) else "autoclass"
            lines += [f".. {kind}:: {room.name}.{name}", "   :members:", "   :show-inheritance:"]
        elif callable(target) and not isinstance(target, Mapping | GenericAlias):
            lines += [f".. autofunction:: {room.name}.{name}"]
        else:
            lines += [f".. py:data:: {name}", "", f"   {_plain(words_of(room.module, name))}"]
            if isinstance(target, Mapping):
                lines += ["", f"   Keys: {', '.join(f'``{key!r}``' for key in target)}."]
    return "\n".join(lines) + "\n"


def words_of(module: ModuleType, name: str) -> str:
    """What the source says of a constant: the string that follows it where it is made."""
    tree = ast.parse(inspect.getsource(module)).body
    for statement, following in zip(tree, [*tree[1:], None], strict=True):
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if name in [getattr(target, "id", None) for target in targets]:
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            return inspect.cleandoc(str(following.value.value)) if is_text else ""
    for statement in ast.walk(ast.Module(tree, [])):
        if isinstance(statement, ast.ImportFrom) and name in [alias.name for alias in statement.names]:
            return words_of(importlib.import_module(str(statement.module)), name)
    return ""


def _plain(text: str | None) -> str:
    """The first paragraph of a text, with nothing in it that is markup but code and formulas."""
    words, *marked = re.split(r"((?::math:)?`[^`]*`)", " ".join((text or "").strip().split("\n\n")[0].split()))
    made = [_escaped(words)]
    for mark, words in zip(marked[::2], marked[1::2], strict=True):
        made += [mark if mark.startswith(":math:") else f"`{mark}`", _escaped(words)]
    return "".join(made)


def _escaped(words: str) -> str:
    return re.sub(r"[*|\\]|_(?=\W|$)", r"\\\g<0>", words)
