"""How many functions of the package's own files one operation on a weight calls: `python -m benchmarks.calls`.

Calls of torch, of Python's library and of C are left out. Everything is done once before it is counted.
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
"""At most so many."""


def calls(function: Callable[[], Any]) -> int:
    """Counts the calls of Python functions of the package while a function runs."""
    folder, seen = str(Path(str(sk.__file__)).parent), 0

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
    """Counts what is done for a weight by "cayley", and by "stiefel" in a step of CayleyAdam."""
    found, layers = {}, [nn.Linear(SIZE, SIZE) for _ in range(2)]
    for layer in layers:
        found["attach"] = calls(lambda layer=layer: sk.orthogonal(layer, "weight", "cayley"))
        layer(torch.ones(SIZE)).sum().backward()
        state = layer.state_dict()
        found["read"] = calls(lambda layer=layer: layer.weight)
        found["save"] = calls(layer.state_dict)
        found["load"] = calls(lambda layer=layer, state=state: layer.load_state_dict(state))
    frame = sk.orthogonal(nn.Linear(SIZE, SIZE), "weight", "stiefel")
    optimizer = sk.optim.CayleyAdam(sk.optim.parameter_groups(frame, lr=1e-3))
    for _ in range(3):
        optimizer.zero_grad()
        frame(torch.ones(SIZE)).square().sum().backward()
        found["step"] = calls(optimizer.step)
    return found


def main() -> None:
    """Prints the table."""
    print(f"{'calls':<8}{'stiefelkit':>12}{'at most':>10}")
    for name, count in ours().items():
        print(f"{name:<8}{count:>12}{GOALS[name]:>10}")


if __name__ == "__main__":
    main()
