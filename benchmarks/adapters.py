"""Times the step of an adapter, forward and backward, against PEFT's OFT and HRA, and says how orthogonal each is.

    pip install peft
    python -m benchmarks.adapters --n 1024 --tokens 512

prints, for blocks of some sizes and for reflectors, process CPU time over that of the adapter of this library, whole
and beyond that of the frozen layer alone (medians of interleaved calls in one process), and the largest
||R^T R - I||_F of a block, or of the product of reflectors, in rounding limits, for skew parts of about the norms that
are asked for.
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error, rounding_limit


def of_peft(layer: nn.Linear, config: Any) -> Any:
    """The layer inside PEFT's model of one linear layer."""
    import peft  # pyright: ignore[reportMissingImports]

    return peft.get_peft_model(nn.Sequential(layer), config).base_model.model[0]


def contenders(n: int, block: int, reflectors: int) -> dict[str, dict[str, Any]]:
    """The adapters of one layer each, by race and name; ours first, and alone where PEFT is not installed."""

    def layer() -> nn.Linear:
        return nn.Linear(n, n, bias=False)

    ours: dict[str, dict[str, Any]] = {
        f"blocks of {block}": {"OrthogonalAdapter": sk.nn.OrthogonalAdapter(layer(), block_size=block)},
        f"{reflectors} reflectors": {
            "OrthogonalAdapter": sk.nn.OrthogonalAdapter(layer(), "householder", reflections=reflectors)
        },
    }
    if importlib.util.find_spec("peft") is None:
        return ours
    import peft  # pyright: ignore[reportMissingImports]

    blocks: dict[str, Any] = dict(target_modules=["0"], oft_block_size=block)
    theirs = (
        {
            "PEFT OFT, exact": of_peft(layer(), peft.OFTConfig(**blocks, use_cayley_neumann=False)),
            "PEFT OFT, default": of_peft(layer(), peft.OFTConfig(**blocks)),
        },
        {"PEFT HRA": of_peft(layer(), peft.HRAConfig(r=reflectors, target_modules=["0"]))},
    )
    return {race: mine | others for (race, mine), others in zip(ours.items(), theirs, strict=True)}


def trained(adapter: nn.Module) -> list[nn.Parameter]:
    return [p for p in adapter.parameters() if p.requires_grad]


def step(adapter: nn.Module, x: Tensor, g: Tensor) -> None:
    torch.autograd.grad(adapter(x), [x, *trained(adapter)], g)


def seconds(adapters: dict[str, Any], x: Tensor, rounds: int) -> dict[str, float]:
    """Median time of a step of each."""
    g, taken = torch.randn_like(x.detach()), {name: [] for name in adapters}
    for _ in range(rounds + 2):
        for name, adapter in adapters.items():
            start = time.process_time()
            step(adapter, x, g)
            taken[name].append(time.process_time() - start)
    return {name: statistics.median(times[2:]) for name, times in taken.items()}


def rotation(adapter: Any) -> Tensor:
    """R, whatever the adapter is of."""
    if isinstance(adapter, sk.nn.OrthogonalAdapter):
        return adapter.rotation.weight
    if hasattr(adapter, "oft_R"):
        return adapter.oft_R["default"].get_weight()
    n = adapter.in_features
    with torch.no_grad():
        adapter.base_layer.weight.copy_(torch.eye(n))
    return adapter(torch.eye(n))


def limits(adapter: Any, block: int) -> float:
    """The largest ||R^T R - I||_F of a block, in rounding limits."""
    r = rotation(adapter).detach()
    k = len(r) // block
    blocks = r.view(k, block, k, block).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    return orthogonality_error(blocks).max().item() / rounding_limit(block, torch.float32)


@torch.no_grad()
def draw(adapter: nn.Module, scale: Callable[[Tensor], float]) -> None:
    for c in trained(adapter):
        c.normal_().mul_(scale(c))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--reflectors", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--norms", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    if importlib.util.find_spec("peft") is None:
        print("PEFT is not installed (`pip install peft`): its adapters are left out.")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(chosen.tokens, chosen.n, requires_grad=True)
    for i in range(max(len(chosen.blocks), len(chosen.reflectors))):
        block = chosen.blocks[min(i, len(chosen.blocks) - 1)]
        races = contenders(chosen.n, block, chosen.reflectors[min(i, len(chosen.reflectors) - 1)])
        for race, adapters in races.items():
            if race.endswith("reflectors") and i >= len(chosen.reflectors):
                continue
            of_blocks = race.startswith("blocks")
            alone = nn.Linear(chosen.n, chosen.n, bias=False).requires_grad_(False)
            timed = seconds({"alone": alone, **adapters}, x, chosen.rounds)
            bare, ours = timed["alone"], timed["OrthogonalAdapter"]
            for name, adapter in adapters.items():
                shown = []
                for norm in chosen.norms if of_blocks else [1.0]:
                    # The norm of a random skew matrix with normal entries is about 2 sqrt(b).
                    draw(adapter, lambda c: norm / (2 * block**0.5) if of_blocks else 1.0)  # noqa: B023
                    shown.append(f"{limits(adapter, block if of_blocks else chosen.n):10.4g}")
                whole, beyond = timed[name] / ours, (timed[name] - bare) / (ours - bare)
                times = f"{whole:5.2f}, beyond the layer {beyond:5.2f}"
                print(f"{race:16} {name:20} time {times}  limits {' '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
