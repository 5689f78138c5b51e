"""How many functions of a library's own files one operation on a weight calls: `python -m benchmarks.calls`.

Calls of torch, of Python's library and of C are left out. Everything is done once before it is counted. geotorch's
counts stand beside ours where it is installed.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import stiefelkit as sk

SIZE = 64
GOALS = {"attach": 100, "read": 15, "save": 70, "load": 120, "step": 60}
"""At most so many of ours."""


def calls(function: Callable[[], Any], package: str) -> int:
    """Counts the calls of Python functions that stand in a package's folder while a function runs."""
    folder, seen = str(Path(str(sys.modules[package].__file__)).parent), 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal seen
        seen += event == "call" and frame.f_code.co_filename.startswith(folder)

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


def ours() -> dict[str, int]:
    """Counts what stiefelkit does for a weight by "cayley", and by "stiefel" in a step of CayleyAdam."""
    layers = [nn.Linear(SIZE, SIZE) for _ in range(2)]
    counts = [calls(lambda layer=layer: sk.orthogonal(layer, "weight", "cayley"), "stiefelkit") for layer in layers]
    layer, found = layers[-1], {"attach": counts[-1]}
    found |= _of_layer(layer, "stiefelkit")
    frame = sk.orthogonal(nn.Linear(SIZE, SIZE), "weight", "stiefel")
    optimizer = sk.optim.CayleyAdam(sk.optim.parameter_groups(frame, lr=1e-3))
    for _ in range(3):
        optimizer.zero_grad()
        frame(torch.ones(SIZE)).square().sum().backward()
        found["step"] = calls(optimizer.step, "stiefelkit")
    return found


def geotorchs() -> dict[str, int]:
    """Counts the same of geotorch, by its own Cayley map; nothing where it is not installed."""
    try:
        import geotorch
    except ImportError:
        return {}
    layers = [nn.Linear(SIZE, SIZE) for _ in range(2)]
    attach = [
        calls(lambda layer=layer: geotorch.orthogonal(layer, "weight", triv="cayley"), "geotorch") for layer in layers
    ]
    return {"attach": attach[-1], **_of_layer(layers[-1], "geotorch")}


def _of_layer(layer: nn.Linear, package: str) -> dict[str, int]:
    found = {}
    for _ in range(2):
        layer(torch.ones(SIZE)).sum().backward()
        state = layer.state_dict()
        found["read"] = calls(lambda: layer.weight, package)
        found["save"] = calls(layer.state_dict, package)
        found["load"] = calls(lambda state=state: layer.load_state_dict(state), package)
    return found


def main() -> None:
    """Prints the table."""
    mine, others = ours(), geotorchs()
    print(f"{'calls':<8}{'stiefelkit':>12}{'at most':>10}{'geotorch':>10}")
    for name, count in mine.items():
        print(f"{name:<8}{count:>12}{GOALS[name]:>10}{others.get(name, '-'):>10}")


if __name__ == "__main__":
    main()
