"""`stiefelkit new-plugin` writes a package of each kind, which works as it stands and keeps its laws."""

import importlib
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest

from stiefelkit import errors
from stiefelkit.cli import main
from stiefelkit.cli.about import tables
from stiefelkit.cli.new_plugin import KINDS
from stiefelkit.scan import activations
from stiefelkit.testing import (
    LAWS,
    check_activation,
    check_decoder,
    check_minimizer,
    check_model,
    check_optimizer,
    check_parametrization,
    check_task,
)


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Writes the package of a kind, and registers what it announces, as an installed one is."""

    def install(kind):
        assert main(["new-plugin", "my_own", "--kind", kind, "--out", str(tmp_path)]) == 0
        folder = tmp_path / "stiefelkit-my-own"
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        ((group, points),) = project["entry-points"].items()
        table = tables()[kind]
        assert table.group == group == f"stiefelkit.{kind}s"
        for held in ("_targets", "_loaded"):
            monkeypatch.setattr(table, held, dict(getattr(table, held)))
        monkeypatch.setattr(activations, "_by_name", {})
        monkeypatch.setattr(activations, "_learnt", SimpleNamespace())
        monkeypatch.syspath_prepend(folder)
        monkeypatch.delitem(sys.modules, "stiefelkit_my_own", raising=False)
        importlib.invalidate_caches()
        for name, target in points.items():
            table.register(name, target)
        return folder, table.find("my_own")

    return install


def quick(kind, made):
    """The laws of a kind, on one case of each where there are many."""
    if kind == "parametrization":
        check_parametrization(made, set(LAWS) - {"compile"})
    elif kind == "optimizer":
        check_optimizer(made, only="MyOwn-complex64")
    elif kind == "minimizer":
        check_minimizer(made, only="MyOwn-float64")
    elif kind == "decoder":
        check_decoder("my_own", importlib.import_module("stiefelkit_my_own").small_model())
    else:
        {"activation": check_activation, "model": check_model, "task": check_task}[kind]("my_own")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_keeps_its_laws_and_is_listed(kind, installed, capsys):
    folder, made = installed(kind)
    quick(kind, made)
    test = (folder / "tests" / "test_laws.py").read_text()
    assert "MyOwn" in test if "parametrize" in test else '("my_own"' in test
    compile(test, "test_laws.py", "exec")
    assert f"pip install -e {folder} pytest\n  pytest {folder}\n" in capsys.readouterr().out
    assert main(["list", "my_own"]) == 0
    assert capsys.readouterr().out.startswith("my_own: a")
    for path in (*folder.glob("*.*"), folder / "tests" / "test_laws.py"):
        assert not re.search("skeleton", path.read_text(), re.IGNORECASE)


def test_there_is_a_skeleton_for_everything_that_stiefelkit_lists():
    assert set(KINDS) == set(tables())


def test_nothing_is_overwritten(tmp_path, capsys):
    words = ["new-plugin", "mine", "--out", str(tmp_path)]
    assert main(words) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert main([*words, "--kind", "task"]) == 2
    assert "needs a folder that does not exist yet, got" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("My-Map", "lower-case letters, digits and single _, a letter first and no word of Python, got 'My-Map'"),
        ("2d", "got '2d'"),
        ("class", "got 'class'"),
        ("../up", "got '../up'"),
        ("traits", "a name that its module does not use for something else, got 'traits'"),
        ("cayley", "needs a name that no parametrization has, got 'cayley' of stiefelkit"),
        ("copying --kind task", "needs a name that no task has, got 'copying'"),
        ("mine --kind tsk", "No kind of plugin is named 'tsk'; did you mean \"task\"?"),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_nothing_written(words, says, tmp_path, capsys):
    assert main(["new-plugin", *words.split(), "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_the_skeletons_of_classes_are_of_their_kind():
    for kind, registry in tables().items():
        module = importlib.import_module(f"stiefelkit.cli.skeletons.{kind}")
        registry.check(getattr(module, "Skeleton" if hasattr(module, "Skeleton") else "skeleton"))
        with pytest.raises(errors.OptionError):
            registry.check(3)


def test_the_skeleton_of_a_task_lets_help_come_without_torch():
    script = "import sys, stiefelkit.cli.skeletons.task; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
