"""Parameters of layers that are coordinates, as the angles and rates of linear recurrences are."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from stiefelkit._torch import class_name
from stiefelkit.tensors import coordinate_dtype
from stiefelkit.weights.checkpoint import entry_of
from stiefelkit.weights.optimizer_hooks import watch_layer


class CoordinateParameters(nn.Module):
    """A layer with parameters of its own that are coordinates: float32 or better under every cast and load.

    `stiefelkit.optim.parameter_groups` gives them groups of their own, without weight decay.
    """

    coordinate_parameters: ClassVar[tuple[str, ...]] = ()
    """Names of the coordinates, without the suffixes of layers and directions ("_l0_reverse")."""

    def __init__(self) -> None:
        super().__init__()
        self._announce()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._announce()

    def _announce(self) -> None:
        """Has optimizers warned that would shrink the coordinates."""
        if self.coordinate_parameters:
            watch_layer(self, class_name(self))

    def coordinate_keys(self) -> dict[str, str]:
        """Returns name of parameter, "angle_l0", to that of its coordinate, "angle".

        Of a coordinate that torch's `register_parametrization` was given, these are the parameters behind it.
        """
        held = {key: key for key, p in self._parameters.items() if p is not None}
        for key, behind in cast(nn.ModuleDict, self.parametrizations).items() if is_parametrized(self) else ():
            if type(behind) is ParametrizationList:
                held |= {f"parametrizations.{key}.{own}": key for own, _ in behind.named_parameters()}
        names = self.coordinate_parameters
        return {own: name for own, key in held.items() for name in names if f"{key}_l".startswith(f"{name}_l")}

    def check_coordinates(self, state_dict: Mapping[str, Any], prefix: str) -> None:
        """Raises CheckpointError or NonFiniteError if a coordinate would be loaded from what it cannot hold."""
        for key in self.coordinate_keys():
            if (name := f"{prefix}{key}") in state_dict:
                ours = self.get_parameter(key)
                entry_of(state_dict[name], name, name, ours, tuple(ours.shape), True)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.check_coordinates(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "CoordinateParameters":
        held = [self.get_parameter(key) for key in self.coordinate_keys()]
        own = {id(t) for p in held for t in (p, p.grad) if t is not None and not t.is_complex()}

        def apply(t: Tensor) -> Tensor:
            moved = fn(t)
            wanted = coordinate_dtype(moved.dtype)
            if id(t) not in own or moved.dtype == wanted:
                return moved
            # From what it was: no digit goes through the coarser dtype.
            return (moved if t.is_meta or moved.is_meta else t).to(device=moved.device, dtype=wanted)

        super()._apply(apply, recurse)
        return self
