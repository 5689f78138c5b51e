"""The house is as docs/architecture.md draws it: imports go down, in no circle, and what is named there exists."""

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import stiefelkit as sk

PACKAGE = Path(sk.__file__).parent
ROOT = PACKAGE.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LONGEST = 400
"""Lines of code in a file, at most: docstrings and comments do not count."""


@cache
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def file_of(module: str) -> str | None:
    """The file of a module of the package, by its dotted name."""
    path = module.replace(".", "/").partition("/")[2]
    names = [f"{path}.py", f"{path}/__init__.py"] if path else ["__init__.py"]
    return next((name for name in names if name in trees()), None)


@cache
def face() -> dict[str, str]:
    """Name to file of what `import stiefelkit` shows."""
    (block,) = (node for node in trees()["__init__.py"].body if isinstance(node, ast.If) and "not" not in _test(node))
    found = [
        (alias.name, str(node.module))
        for node in ast.walk(block)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    return {name: file_of(f"{module}.{name}") or file_of(module) or "" for name, module in found}


def _test(node: ast.If) -> str:
    return ast.unparse(node.test)


def imported(node: ast.AST) -> Iterator[str]:
    """The files of the package that an import statement asks for."""
    if isinstance(node, ast.Import):
        found = [file_of(alias.name) for alias in node.names if alias.name.partition(".")[0] == "stiefelkit"]
    elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "stiefelkit":
        home = str(node.module)
        shown = face() if home == "stiefelkit" else {}
        found = [file_of(f"{home}.{alias.name}") or shown.get(alias.name) or file_of(home) for alias in node.names]
    else:
        found = []
    yield from (name for name in found if name)


@cache
def edges(for_types: bool) -> list[tuple[str, str]]:
    """Who imports what: in modules and functions, or only where types are checked."""
    found = []
    for path, tree in trees().items():
        blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and _test(node) == "TYPE_CHECKING"]
        inside = {id(node) for block in blocks for statement in block.body for node in ast.walk(statement)}
        for node in ast.walk(tree):
            if (id(node) in inside) == for_types and path != "__init__.py":
                found += [(path, target) for target in imported(node) if target != path]
    return found


@cache
def floors() -> list[list[str]]:
    """The rows of the page's table, from the top: files and folders."""
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    return [re.findall(r"`([\w./]+)`", row) for row in rows]


def floor_of(path: str) -> int:
    """How far a file stands below the top."""
    room = path.partition("/")[0] + ("/" if "/" in path else "")
    found = [i for i, row in enumerate(floors()) if room in row]
    assert len(found) == 1, f"{room} needs one row of the table of floors, got {len(found)}"
    return found[0]


OUTSIDE = {"__init__.py", "__main__.py", "_version.py", "param.py"}
"""The face and the door for plugins, on top of all floors, and a number below them."""


def test_every_folder_and_file_of_the_ground_floor_has_its_row() -> None:
    rooms = {path.partition("/")[0] + ("/" if "/" in path else "") for path in trees()} - OUTSIDE
    assert {room for row in floors() for room in row} == rooms


@pytest.mark.parametrize("for_types", [False, True], ids=["for all", "for type checkers"])
def test_no_file_imports_from_a_floor_above_its_own(for_types: bool) -> None:
    pairs = {pair for pair in edges(for_types) if not OUTSIDE & set(pair)}
    assert {(one, other) for one, other in pairs if floor_of(other) < floor_of(one)} == set()


def test_no_room_of_the_laboratory_imports_another() -> None:
    rooms = {"measuring", "testing", "training"}
    pairs = {(room(one), room(other)) for types in (False, True) for one, other in edges(types)}
    assert {pair for pair in pairs if set(pair) <= rooms and len(set(pair)) == 2} == set()


def through_the_face() -> Iterator[tuple[str, str]]:
    """Who asks `stiefelkit` itself for a name, and all files that it shows."""
    yield from (("__init__.py", target) for target in {*face().values()})
    for path, tree in trees().items():
        for node in ast.walk(tree):
            is_import = isinstance(node, ast.Import) and any(alias.name == "stiefelkit" for alias in node.names)
            if isinstance(node, ast.ImportFrom) and node.module == "stiefelkit":
                is_import = any(file_of(f"stiefelkit.{alias.name}") is None for alias in node.names)
            if is_import and path != "__init__.py":
                yield path, "__init__.py"


