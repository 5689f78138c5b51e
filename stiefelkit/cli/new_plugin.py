"""`stiefelkit new-plugin NAME`."""

import keyword
import os
import re
from pathlib import Path
from string import Template

from stiefelkit._version import __version__
from stiefelkit.errors import OptionError, UnknownNameError, did_you_mean
from stiefelkit.training.display import say
from stiefelkit.training.files import make_folder, remove, writable, write_synced

SKELETONS = Path(__file__).parent / "skeletons"
WORD = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


KINDS = {
    "parametrization": "parametrize_with_checks",
    "optimizer": "parametrize_optimizers_with_checks",
    "minimizer": "parametrize_minimizers_with_checks",
    **dict.fromkeys(("activation", "model", "decoder", "task")),
}
"""Kinds of plugins, with the decorator of their test; those without have a check that takes the name."""


def new_plugin(name: str, /, *, kind: str = "parametrization", out: Path = Path()) -> int:
    """Write a package with a plugin, to start from.

    It is a folder stiefelkit-NAME with a pyproject.toml, one module and one test. It works at once, and passes the laws
    of its kind.

    Args:
        name: under which it will be known, as in stiefelkit list: lower-case letters, digits and _.
        kind: parametrization, optimizer, minimizer, activation, model, decoder or task.
        out: folder in which that of the package is made.
    """
    if kind not in KINDS:
        raise UnknownNameError(f"No kind of plugin is named {kind!r}{did_you_mean(kind, KINDS)}")
    _check_name(name, kind)
    folder = out / f"stiefelkit-{name.replace('_', '-')}"
    if os.path.lexists(folder):
        raise OptionError(
            f"new-plugin needs a folder that does not exist yet, got {folder}; choose another name or --out."
        )
    with writable("new-plugin", folder):
        out.mkdir(parents=True, exist_ok=True)
        folder.mkdir()
        try:
            for path, text in _files(name, kind).items():
                make_folder((folder / path).parent, out)
                write_synced(folder / path, text.encode(), out)
        except BaseException:  # a full disk, or Ctrl-C
            remove(folder)
            raise
    say(f"Wrote {folder}. To install it and check the laws:")
    say(f"  pip install -e {folder} pytest\n  pytest {folder}")
    return 0


def _check_name(name: str, kind: str) -> None:
    if not WORD.fullmatch(name) or keyword.iskeyword(name):
        raise OptionError(
            "new-plugin needs a name of lower-case letters, digits and single _, a letter first and no word of Python, "
            f"got {name!r}."
        )
    from stiefelkit.cli.about import tables

    table = tables()[kind]
    if name in table.names():
        raise OptionError(
            f"new-plugin needs a name that no {kind} has, got {name!r} of {table.origin(name)}; choose another."
        )
    if set(re.findall(r"\w+", _read(f"{kind}.py"))) & {name, _class_name(name)}:
        raise OptionError(f"new-plugin needs a name that its module does not use for something else, got {name!r}.")


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _read(skeleton: str) -> str:
    return (SKELETONS / skeleton).read_text(encoding="utf-8")


def _files(name: str, kind: str) -> dict[str, str]:
    """Returns the files of a package by their paths in it."""
    cap = _class_name(name)
    words = {
        "name": name,
        "dashed": name.replace("_", "-"),
        "Name": cap,
        "object": name if kind in ("model", "decoder") else cap,  # those that are no classes
        "kind": kind,
        "group": f"stiefelkit.{kind}s",
        "decorator": KINDS[kind],
        "check": f"check_{kind}",
        "version": __version__,
    }
    own = "test_decoder.py.in" if kind == "decoder" else "test_name.py.in"
    test = "test_class.py.in" if KINDS[kind] else own
    drawn = {"pyproject.toml": "pyproject.toml.in", "README.md": "README.md.in", "tests/test_laws.py": test}
    files = {path: Template(_read(template)).substitute(words) for path, template in drawn.items()}
    return files | {f"stiefelkit_{name}.py": _read(f"{kind}.py").replace("Skeleton", cap).replace("skeleton", name)}
