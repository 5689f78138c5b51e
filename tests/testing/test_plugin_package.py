"""A map in a package of its own: built, installed beside stiefelkit, listed, trained, raced, measured, uninstalled."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from stiefelkit.testing import LAWS, check_parametrization, seeds

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "examples" / "stiefelkit-newton"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def ran(*words, cwd, code=0):
    """Runs a program that finds stiefelkit in no way but by the environment that it is in."""
    without = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "COLUMNS")}
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=without | {"COLUMNS": "160"}, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of a fresh environment that shares torch with this one, and has the wheel of the plugin."""
    room = tmp_path_factory.mktemp("plugin")
    shutil.copytree(PROJECT, room / "source")
    ran(*PIP, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", "wheels", "./source", cwd=room)
    (wheel,) = (room / "wheels").glob("stiefelkit_newton-*.whl")
    builder = venv.EnvBuilder()
    builder.create(room / "fresh")
    interpreter = builder.ensure_directories(room / "fresh").env_exe
    home = ran(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=room).stdout.strip()
    shared = [str(ROOT), *(path for path in sys.path if path.endswith("-packages"))]
    # a line of code in ASCII, since Python 3.11 reads these files in the encoding of the locale
    Path(home, "shared.pth").write_text(f"import sys; sys.path += {shared!a}\n", encoding="ascii")
    ran(*PIP, "--python", interpreter, "install", "--no-index", "--no-deps", str(wheel), cwd=room)
    return interpreter


COMMANDS = f"""
from stiefelkit.cli import main

seed = ["--seed", "{seeds.seed()}"]
small = "--T 4 --train-size 40 --test-size 20 --hidden-size 6 --steps 4 --batch-size 8 --eval-every 2 --out run"
for words in (
    "list",
    "list newton",
    f"train adding --model exprnn --options.parametrization newton {{small}}",
    "bench parametrizations --parametrizations newton,cayley --sizes 6 --seconds 0.01",
    "drift --methods newton --sizes 6 --steps 20",
):
    assert main(words.split() + (seed if words.split()[0] in ("train", "drift") else [])) == 0, words
"""


@pytest.mark.slow
def test_a_package_is_used_by_every_command_until_it_is_uninstalled(python, tmp_path):
    shown = ran(python, "-c", COMMANDS, cwd=tmp_path).stdout
    row = next(line for line in shown.splitlines() if line.startswith("│ newton "))
    assert "polar factor" in row
    assert "stiefelkit-newton 0.1.0" in row
    assert (tmp_path / "run").is_dir()
    assert (tmp_path / "runs" / "drift" / "drift.json").exists()
    ran(*PIP, "--python", python, "uninstall", "--yes", "stiefelkit-newton", cwd=tmp_path)
    refused = ran(python, "-m", "stiefelkit", "list", "newton", cwd=tmp_path, code=2)
    assert refused.stderr.startswith("Error: Nothing is named 'newton'")


def test_the_map_of_the_example_keeps_the_laws(monkeypatch):
    monkeypatch.syspath_prepend(PROJECT)
    from stiefelkit_newton import Newton  # pyright: ignore[reportMissingImports]

    quick = set(LAWS) - {"compile", "second_derivatives"}
    for case in ("Newton-4x4-float32", "Newton-2x5x5-float64", "Newton-7x3-complex64"):
        check_parametrization(Newton, quick, only=case)
