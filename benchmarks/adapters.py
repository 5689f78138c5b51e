"""Times the step of an adapter, forward and backward, against PEFT's OFT and HRA, and says how orthogonal each is.

    pip install peft
    python -m benchmarks.adapters --n 1024 --tokens 512

prints, for blocks of some sizes and for reflectors, process CPU time over that of the adapter of this library, whole
and beyond that of the frozen layer alone (medians of interleaved calls in one process), and the largest
||R^T R - I||_F of a block, or of the product of reflectors, in rounding limits, for skew parts of norms of about
0.1, 0.3 and 1.
"""

import argparse
import importlib
import statistics
import time
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.metrics import orthogonality_error, rounding_limit

ROUNDS = 15
NORMS = (0.1, 0.3, 1.0)
"""Of the skew parts of blocks."""
RACES: dict[str, tuple[dict[str, Any], dict[str, tuple[str, dict[str, Any]]]]] = {
    **{
        f"blocks of {size}": (
            {"block_size": size},
            {
                "PEFT OFT, exact": ("OFTConfig", {"oft_block_size": size, "use_cayley_neumann": False}),
                "PEFT OFT, default": ("OFTConfig", {"oft_block_size": size}),
            },
        )
        for size in (32, 64, 128, 256)
    },
    **{
        f"{count} reflectors": (
            {"parametrization": "householder", "reflections": count},
            {"PEFT HRA": ("HRAConfig", {"r": count})},
        )
        for count in (8, 32)
    },
}
"""Options of our adapter, and name to configuration of PEFT's beside it."""


def trained(adapter: nn.Module) -> list[nn.Parameter]:
    return [p for p in adapter.parameters() if p.requires_grad]


def of_peft(layer: nn.Linear, config: str, options: dict[str, Any]) -> Any:
    """The layer inside PEFT's model of one linear layer."""
    peft = importlib.import_module("peft")
    given = getattr(peft, config)(target_modules=["0"], **options)
    return peft.get_peft_model(nn.Sequential(layer), given).base_model.model[0]


def seconds(adapters: dict[str, Any], x: Tensor) -> dict[str, float]:
    """Median time of a step of each."""
    g, taken = torch.randn_like(x.detach()), {name: [] for name in adapters}
    for _ in range(ROUNDS + 2):
        for name, adapter in adapters.items():
            start = time.process_time()
            torch.autograd.grad(adapter(x), [x, *trained(adapter)], g)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    chosen = parser.parse_args()
    if find_spec("peft") is None:
        print("PEFT is not installed (`pip install peft`): its adapters are left out.")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(chosen.tokens, chosen.n, requires_grad=True)
    for race, (own, others) in RACES.items():
        alone, *layers = (nn.Linear(chosen.n, chosen.n, bias=False).requires_grad_(False) for _ in range(4))
        adapters: dict[str, Any] = {"OrthogonalAdapter": sk.nn.OrthogonalAdapter(layers.pop(), **own)}
        if find_spec("peft") is not None:
            adapters |= {name: of_peft(layers.pop(), *config) for name, config in others.items()}
        timed = seconds({"alone": alone, **adapters}, x)
        bare, ours = timed["alone"], timed["OrthogonalAdapter"]
        block = own.get("block_size", chosen.n)
        # the norm of a skew matrix with normal entries is about 2 sqrt(b)
        sizes = [norm / (2 * block**0.5) for norm in NORMS] if "block_size" in own else [1.0]
        for name, adapter in adapters.items():
            shown = []
            for size in sizes:
                for c in trained(adapter):
                    nn.init.normal_(c, std=size)
                shown.append(f"{limits(adapter, block):10.4g}")
            whole, beyond = timed[name] / ours, (timed[name] - bare) / (ours - bare)
            times = f"{whole:5.2f}, beyond the layer {beyond:5.2f}"
            print(f"{race:16} {name:20} time {times}  limits {' '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
