"""What a release is made of agrees with itself: version, Pythons, files of the sdist, workflows, commands."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stiefelkit

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CI = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
RELEASE = (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_the_version_stands_in_one_file_and_the_citation_and_the_changelog_have_it():
    assert "version" not in PROJECT["project"]
    assert (
        ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    ).read_text() == f'__version__ = "{stiefelkit.__version__}"\n'
    assert f"\nversion: {stiefelkit.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    headings = re.findall(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert stiefelkit.__version__ in headings[:2]


def test_every_python_that_is_named_is_tried_on_every_system():
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["project"]["classifiers"]))
    assert named == ["3.11", "3.12", "3.13", "3.14"]
    assert PROJECT["project"]["requires-python"] == f">={named[0]}"
    (tried,) = re.findall(r"python-version: \[(.*)\]", CI)
    assert re.findall(r'"(.*?)"', tried) == named
    (systems,) = re.findall(r" os: \[(.*)\]", CI)
    assert systems.split(", ") == ["ubuntu-latest", "ubuntu-24.04-arm", "macos-latest", "windows-latest"]


@pytest.mark.parametrize("workflow", [CI, RELEASE], ids=["ci", "release"])
def test_workflows_run_what_anybody_can(workflow):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = re.findall(r"run: (.*)", workflow)
    assert "bash .ci/run" in commands
    for command in commands:
        words = command.partition(" #")[0].split()
        if words[0] == "make":
            assert set(words[1:]) <= targets
        assert words[0] in ("bash", "make", "choco", "grep", "build/fresh/bin/python")


@pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="needs a shell")
@pytest.mark.parametrize("folder", ["ä b", "stiefelkit"])
def test_ci_runs_in_a_folder_of_the_projects_name_and_leaves_the_environment_and_the_tree_alone(folder, tmp_path):
    tree, told = tmp_path / folder, tmp_path / "told"
    for path in (".ci", ".git", ".venv", "runs", "stiefelkit", "docs/_build"):
        (tree / path).mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tree / ".ci")
    (tree / "stiefelkit" / "changed.py").write_text("")
    (tmp_path / "bin").mkdir()
    make = tmp_path / "bin" / "make"
    make.write_text('#!/bin/sh\n{ pwd; echo "$1"; ls -A . docs stiefelkit; } >> "$TOLD"; mkdir -p .venv\n')
    make.chmod(0o755)
    (tmp_path / "room").mkdir()
    path = f"{make.parent}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "TOLD": str(told), "TMPDIR": str(tmp_path / "room")}
    before = sorted(tree.rglob("*"))
    subprocess.run(["bash", str(tree / ".ci" / "run")], env=environment, check=True)
    first, _, rest = told.read_text(encoding="utf-8").partition(".venv/.dev\n")
    found, _, later = rest.partition("changed.py\n")
    assert Path(first.strip()).name == "stiefelkit"
    assert {".ci", ".git"} <= set(found.splitlines())
    assert (".venv" in found.splitlines()) == (folder == "stiefelkit")
    assert later.splitlines().count("test-all") == 1
    assert sorted(tree.rglob("*")) == before
    assert list((tmp_path / "room").iterdir()) == []


@pytest.mark.skipif(os.name == "nt" or shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("given", "heard"), [("C", "C.UTF-8"), ("POSIX", "C.UTF-8"), ("de_DE.UTF-8", "de_DE.UTF-8")])
def test_a_path_with_any_letters_is_read_by_the_environment_under_the_c_locale(given, heard, tmp_path):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "constraints.txt").write_text("")
    rule = 'include Makefile\nheard:\n\t@echo "$$LC_ALL"\n'
    words = ["make", "-s", "-f", "-", "heard"]
    environment = os.environ | {"LC_ALL": given}
    done = subprocess.run(words, input=rule, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == heard


@pytest.mark.slow
def test_the_smoke_test_of_installations_passes_here():
    smoke = str(ROOT / "tests" / "smoke.py")
    program = f"import runpy, sys; sys.path[0] = {str(ROOT)!r}; runpy.run_path({smoke!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"stiefelkit {stiefelkit.__version__} in {ROOT}" in done.stdout


def test_the_sdist_has_what_its_tests_read():
    for path in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        assert (ROOT / path.removeprefix("/")).exists(), path


def test_the_files_that_every_arithmetic_is_tried_on_are_there():
    (named,) = re.findall(r"^ARITHMETIC := .*?suffix \.py,(.*?)\)\)$", (ROOT / "Makefile").read_text(), re.M | re.S)
    for name in named.replace("\\", "").split():
        assert (ROOT / "tests" / f"{name}.py").exists(), name
