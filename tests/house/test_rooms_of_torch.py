"""What is private of torch is taken in one file, and what is known of sharded tensors in few."""

import ast
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from stiefelkit import _torch

PACKAGE = Path(_torch.__file__).parent
OVERRIDDEN = {"_apply", "_load_from_state_dict", "_save_to_state_dict"}
"""Methods of torch.nn.Module that are there for subclasses to replace and to call."""
TORCH = {"F", "Tensor", "nn", "parametrize", "torch"}
OF_SHARDING = {"DTensor", "device_mesh", "distribute_tensor", "full_tensor", "placements", "to_local"}


@functools.cache
def sources() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize("name", sorted(OVERRIDDEN))
def test_modules_have_the_methods_that_ours_replace(name: str) -> None:
    plain = list(inspect.signature(getattr(nn.Module, name)).parameters)
    wanted = {
        "_apply": ["self", "fn", "recurse"],
        "_load_from_state_dict": "self state_dict prefix local_metadata strict missing_keys unexpected_keys error_msgs",
        "_save_to_state_dict": ["self", "destination", "prefix", "keep_vars"],
    }[name]
    assert plain == (wanted.split() if isinstance(wanted, str) else wanted)


def private_names(tree: ast.Module, own: set[str]) -> Iterator[str]:
    """What a file takes by a name with a leading underscore that is not the package's, nor inherited."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in OVERRIDDEN:
            root = ast.unparse(node).partition(".")[0]
            if root in TORCH or (node.attr not in own and ast.unparse(node.value) not in ("self", "cls")):
                yield ast.unparse(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            home = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (home + alias.name for alias in node.names):
                if name.startswith("torch.") and any(map(is_private, name.split("."))):
                    yield name


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def made(tree: ast.Module) -> Iterator[str]:
    """The names that a file defines: functions, classes, constants and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr


def test_nothing_private_of_torch_is_named_outside_its_room() -> None:
    of_python = {"_asdict", "_exit", "_fields", "_getframe", "_replace"}
    own = {name for tree in sources().values() for name in made(tree)} | of_python
    found = {path: sorted(set(private_names(tree, own))) for path, tree in sources().items() if path != "_torch.py"}
    assert {path: names for path, names in found.items() if names} == {}
    assert len(set(private_names(sources()["_torch.py"], own))) > 15


def words(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name | ast.alias):
            name = node.id if isinstance(node, ast.Name) else node.name
            yield from [name] * (name != "full_tensor")  # ours, of tensors.py; the method of DTensor is an attribute
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            yield node.value


def test_sharded_tensors_are_known_in_their_room_alone() -> None:
    found = {
        path: {word for word in words(tree) if word in OF_SHARDING or word.startswith("torch.distributed")}
        for path, tree in sources().items()
        if path not in ("tensors.py", "weights/change.py")
    }
    assert {path: names for path, names in found.items() if names} == {}
    assert set(words(sources()["tensors.py"])) >= OF_SHARDING - {"DTensor"}
