"""`stiefelkit new-plugin` writes a package of each kind, which works as it stands: its laws pass, or it runs."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest

from stiefelkit.cli import main
from stiefelkit.cli.about import tables
from stiefelkit.cli.new_plugin import KINDS
from stiefelkit.testing import LAWS, check_optimizer, check_parametrization


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Writes the package of a kind, and registers its entry points, as an installed one is."""

    def install(kind):
        assert main(["new-plugin", "my_own", "--kind", kind, "--out", str(tmp_path)]) == 0
        folder = tmp_path / "stiefelkit-my-own"
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        ((group, points),) = project["entry-points"].items()
        table = tables()[kind]
        assert table.group == group == f"stiefelkit.{kind}s"
        for held in ("_targets", "_loaded"):
            monkeypatch.setattr(table, held, dict(getattr(table, held)))
        monkeypatch.syspath_prepend(folder)
        for name, target in points.items():
            monkeypatch.delitem(sys.modules, f"stiefelkit_{name}", raising=False)
            importlib.invalidate_caches()
            table.register(name, target)
        return folder, table.find("my_own")

    return install


def path_of(folder):
    return os.pathsep.join([str(folder), str(Path(__file__).parents[2])])


def run_its_tests(folder):
    """Runs the tests of a plugin in a process that finds it by its entry point, as an installed one."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    ((group, points),) = project["entry-points"].items()
    metadata = folder / "stiefelkit_my_own-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: stiefelkit-my-own\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()))
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests")]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=folder, env=os.environ | {"PYTHONPATH": path_of(folder)}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "task" else ()) for kind in KINDS]
)
def test_a_plugin_keeps_its_laws_or_runs_and_is_listed(kind, installed, capsys):
    folder, made = installed(kind)
    assert f"pip install -e {folder}" in capsys.readouterr().out
    if kind == "parametrization":
        check_parametrization(made, set(LAWS) - {"compile"})
    elif kind == "optimizer":
        check_optimizer(made, only="MyOwn-complex64")
    else:
        run_its_tests(folder)
    if kind == "task":  # help of the command line does not wait for torch
        script = "import stiefelkit_my_own, sys; assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path_of(folder)}, check=True)
    assert main(["list", "my_own"]) == 0
    assert "my_own: a" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    assert main(["new-plugin", "my_own", "--out", str(folder.parent)]) == 2
    assert {path: path.read_bytes() for path in before} == before
    for path in (*folder.glob("*.*"), *folder.glob("tests/*.py")):
        assert path.is_dir() or not re.search(r"skeleton|\$", path.read_text(), re.IGNORECASE)


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("My-Map", "lower-case"),
        ("../up", "lower-case"),
        ("cayley", "no parametrization"),
        ("copying --kind task", "no task"),
        ("mine --kind tsk", '"task"'),
    ],
)
def test_a_name_that_cannot_be_is_refused_and_nothing_written(words, word, tmp_path, capsys):
    assert main(["new-plugin", *words.split(), "--out", str(tmp_path)]) == 2
    assert word in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_benchmarks_of_a_model_measure_its_drift_and_its_steps(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    folder = tmp_path / "own" / "bench"
    assert main(["new-bench", str(folder)]) == 0
    assert json.loads((folder / "asv.conf.json").read_text())["repo"] == "../.."
    monkeypatch.syspath_prepend(folder)
    with mock.patch.dict(sys.modules):  # the benchmarks of this repository come back
        for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
            del sys.modules[name]
        found = importlib.import_module("benchmarks.training")
    monkeypatch.setattr(found, "STEPS", 3)
    lost = {}
    for method in found.METHODS:
        case = found.Training()
        case.setup(method, "cpu")
        case.time_step(method, "cpu")
        lost[method] = case.track_bits_lost(method, "cpu")
    assert lost["stiefelkit"] < 2 < 10 < lost["plain"]
    assert main(["new-bench", str(folder)]) == 2
