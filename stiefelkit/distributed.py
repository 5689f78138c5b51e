"""What torch.distributed needs to know of coordinates."""

from typing import Any

from torch import nn

from stiefelkit.errors import OptionError
from stiefelkit.host import orthogonal_weights

__all__ = ["fully_shard_coordinates"]


def fully_shard_coordinates(model: nn.Module, mesh: Any = None, **options: Any) -> nn.Module:
    """Makes the coordinates of every orthogonal weight an FSDP2 unit of their own, and returns the model.

    FSDP2 wants one dtype in a unit, and coordinates are float32 where a model is bfloat16. Call it before
    `torch.distributed.fsdp.fully_shard` on the layers and on the model; where all parameters are of one dtype it is not
    needed.

    Call it once. A mixed-precision policy with `param_dtype` belongs to none of the units, since frames are computed
    from coordinates as they are: make the model bfloat16 instead. FSDP2 takes no weight without coordinates (1 x 1).
    The device mesh and the options are those of `fully_shard`.

    Raises:
        OptionError: `mp_policy` would cast the coordinates.
    """
    from torch.distributed.fsdp import fully_shard

    cast = getattr(options.get("mp_policy"), "param_dtype", None)
    if cast is not None:
        raise OptionError(f"fully_shard_coordinates needs coordinates in their own dtype, got mp_policy with {cast}.")
    for weight in orthogonal_weights(model):
        if any(c.numel() for c in weight.coordinate_list.coordinates.values()):
            fully_shard(weight.coordinate_list, mesh=mesh, **options)
    return model
