"""Two gloo processes on this machine."""

import functools
import gc
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["equal_on_both", "mesh", "on_two_ranks", "rank_of_two", "sharded"]

# A server that has imported these forks each rank: seconds less than ranks that import them themselves.
PRELOADED = ["pytest", "stiefelkit", "torch.distributed.fsdp", "torch.distributed.checkpoint.state_dict"]


def on_two_ranks(run: Callable[[int], None], store: Path) -> list[int | None]:
    """Calls `run(rank)` in two processes of one group and returns their exit codes; what fails in one is raised here.

    Args:
        run: a function of a test module.
        store: a new file, by which the processes find each other.
    """
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    if method == "forkserver":
        multiprocessing.get_context(method).set_forkserver_preload(PRELOADED)
    start = torch.multiprocessing.start_processes  # pyright: ignore[reportPrivateImportUsage]
    group: Any = start(_worker, (run, f"file://{store}"), nprocs=2, join=False, start_method=method)
    while not group.join():
        pass
    return [process.exitcode for process in group.processes]


@functools.cache
def mesh() -> Any:
    """Returns the mesh of both ranks."""
    return torch.distributed.device_mesh.init_device_mesh("cpu", (2,))


def sharded(net: Any, *parts: torch.nn.Module) -> Any:
    """Shards parts of a model by FSDP2, then the model, which is returned."""
    from torch.distributed.fsdp import fully_shard

    for part in (*parts, net):
        fully_shard(part, mesh=mesh())
    return net


def equal_on_both(t: torch.Tensor) -> bool:
    """Returns whether both ranks have the same tensor."""
    both = [torch.empty_like(t) for _ in range(2)]
    dist.all_gather(both, t.detach().contiguous())
    return torch.equal(*both)


def rank_of_two(runs: list[Callable[[int], None]], **group: object) -> None:
    """Joins the group and calls the functions with the rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", **group)  # type: ignore[arg-type]
    for run in runs:
        run(dist.get_rank())
    gc.collect()  # what holds the group goes first, and neither process before the other is done
    dist.barrier()
    dist.destroy_process_group()


def _worker(rank: int, run: Callable[[int], None], store: str) -> None:
    rank_of_two([run], init_method=store, rank=rank, world_size=2)
