"""What an installation must be able to do with its own requirements alone: python -I tests/smoke.py."""

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import stiefelkit as sk


def train(module, optimizer, x):
    for _ in range(5):
        optimizer.zero_grad()
        out = module(x)
        (out[0] if isinstance(out, tuple) else out).square().mean().backward()
        optimizer.step()
    for name, drift in sk.drift(module).items():
        assert drift.error <= 2 * drift.limit + 1e-6, (name, drift)


def maps():
    for name, cls in sk.available().items():
        if cls.supports((6, 6), torch.float32) is None and name not in ("margin", "stiefel"):
            layer = sk.orthogonal(nn.Linear(6, 6), "weight", name)
            train(layer, torch.optim.Adam(layer.parameters(), lr=0.01), torch.ones(3, 6))


def optimizers():
    for cls in sk.optim.available().values():
        if getattr(cls, "moves_frames", False):
            make: Any = cls
            model = nn.Sequential(sk.orthogonal(nn.Linear(6, 6), "weight", "stiefel"), nn.Linear(6, 2))
            train(model, make(sk.optim.parameter_groups(model, lr=1e-3)), torch.ones(3, 6))


def nets():
    for name in sk.models.available():
        net = sk.models.create(name, 3, 8, 2)
        assert net(torch.zeros(2, 5, 3)).shape == (2, 5, 2)
    rnn = sk.nn.OrthogonalRNN(3, 8)
    train(rnn, torch.optim.RMSprop(sk.optim.parameter_groups(rnn, lr=1e-3)), torch.ones(7, 2, 3))
    other = sk.nn.OrthogonalRNN(3, 8)
    other.load_state_dict(rnn.state_dict())
    assert torch.equal(other(torch.ones(7, 2, 3))[0], rnn(torch.ones(7, 2, 3))[0])


def command():
    """Without the extra it says in one sentence what to install; with it, it shows its help."""
    words = [sys.executable, "-I", "-m", "stiefelkit", "--help"]
    with tempfile.TemporaryDirectory() as elsewhere:
        done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=elsewhere)
    assert done.returncode == 0 or (done.returncode == 2 and "stiefelkit[cli]" in done.stderr), done.stderr


def main():
    assert importlib.metadata.version("stiefelkit") == sk.__version__
    assert (Path(sk.__file__).parent / "py.typed").exists()
    for file in (
        "cli/skeletons/parametrization/module.py.in",
        "cli/skeletons/pyproject.toml.in",
        "measuring/page.html",
    ):
        assert (Path(sk.__file__).parent / file).exists()
    for name in sk.__all__:
        getattr(sk, name)
    maps()
    optimizers()
    nets()
    sk.testing.check_parametrization(sk.parametrizations.Cayley, ["frames", "round_trip"], only="Cayley-16x16-float32")
    command()
    print(f"stiefelkit {sk.__version__} in {Path(sk.__file__).parent} works")


if __name__ == "__main__":
    main()
