"""`stiefelkit new-plugin NAME` and `stiefelkit new-bench DIR`: folders to start from."""

import keyword
import os
import re
import tempfile
from pathlib import Path
from string import Template

from stiefelkit._version import __version__
from stiefelkit.cli.about import tables
from stiefelkit.errors import OptionError, UnknownNameError, did_you_mean, needs

SKELETONS = Path(__file__).parent / "skeletons"
KINDS = ("parametrization", "optimizer", "model", "task")  # kinds of plugins: each has a folder of templates


def new_plugin(name: str, /, *, kind: str = "parametrization", out: Path = Path()) -> int:
    """Write a package with a plugin, to start from.

    It is a folder stiefelkit-NAME with a pyproject.toml, one module and one test, which passes.

    Args:
        name: under which it will be known, as in stiefelkit list: lower-case letters, digits and _.
        kind: parametrization, optimizer, model or task.
        out: folder in which that of the package is made.
    """
    if kind not in KINDS:
        raise UnknownNameError(f"No kind of plugin is named {kind!r}{did_you_mean(kind, KINDS)}")
    is_word = re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) and not keyword.iskeyword(name)
    words = "a name of lower-case letters, digits and single _, a letter first and no word of Python"
    needs(bool(is_word), OptionError, "new-plugin", words, name)
    needs(name not in tables()[kind].names(), OptionError, "new-plugin", f"a name that no {kind} has", name)
    folder = out / f"stiefelkit-{name.replace('_', '-')}"
    _write("new-plugin", folder, _files(name, kind))
    print(f"Wrote {folder}. To install and test it:\n  pip install -e {folder} pytest\n  pytest {folder}")
    return 0


def new_bench(folder: Path, /) -> int:
    """Write benchmarks of your own model for asv, to start from.

    They measure the drift of its weights and the time of a step, on a CPU and on CUDA, by each of several methods.

    Args:
        folder: that is made, with asv.conf.json and benchmarks; `__init__.py` there is for your model and optimizers.
    """
    root = next((above for above in folder.resolve().parents if (above / ".git").exists()), folder.resolve())
    values = {"name": folder.resolve().name, "repo": os.path.relpath(root, folder.resolve())}
    templates = SKELETONS / "bench"
    files = {str(one.relative_to(templates))[:-3]: _filled(one, values) for one in templates.rglob("*.in")}
    _write("new-bench", folder, files)
    print(f"Wrote {folder}. To run it:\n  pip install asv\n  cd {folder}\n  asv machine --yes")
    print("  asv run --quick --set-commit-hash $(git rev-parse HEAD)")
    return 0


def _write(who: str, folder: Path, files: dict[str, str]) -> None:
    """Writes texts by their paths in a new folder, all or none."""
    needs(not os.path.lexists(folder), OptionError, who, "a folder that does not exist yet", str(folder))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
        made = Path(unfinished, folder.name)
        for path, text in files.items():
            (made / path).parent.mkdir(parents=True, exist_ok=True)
            (made / path).write_text(text, encoding="utf-8")
        made.rename(folder)


def _filled(template: Path, values: dict[str, str]) -> str:
    return Template(template.read_text(encoding="utf-8")).substitute(values)


def _files(name: str, kind: str) -> dict[str, str]:
    camel = name.title().replace("_", "")
    values = {"name": name, "dashed": name.replace("_", "-"), "Name": camel, "kind": kind, "version": __version__}
    values["object"] = name if kind == "model" else camel
    files = {}
    for template in (*SKELETONS.glob("*.in"), *(SKELETONS / kind).glob("*.in")):
        path = template.name.removesuffix(".in")
        path = {"module.py": f"stiefelkit_{name}.py"}.get(path, f"tests/{path}" if path.startswith("test_") else path)
        files[path] = _filled(template, values)
    return files
