"""Tensors that may be sharded over the ranks of a mesh (FSDP2), and plain ones alike."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["as_on_the_first", "is_sharded", "is_sharding", "is_sharding_unit", "local_part", "placed_like", "whole"]


def is_sharded(*tensors: Tensor) -> bool:
    """Whether one of the tensors is."""
    for t in tensors:
        if hasattr(t, "device_mesh"):
            return True
    return False


def is_sharding(hook: Callable[..., Any]) -> bool:
    """Whether a hook of a module is FSDP2's."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")


def is_sharding_unit(module: nn.Module) -> bool:
    """Whether FSDP2 gathers and frees the parameters of a module, but for those of units inside it, together."""
    return any(cls.__name__ == "FSDPModule" for cls in type(module).__mro__)


def whole(t: Tensor) -> Tensor:
    """The tensor, gathered if it is sharded."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[operator]


def local_part(t: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return t.to_local() if hasattr(t, "to_local") else t  # type: ignore[operator]


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, with the placement of a sharded one."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.contiguous(), like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]


def as_on_the_first(value: Tensor, like: Tensor) -> Tensor:
    """The tensor that the first of the ranks which share `like` has, if that is sharded; else the one that is given."""
    if not is_sharded(like):
        return value
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh: Any = like.device_mesh  # type: ignore[attr-defined]
    return distribute_tensor(value.to(mesh.device_type), mesh, [Replicate()] * mesh.ndim).to_local()
