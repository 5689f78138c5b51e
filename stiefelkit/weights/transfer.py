"""A weight on its way to another module, by torch's `transfer_parametrizations_and_params`."""

from typing import Any

from torch import Tensor, nn

from stiefelkit.errors import OptionError, ShapeError

_TRANSFER = "transfer_parametrizations_and_params"


class Handed(nn.Module):
    """Stands for a coordinate list that torch's transfer of parametrizations has another module share.

    `replaced` is the plain parameter whose place the list takes, None before.
    """

    coordinate_list: Any
    replaced: Tensor | None

    def __init__(self, coordinate_list: Any):
        super().__init__()
        self.__dict__.update(coordinate_list=coordinate_list, replaced=None)  # neither is to be registered

    def right_inverse(self, present: Tensor) -> tuple[Tensor, ...]:
        """Returns the coordinates as they are; raises ShapeError unless the parameter has the weight's shape."""
        shape, weight = tuple(self.coordinate_list().shape), self.coordinate_list.weight
        if tuple(present.shape) != shape:
            raise ShapeError(
                f"{_TRANSFER} needs a weight of shape {shape} to be replaced by {weight}, got {tuple(present.shape)}."
            )
        self.__dict__["replaced"] = present
        return tuple(c.detach() for c in self.coordinate_list.coordinates.values())

    def forward(self, *coordinates: Tensor) -> Tensor:
        """Returns the weight; raises OptionError where torch would put it on top of another parametrization."""
        if self.replaced is None:
            raise OptionError(
                f"{_TRANSFER} needs a plain weight to be replaced by {self.coordinate_list.weight}, got one that is "
                "parametrized already; parametrize.remove_parametrizations first."
            )
        return self.coordinate_list()
