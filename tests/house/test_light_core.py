"""The library needs torch, NumPy, geoopt and safetensors alone, and the command line says what it needs besides."""

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from test_first_look import ran

import stiefelkit as sk
from stiefelkit.cli import EXTRA

PACKAGE = Path(sk.__file__).parent
PROJECT = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
CORE = {"geoopt", "numpy", "safetensors", "torch"}
OF_OTHERS = {"scipy", "typing_extensions"}  # come with geoopt and with torch
AT_HAND = {"geotorch", "pogo", "pytest", "triton"}  # used where they are there
WITH_COMMANDS = ("cli", "measuring", "training", "checks.py", "figure.py")
"""Folders of what the commands do, and files that they alone import."""

HIDDEN = """
    import sys

    class Without:
        def __init__(self, finder, names):
            self.finder, self.names = finder, names

        def __getattr__(self, name):
            return getattr(self.finder, name)

        def find_spec(self, name, *args):
            return None if name.partition(".")[0] in self.names else self.finder.find_spec(name, *args)

    def hide(*names):
        sys.meta_path[:] = [Without(finder, names) for finder in sys.meta_path]

    def found():
        sys.meta_path[:] = [finder.finder for finder in sys.meta_path]
"""


def hiding(program: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a program that can hide packages from itself, and which ends with a code."""
    return ran(textwrap.dedent(HIDDEN) + textwrap.dedent(program), code)


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;\[ ]", requirement)[0] for requirement in requirements}


def test_the_core_is_four_packages_and_the_extra_is_what_commands_miss_without_it() -> None:
    assert names_of(PROJECT["dependencies"]) == CORE
    extras = PROJECT["optional-dependencies"]
    assert names_of(extras["cli"]) == set(EXTRA.values())
    for extra in ("test", "bench"):
        assert "stiefelkit[cli]" in extras[extra]
    assert "stiefelkit[data]" in extras["test"]
    assert "stiefelkit[test]" in extras["dev"]


@pytest.mark.slow
def test_no_file_but_those_of_commands_imports_what_the_extra_brings() -> None:
    known = CORE | OF_OTHERS | AT_HAND | {"stiefelkit"} | set(sys.stdlib_module_names)
    extras = PROJECT["optional-dependencies"]
    of_extras = set().union(*(names_of(extras[name]) for name in ("data", "speech", "sweep")))
    of_commands = set(EXTRA) | of_extras | {"cycler", "sqlalchemy", "scipy"}  # matplotlib, optuna and geoopt bring them
    for path in sorted(PACKAGE.rglob("*.py")):
        where = path.relative_to(PACKAGE)
        may = known | of_commands if where.parts[0] in WITH_COMMANDS else known
        nodes = list(ast.walk(ast.parse(path.read_text())))
        found = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        found += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
        assert {module.partition(".")[0] for module in found} <= may, where


@pytest.mark.slow
def test_the_library_works_without_any_extra_and_imports_geoopt_for_manifolds_alone() -> None:
    others = set().union(*map(names_of, PROJECT["optional-dependencies"].values())) - {"stiefelkit"}
    imports = {*EXTRA, *(name.replace("-", "_") for name in others), "pytest_timeout", "xdist", "geoopt"}
    hiding(f"""
        hide(*{sorted(imports)!r})
        import stiefelkit as sk
        import torch
        from torch import nn

        for name in set(sk.__all__) - {{"manifolds"}}:
            getattr(sk, name)
        for room in (sk.functional, sk.init, sk.metrics, sk.nn, sk.optim, sk.testing, sk.errors):
            for name in room.__all__:
                getattr(room, name)
        assert sk.available() and sk.models.available()

        model = nn.Sequential(sk.orthogonal(nn.Linear(3, 3), "weight", "stiefel"), sk.nn.OrthogonalRNN(3, 4))
        layer = sk.orthogonal(nn.Linear(3, 3), "weight", "cayley")
        rates = sk.optim.parameter_groups(model, lr=0.1)
        for net, optimizer in (
            (layer, torch.optim.SGD(layer.parameters(), lr=0.1)),
            (model, sk.optim.MultiplicativeCayley(rates)),
        ):
            out = net(torch.ones(2, 5, 3))
            (out[0] if isinstance(out, tuple) else out).square().sum().backward()
            optimizer.step()
            assert all(drift.error <= 2 * drift.limit for drift in sk.drift(net).values())
        Cayley = sk.parametrizations.Cayley
        sk.testing.check_parametrization(Cayley, ["frames", "checkpoint"], only="Cayley-16x16-float32")

        missing = {sorted(imports)!r}
        assert not set(missing) & set(sys.modules), set(missing) & set(sys.modules)
        found()
        assert sk.manifolds.Stiefel().name and "geoopt" in sys.modules
        assert not set(missing) - {{"geoopt"}} & set(sys.modules)
    """)


@pytest.mark.slow
def test_layers_and_models_are_there_without_the_compiler_of_torch() -> None:
    hiding("""
        import sys
        import stiefelkit as sk

        sk.nn.OrthogonalRNN(3, 4), sk.models.create("goru", 2, 4, 3), sk.optim.CayleySGD, sk.functional.product
        assert "torch._dynamo" not in sys.modules
    """)


TRAIN = "train digits --model scornn"


@pytest.mark.parametrize(("words", "hidden"), [("", [*EXTRA]), ("--help", ["cyclopts"]), (TRAIN, ["sklearn", "rich"])])
def test_commands_say_in_one_sentence_what_to_install(words: str, hidden: list[str]) -> None:
    program = f"hide(*{hidden!r})\nsys.argv = {['stiefelkit', *words.split()]!r}\n"
    done = hiding(program + "import runpy; runpy.run_module('stiefelkit', run_name='__main__')", 2)
    missing = ", ".join(package for name, package in EXTRA.items() if name in hidden)
    said = f'Error: The command line needs {missing}, got an installation without; pip install "stiefelkit[cli]".\n'
    assert (done.stdout, done.stderr) == ("", said)
