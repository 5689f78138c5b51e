"""Every public name and command has its page, with shapes, units, errors and source; the pages hang together."""

import inspect
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from sphinx_parts import sphinx_part

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if "generated" not in page.parts)]
ANGLES = ("angle", "phase", "arc")


@cache
def rooms():
    return sphinx_part("reference").rooms()


def described():
    """Every public object with its full name, and whether it is of the face (and not of what authors build on)."""
    further = sphinx_part("reference").FURTHER
    for room in rooms():
        for name, target in room.described.items():
            yield f"{room.name}.{name}", target, room.name not in further


def functions():
    return [(name, target) for name, target, is_face in described() if is_face and inspect.isfunction(target)]


def words(target):
    return inspect.getdoc(target) or ""


def test_every_public_module_and_name_is_on_a_page():
    import stiefelkit

    modules = {name for name in stiefelkit.__all__ if inspect.ismodule(getattr(stiefelkit, name))}
    assert {f"stiefelkit.{name}" for name in modules} <= {room.name for room in rooms()}
    for room in rooms():
        public = {name for name in room.module.__all__ if not inspect.ismodule(getattr(room.module, name))}
        assert public == set(room.described) | set(room.elsewhere)
        page = sphinx_part("reference").page(room)
        assert all(re.search(rf":: ({re.escape(room.name)}\.)?{name}$", page, re.MULTILINE) for name in room.described)


def test_every_public_name_says_what_it_is():
    of_constant = sphinx_part("reference").words_of
    modules = {room.name: room.module for room in rooms()}
    for name, target, _ in described():
        if inspect.isclass(target) or inspect.isfunction(target):
            assert len(words(target)) > 20, name
        elif not name.endswith("__version__"):
            module, _, constant = name.rpartition(".")
            assert of_constant(modules[module], constant), name


def test_every_argument_of_a_public_function_is_explained():
    for name, function in functions():
        for argument in inspect.signature(function).parameters:
            assert re.search(rf"\b{argument}\b", words(function)), f"{name}: {argument}"


def test_angles_say_that_they_are_in_radians():
    for name, function in functions():
        if set(ANGLES) & set(inspect.signature(function).parameters):
            assert re.search(r"radian|\bpi\b", words(function)), name


@pytest.mark.slow
def test_every_member_of_the_registries_has_a_page_with_a_paper():
    members = sphinx_part("members")
    pages = members.pages()
    for folder, (_, _, table, _) in members.KINDS.items():
        for name, cls in table().items():
            if cls.__module__.startswith("stiefelkit."):
                assert cls.__qualname__ in pages[f"{folder}/{name}.md"]
                has_paper = folder == "parametrizations" or getattr(cls, "moves_frames", False)
                assert not has_paper or "References:" in words(cls), name


def test_every_command_is_explained():
    commands = sphinx_part("commands")
    page = commands.page()
    for path in commands.commands():
        (text,) = re.findall(rf"^## stiefelkit {' '.join(path)}\n\n```text\n(.*?)```", page, re.MULTILINE | re.DOTALL)
        assert f"Usage: stiefelkit {' '.join(path)}" in " ".join(text.split()), path
        assert len(text) > 200, path


def printed_commands(text):
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in re.findall(r"(?:^| -m )stiefelkit (.*)$", block.replace("\\\n", " "), re.MULTILINE):
            yield ["0" if word == "$k" else word for word in shlex.split(line, comments=True)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_on_the_pages_are_taken_with_all_their_options(page):
    from stiefelkit.cli.app import app
    from stiefelkit.cli.runs import add_tasks

    add_tasks()
    for words in printed_commands(page.read_text()):
        # plugins, variables, a device that may be missing
        if not re.search(r"damped|mymap|train load|cuda|\$", " ".join(words)):
            app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("line", ["trian digits", "train digits --stps 3"])
def test_a_command_that_is_none_would_be_seen_on_a_page(line):
    from cyclopts import CycloptsError

    from stiefelkit.cli.app import app

    (words,) = printed_commands(f"```sh\ntorchrun --nproc-per-node 2 -m stiefelkit {line}  # says\n```\n")
    with pytest.raises(CycloptsError):
        app.parse_args(words, exit_on_error=False, print_error=False)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_what_there_is(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", text):
        if not re.match(r"\w+:|.*\bgenerated/", target):
            assert (page.parent / target).exists(), f"{page.name} leads to {target}"


def test_the_page_of_requests_names_tests_that_there_are():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (ROOT / "docs" / "coverage.md").read_text())
    assert len(named) > 20
    for path, test in named:
        assert f"def {test}(" in (ROOT / path).read_text(), f"{path}::{test}"


def test_functions_of_tensors_say_their_shapes():
    of_a_shape = re.compile(r"\(\*|\(\w+, |\bshape\b|n x [pn]\b|matrix|matrices|vector|number|entry")
    for name, function in functions():
        signature = str(inspect.signature(function))
        if re.search(r"(?<!\w)Tensor", signature) and "parameter" not in signature:
            assert of_a_shape.search(words(function)), name
