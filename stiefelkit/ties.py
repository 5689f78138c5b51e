"""Two modules that read one orthogonal weight."""

from torch import nn

from stiefelkit.attach import bake
from stiefelkit.errors import DtypeError, OptionError, ShapeError
from stiefelkit.host import attach_carrier, carrier_of
from stiefelkit.names import find_carrier, find_place, plain_weight
from stiefelkit.notices import retire

__all__ = ["tie"]


def tie(module: nn.Module, name: str, other: nn.Module, other_name: str) -> None:
    """Has a second module read the same orthogonal weight: one set of coordinates, whose gradients add up.

    For what one would write as `decoder.weight = encoder.weight`, as of an embedding and the layer before a softmax.
    State dicts hold the coordinates under both names, copies stay tied, and `sk.bake(model)` leaves one parameter.

    Args:
        module: the module that has the orthogonal weight.
        name: its name there; "encoder.weight" of a module inside.
        other: the module that shall read it as well.
        other_name: the name of the weight that it takes the place of, plain or orthogonal, of the same shape.

    Raises:
        UnknownNameError: the module has no orthogonal weight of this name, or the other no weight of its name.
        ShapeError, DtypeError: the two weights differ in shape, in dtype or in where they are.
        OptionError: the other weight has a parametrization of another kind.

    >>> import torch
    >>> from stiefelkit.attach import orthogonal
    >>> encoder, decoder = nn.Embedding(9, 4), nn.Linear(4, 9)
    >>> tie(orthogonal(encoder, "weight"), "weight", decoder, "weight")
    >>> torch.equal(encoder.weight, decoder.weight)
    True
    """
    first, carrier = find_carrier(module, name, "tie")
    second = find_place(other, other_name, "tie")
    if (first.host, first.name) == (second.host, second.name):
        raise OptionError(f"tie needs two weights, got {carrier.weight} twice.")
    present = carrier_of(second.host, second.name)
    if present is carrier:
        return
    old = plain_weight(second) if present is None else present.evaluate_whole().detach()
    ours = f"{carrier.weight} of shape {carrier.param.shape}"
    if old.shape != carrier.param.shape:
        raise ShapeError(f"tie needs weights of one shape, got {ours} and {other_name!r} of {tuple(old.shape)}.")
    device = next(iter(carrier.coordinates.values())).device
    if (old.dtype, old.device) != (carrier.param.dtype, device):
        raise DtypeError(
            f"tie needs weights of one dtype and device, got {ours}, {carrier.param.dtype} on {device}, and "
            f"{other_name!r}, {old.dtype} on {old.device}."
        )
    if present is not None:
        bake(second.host, second.name)
    weight, gradients = carrier.weight, carrier.gradients
    attach_carrier(second.host, second.name, carrier, "sk.tie")
    if present is not None:
        retire(present.coordinates.values(), present.weight, "sk.tie", carrier, are_coordinates=True)
    carrier.gradients = tuple(kind for kind in gradients if kind in carrier.gradients)
    carrier.weight = weight