def circle(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """The files of a circle, if there is one."""
    graph: dict[str, set[str]] = {}
    for one, other in pairs:
        graph.setdefault(one, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def room(path: str) -> str:
    return path.partition("/")[0]


def test_no_imports_go_in_a_circle_of_files_or_rooms_even_through_the_face() -> None:
    pairs = [*edges(for_types=False), *edges(for_types=True), *through_the_face()]
    assert circle(pairs) == []
    assert circle((room(one), room(other)) for one, other in pairs if room(one) != room(other)) == []


def test_a_circle_through_the_face_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The saboteur: a file below the face that asks the face for a name."""
    parsed = ast.parse("def record():\n    from stiefelkit import drift\n")
    monkeypatch.setitem(trees(), "weights/change.py", parsed)
    assert "__init__.py" in circle(through_the_face())


SCAN = {
    "activations": {"activations"},
    "kernels": {"activations", "kernels"},
    "structures": {"structures"},
    "engines": {"activations", "checks", "engines", "kernels", "structures"},
}
"""Rooms of the scan that a room of it may import from: kernels know no engine, and engines no dispatch."""


@pytest.mark.parametrize("folder", SCAN)
def test_inside_the_scan_activations_and_kernels_know_no_engine_and_engines_no_dispatch(folder: str) -> None:
    targets = [other for one, other in edges(for_types=False) if one.startswith(f"scan/{folder}/")]
    rooms = {target.split("/")[1].removesuffix(".py") for target in targets if target.startswith("scan/")}
    assert rooms - {"__init__"} <= SCAN[folder]


def test_nothing_is_imported_by_a_string_but_by_the_registries() -> None:
    calls = [(path, node) for path, tree in trees().items() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [
        (path, ast.unparse(call))
        for path, call in calls
        if ast.unparse(call.func).endswith(("import_module", "__import__"))
        and isinstance(call.args[0], ast.Constant)
        and str(call.args[0].value).startswith("stiefelkit")
    ]
    assert found == []


def test_every_path_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", PAGE) + re.findall(r"\]\(([\w./-]+)\)", PAGE)
    assert len(named) > 30
    inside = [f"/{path}" for path in trees()] + [f"/{path.rpartition('/')[0]}/" for path in trees()]
    for name in named:
        is_inside = any(path.endswith(f"/{name}") for path in inside)
        assert is_inside or (ROOT / name).exists() or (ROOT / "docs" / name).exists(), name


@pytest.mark.parametrize("folder", ["stiefelkit", "tests", "benchmarks", "examples"])
def test_no_file_is_longer_than_a_reader_keeps_in_mind(folder: str) -> None:
    sizes = {path.relative_to(ROOT).as_posix(): lines_of_code(path) for path in (ROOT / folder).rglob("*.py")}
    assert {path: size for path, size in sizes.items() if size > LONGEST} == {}


def lines_of_code(path: Path) -> int:
    """Counts lines that are neither empty, nor a comment, nor a part of a docstring."""
    text = path.read_text()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    lines = enumerate(text.splitlines(), 1)
    return sum(bool(words := line.strip()) and words[0] != "#" and number not in docstrings for number, line in lines)


def test_no_test_looks_at_the_clock_or_sets_a_limit_to_it() -> None:
    """How long something takes depends on who else is at work; pytest's own limit ends what hangs."""
    clocks = ("time", "monotonic", "perf_counter", "process_time")
    for path in (ROOT / "tests").rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        asked = {f"time.{clock}" for clock in clocks} & {ast.unparse(call.func) for call in calls}
        assert not asked, path
        assert not [call.lineno for call in calls if any(word.arg == "timeout" for word in call.keywords)], path


def test_every_name_of_the_package_that_the_page_uses_exists() -> None:
    for name in re.findall(r"`(?:sk|stiefelkit)\.([a-z_.A-Z]+)`", PAGE):
        found = sk
        for part in name.split("."):
            found = getattr(found, part)
