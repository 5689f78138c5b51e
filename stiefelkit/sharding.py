"""Tensors that may be sharded over the ranks of a mesh (FSDP2), and plain ones alike."""

from torch import Tensor

__all__ = ["local_part", "placed_like", "whole"]


def whole(t: Tensor) -> Tensor:
    """The tensor, gathered if it is sharded."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t  # type: ignore[operator]


def local_part(t: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return t.to_local() if hasattr(t, "to_local") else t  # type: ignore[operator]


def placed_like(value: Tensor, like: Tensor) -> Tensor:
    """A tensor that every rank has, with the placement of a sharded one."""
    if not hasattr(like, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.contiguous(), like.device_mesh, like.placements, src_data_rank=None)  # type: ignore[attr-defined]
