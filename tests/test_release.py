"""What a release is made of agrees with itself: version, Pythons, files of the sdist, workflows, commands."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import stiefelkit

ROOT = Path(__file__).parent.parent
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
    assert headings[0] == "Unreleased"
    assert headings[1] == stiefelkit.__version__


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


def test_the_sdist_has_what_its_tests_read():
    for path in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        assert (ROOT / path.removeprefix("/")).exists(), path


def test_the_smoke_test_of_installations_passes_here():
    smoke = str(ROOT / "tests" / "smoke.py")
    program = f"import runpy, sys; sys.path[0] = {str(ROOT)!r}; runpy.run_path({smoke!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"stiefelkit {stiefelkit.__version__} in {ROOT}" in done.stdout
