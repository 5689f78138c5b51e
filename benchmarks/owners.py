"""Ranks that share the mapping of weights beside ranks that each map all: measured on this machine, and simulated.

    python -m benchmarks.owners --processes 2 --n 16 32 64 --count 200

trains as DDP does, between gloo processes of this machine: for each size the weights that rank 0 maps a step, the bytes
that it receives for them, median times of forward and backward of weights alone (whole processes interleaved, each
road in turn; the time that a busy machine takes away is in them), CPU time of rank 0, and what the model has predicted.

    python -m benchmarks.owners --simulate --count 1000 --ranks 64

maps all weights, and then the share of each rank, in this one process, and puts together the longest share and the time
of the collectives over links that are given, by the model of docs/distributed.md.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import stiefelkit as sk
from stiefelkit.weights.group import StackOfMaps
from stiefelkit.weights.owners import Kind, predict, rows_of_ranks, seconds_of

LINKS = {
    "1 GbE": sk.Link(1e-4, 1.25e8),
    "10 GbE": sk.Link(5e-5, 1.25e9),
    "100 Gb": sk.Link(2e-5, 1.25e10),
    "NVLink": sk.Link(2e-5, 2e11),
}


class Read(nn.Module):
    """Weights that are read, and their product with a constant, which is what a loss makes of them."""

    def __init__(self, count: int, n: int, name: str):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(sk.orthogonal(nn.Linear(n, n, bias=False), "weight", name) for _ in range(count))

    def forward(self, g: Tensor) -> Tensor:
        return torch.stack([layer.weight for layer in self.layers]).mul(g).sum()  # type: ignore[misc]


def measure(rank: int, options: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.processes)
    mapped: list[int] = []
    plain: Callable[..., Tensor] = StackOfMaps.__call__

    def counted(self: StackOfMaps, coordinates: Any) -> Tensor:
        mapped.append(len(coordinates[0]))
        return plain(self, coordinates)

    for n in options.n:
        owners = sk.Owners(when="always")
        wrapped = nn.parallel.DistributedDataParallel
        nets = [wrapped(sk.group_(Read(options.count, n, options.map), owners=one)) for one in (None, owners)]
        link = owners.measured_link(torch.device("cpu"))
        g = torch.randn(options.count, n, n, generator=torch.Generator().manual_seed(rank))
        walls: list[list[float]] = [[], []]
        cpus: list[list[float]] = [[], []]
        for _ in range(options.repeats + 2):
            for net, wall, cpu in zip(nets, walls, cpus, strict=True):
                dist.barrier()
                start, used = time.perf_counter(), time.process_time()
                net(g).backward()
                wall.append(time.perf_counter() - start)
                cpu.append(time.process_time() - used)
        StackOfMaps.__call__ = counted
        mapped.clear()
        nets[1](g).backward()
        StackOfMaps.__call__ = plain
        (kind,) = kinds_of(options.count, n, options.map, owners.size)
        prediction = predict([kind], owners.size, link)
        if rank == 0:
            (wall_alone, wall_shared), (cpu_alone, cpu_shared) = (
                [statistics.median(t[2:]) for t in x] for x in (walls, cpus)
            )
            print(
                f"{n:5} {sum(mapped):8} {prediction.received / 1e6:10.2f} {1e3 * wall_alone:10.1f} "
                f"{1e3 * wall_shared:10.1f} {wall_alone / wall_shared:8.2f} {cpu_alone / cpu_shared:8.2f} "
                f"{prediction.alone / prediction.shared:10.2f}",
                flush=True,
            )
    dist.barrier()
    dist.destroy_process_group()


def kinds_of(count: int, n: int, name: str, ranks: int) -> list[Kind]:
    """The weights as the model sees them, timed in this process."""
    share = -(-count // ranks)
    few, all_of_them = (mapping_seconds(size, n, name) for size in (share, count))
    one_more = max(all_of_them - few, 0.0) / max(count - share, 1)
    return [Kind(count, 4 * n * n, float(n**3), one_more, max(few - share * one_more, 0.0))]


def mapping_seconds(count: int, n: int, name: str) -> float:
    """Of a stack, forward and backward, in parts of 2^20 entries as groups have them."""
    param = sk.available()[name]((n, n))
    most = min(count, max(1, (1 << 20) // n**2))
    coordinates, chart = param.initial("haar")
    held = [c.expand(most, *c.shape).clone().requires_grad_() for c in coordinates]
    stacks = StackOfMaps(param)
    signs = {key: value.expand(most, *value.shape).clone() for key, value in chart.items()}
    g = torch.randn(most, n, n)

    def run() -> None:
        torch.autograd.grad(stacks.with_chart(signs, held), held, g)

    return seconds_of(run, torch.device("cpu"), 5) * count / most


def simulate(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    print(f"{options.count} weights by {options.map!r} on {options.ranks} ranks, float32; times in ms a step")
    print(f"{'n':>5} {'alone':>9} {'share':>9} {'MB':>9}" + "".join(f"{name:>18}" for name in LINKS))
    for n in options.n:
        (row,) = zip(*rows_of_ranks([options.count], [1.0], options.ranks), strict=True)
        share = max(part.stop - part.start for part in row)
        (kind,) = kinds_of(options.count, n, options.map, options.ranks)
        cells = []
        for link in LINKS.values():
            prediction = predict([kind], options.ranks, link)
            cells.append(f"{1e3 * prediction.shared:10.1f} {prediction.alone / prediction.shared:6.1f}x")
        print(
            f"{n:5} {1e3 * prediction.alone:9.1f} {1e3 * kind.time(share):9.2f} {prediction.received / 1e6:9.1f}"
            + "".join(cells),
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulate", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--map", default="cayley")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--n", type=int, nargs="+", default=[16, 32, 64, 128])
    options = parser.parse_args()
    if options.simulate:
        simulate(options)
        return
    print(f"{options.count} weights by {options.map!r}, {options.processes} gloo processes")
    heads = {"mapped": 8, "MB": 10, "alone ms": 10, "shared ms": 10, "ratio": 8, "CPU": 8, "predicted": 10}
    print(" ".join([f"{'n':>5}", *(f"{head:>{width}}" for head, width in heads.items())]))
    with tempfile.TemporaryDirectory() as folder:
        start = torch.multiprocessing.start_processes  # pyright: ignore[reportPrivateImportUsage]
        start(measure, (options, f"file://{Path(folder) / 'store'}"), options.processes, start_method="spawn")


if __name__ == "__main__":
    main()
