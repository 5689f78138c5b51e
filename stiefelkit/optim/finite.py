"""Gradients that are not finite are refused before anything is written, by the name of their weight."""

import math
from collections.abc import Sequence

import torch

from stiefelkit.errors import NonFiniteError
from stiefelkit.guard import frames
from stiefelkit.optim.bucket import Bucket
from stiefelkit.sharding import is_sharded

__all__ = ["check_gradients", "not_finite"]


def check_gradients(who: str, buckets: Sequence[Bucket]) -> None:
    """Raises NonFiniteError unless all gradients, and the squares of their norms, are finite."""
    for device in {bucket.params[0].device for bucket in buckets}:
        here = [bucket for bucket in buckets if bucket.params[0].device == device]
        shares = torch.stack([share for bucket in here for share in bucket.shares_of_overflow()])
        if not (shares.max().item() < 1 and math.isfinite(shares.sum().item())):
            raise not_finite(who, here)


def not_finite(who: str, buckets: Sequence[Bucket]) -> NonFiniteError:
    """Returns the error for gradients that are not finite, or too large, and names theirs."""
    watched = frames()
    bad, overflows, sharded = [], [], False
    for bucket in buckets:
        for p, grad, share in zip(bucket.params, bucket.local_gradients(), bucket.shares_of_overflow(), strict=True):
            coordinate_list = watched[id(p)].coordinate_list if id(p) in watched else None
            name = f"a frame of shape {tuple(p.shape)}" if coordinate_list is None else coordinate_list.weight
            sharded = sharded or is_sharded(p)
            if not torch.isfinite(grad).all():
                bad.append(name)
            elif not share < 1:
                overflows.append(name)
    start = f"{who} needs finite gradients, got"
    if bad or (sharded and not overflows):
        where = ", ".join(bad) or "a frame on another rank"
        return NonFiniteError(f"{start} NaN or infinity in that of {where}; nothing was changed.")
    return NonFiniteError(
        f"{start} one so large that its norm or its mean square overflows, of {', '.join(overflows) or 'a frame'}; "
        "nothing was changed."
    )
