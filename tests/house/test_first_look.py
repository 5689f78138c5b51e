"""The laws of a first look: help waits for no torch, and Ctrl-C prints no traceback."""

import ast
import importlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import stiefelkit as sk

PACKAGE = Path(sk.__file__).parent


def ran(program: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Runs a program of its own, which ends with a code."""
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == code, done.stderr
    return done


HELP = ["", "list", "train", "train digits", "compare", "compare adding", "drift", "bench", "bench parametrizations"]
HELP += ["bench optimizers", "bench scan", "report", "plot"]


def test_help_loads_nothing_that_computes() -> None:
    done = ran(f"""
        import sys
        from stiefelkit.cli import main
        for words in {[f"{words} --help".split() for words in HELP] + [["--version"]]!r}:
            assert main(words) == 0, words
            heavy = {{"torch", "numpy", "matplotlib", "sklearn", "scipy", "geoopt"}} & set(sys.modules)
            assert not heavy, (words, heavy)
    """)
    assert done.returncode == 0


@pytest.mark.slow
def test_names_guard_checks_of_loading_and_pickles_are_there_at_first_use(tmp_path: Path) -> None:
    import torch
    from torch import nn

    path = tmp_path / "layer.pt"
    torch.save(sk.orthogonal(nn.Linear(3, 3), "weight", "stiefel"), path)
    ran(f"""
        import sys
        import stiefelkit as sk
        assert set(sk.__all__) <= set(dir(sk))
        assert sk.errors.StiefelkitError is sk.StiefelkitError
        assert not hasattr(sk, "unitary")
        assert "torch" not in sys.modules
        import torch
        layer = torch.load({str(path)!r}, weights_only=False)
        for wrong, error in (
            (torch.optim.SGD(layer.parameters(), lr=0.1).step, sk.errors.OptimizerError),
            (lambda: layer.load_state_dict(torch.nn.Linear(3, 3).state_dict()), sk.errors.CheckpointError),
        ):
            try:
                wrong()
            except error:
                continue
            raise AssertionError(error)
        from stiefelkit import *
        assert orthogonal is sk.weights.attach.orthogonal and nn is sk.nn and CoordinateList is sk.CoordinateList
        try:
            from stiefelkit import orthogonall
        except ImportError:
            sys.exit(0)
        sys.exit(1)
    """)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("unitary", '"orthogonal", unitary where it is complex'),
        ("Stiefel", '"manifolds.Stiefel"'),
        ("OrthogonalRNN", '"nn.OrthogonalRNN"'),
        ("nn.OrthogonalLiner", '"OrthogonalLinear"'),
        ("optim.Adam", '"CayleyAdam" or "StiefelAdam"'),
        ("models.scorn", "\"create('scornn')\""),
    ],
)
def test_a_name_that_a_module_lacks_is_answered_by_those_that_may_be_meant(asked: str, said: str) -> None:
    *room, name = asked.split(".")
    module = importlib.import_module(".".join(["stiefelkit", *room]))
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert str(caught.value) == f"module {module.__name__!r} has no attribute {name!r}; did you mean {said}?"
    assert set(module.__all__) <= set(dir(module))


def test_what_a_type_checker_sees_is_what_there_is() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        seen |= {alias.name: node.module for alias in node.names}
    assert {*seen, "__version__"} == set(sk.__all__)
    for name, module in seen.items():
        home = importlib.import_module(f"stiefelkit.{name}" if module == "stiefelkit" else str(module))
        assert getattr(sk, name) is (home if module == "stiefelkit" else getattr(home, name))


STOPPED = "Stopped at once; what was saved is kept.\n"


@pytest.mark.parametrize("moment", ["cyclopts", "rich.console", "torch.utils"])
def test_ctrl_c_while_a_module_is_imported_ends_without_a_traceback(moment: str) -> None:
    done = ran(
        f"""
        import os, signal, sys

        class Hit:
            def find_spec(self, name, path, target=None):
                if name == {moment!r}:
                    sys.meta_path.remove(self)
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Hit())
        sys.argv = ["stiefelkit", "list"]
        from stiefelkit.cli import main
        sys.exit(main())
        """,
        130,
    )
    assert done.stderr == STOPPED
