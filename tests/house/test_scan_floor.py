"""The recurrence stands above functional and below all that has weights: no file of either imports upward."""

import ast
from pathlib import Path

import pytest

import stiefelkit

ROOT = Path(stiefelkit.__file__).parent
GROUND = {"_version", "errors", "init", "metrics", "numbers", "registry", "tensors", "_torch"}
FLOORS = [GROUND, GROUND | {"functional"}, GROUND | {"functional", "scan"}]


def imported(path):
    """Modules that a file imports anywhere, in functions too; what only type checkers read is left out."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    ("folder", "permitted"), [("registry.py", FLOORS[0]), ("functional", FLOORS[1]), ("scan", FLOORS[2])]
)
def test_nothing_is_imported_from_above(folder, permitted):
    start = ROOT / folder
    for path in [start] if start.is_file() else start.rglob("*.py"):
        above = [
            name for name in imported(path) if name.startswith("stiefelkit.") and name.split(".")[1] not in permitted
        ]
        assert not above, path


def test_inside_the_scan_activations_and_kernels_know_no_engine_and_engines_no_dispatch():
    def rooms(folder):
        return {
            name.split(".")[2]
            for path in (ROOT / "scan" / folder).rglob("*.py")
            for name in imported(path)
            if name.startswith("stiefelkit.scan.")
        }

    assert rooms("activations") <= {"activations"}
    assert rooms("kernels") <= {"activations", "kernels"}
    assert rooms("structures") <= {"blocks", "structures"}
    assert rooms("engines") <= {"activations", "blocks", "checks", "engines", "kernels", "structures"}
