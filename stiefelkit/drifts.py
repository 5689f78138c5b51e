"""How far the weights of a model are from being frames."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stiefelkit.errors import NonFiniteError
from stiefelkit.host import check_module, orthogonal_weights
from stiefelkit.metrics import bits_lost, orthogonality_error, rounding_limit
from stiefelkit.param import each_frame

__all__ = ["Drift", "drift"]


@dataclass(frozen=True)
class Drift:
    """How far a weight is from being a frame.

    Attributes:
        error: ||W^H W - I||_F in float64, the worst of a batch, or of blocks.
        limit: what rounding an exact frame to the weight's dtype costs, `stiefelkit.metrics.rounding_limit`.
        bits_lost: binary digits lost beyond that, log2(max(error / limit, 1)).
    """

    error: float
    limit: float
    bits_lost: float


@torch.no_grad()
def drift(model: nn.Module) -> dict[str, Drift]:
    """Returns qualified name, "rnn.weight_hh_l0", to `Drift` of every orthogonal weight, under FSDP2 on every rank.

    What is measured is the map's own frame, without its gain and without parametrizations that were put on top of it.

    Raises:
        DtypeError: the model is no module.
        NonFiniteError: a weight holds NaN or infinity.
    """
    check_module(model, "drift", "; sk.metrics.orthogonality_error measures a tensor")
    drifts = {}
    for weight in orthogonal_weights(model):
        coordinate_list = weight.coordinate_list
        frames = each_frame(coordinate_list.param.bare(*coordinate_list.gathered()))
        drifts[weight.qualified] = max((_drift(q, weight.qualified) for q in frames), key=lambda d: d.error / d.limit)
    return drifts


def _drift(frames: Tensor, qualified: str) -> Drift:
    error = orthogonality_error(frames).max().item()
    if not math.isfinite(error):
        raise NonFiniteError(f"{qualified} needs finite entries, got NaN or infinity; restore it from a checkpoint.")
    limit = rounding_limit(frames.shape[-1], frames.dtype)
    return Drift(error, limit, bits_lost(error, limit))
