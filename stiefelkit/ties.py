"""Two modules that read one orthogonal weight."""

from torch import nn

from stiefelkit.errors import DtypeError, OptionError, ShapeError
from stiefelkit.host import adopt_coordinate_list, attach_coordinate_list, check_loading_of, coordinate_list_of
from stiefelkit.names import find_place, find_weight, plain_weight
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
    first = find_weight(module, name, "tie")
    coordinate_list = first.coordinate_list
    second = find_place(other, other_name, "tie")
    if (first.host, first.name) == (second.host, second.name):
        raise OptionError(f"tie needs two weights, got {coordinate_list.weight} twice.")
    present = coordinate_list_of(second.host, second.name)
    if present is coordinate_list:
        return
    old, at = (plain_weight(second),) * 2 if present is None else (present.param, present.original0)
    device, there = coordinate_list.original0.device, at.device
    ours = f"{coordinate_list.weight} of shape {coordinate_list.param.shape}"
    if tuple(old.shape) != coordinate_list.param.shape:
        raise ShapeError(f"tie needs weights of one shape, got {ours} and {other_name!r} of {tuple(old.shape)}.")
    if (old.dtype, there) != (coordinate_list.param.dtype, device):
        raise DtypeError(
            f"tie needs weights of one dtype and device, got {ours}, {coordinate_list.param.dtype} on {device}, and "
            f"{other_name!r}, {old.dtype} on {there}."
        )
    weight, gradients = coordinate_list.weight, coordinate_list.gradients
    if present is None:
        attach_coordinate_list(second.host, second.name, coordinate_list, "sk.tie")
    else:
        second.host.parametrizations[second.name] = coordinate_list.train(second.host.training)  # type: ignore[index]
        adopt_coordinate_list(second.host, second.name, coordinate_list)
        retire(present.coordinates.values(), present.weight, "sk.tie", coordinate_list, are_coordinates=True)
    coordinate_list.gradients = tuple(kind for kind in gradients if kind in coordinate_list.gradients)
    coordinate_list.weight = weight
    check_loading_of(other, other_name)
