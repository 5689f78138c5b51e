"""What reads frames, and which gradient it gives."""

from typing import Any

from stiefelkit.errors import OptimizerError
from stiefelkit.guard import frames, watch_frame

__all__ = ["ask_readers", "check_readers"]


def check_readers(who: str, group: dict[str, Any], params: list[Any]) -> None:
    """Raises OptimizerError unless what reads the frames of a group can give the gradient that it asks for."""
    if group["manifold"] is None or group.get("gradient", "exact") == "exact":
        return
    watched = frames()
    for p in params:
        coordinate_list = watched[id(p)].coordinate_list if id(p) in watched else None
        can = (
            coordinate_list is not None
            and group["gradient"] in coordinate_list.gradients
            and len(coordinate_list.coordinates) == 1
        )
        if not (can and p.is_complex()):
            got = (
                "one that no module holds"
                if coordinate_list is None
                else f"that of {coordinate_list.weight} ({p.dtype})"
            )
            raise OptimizerError(
                f'{who} with gradient="{group["gradient"]}" needs complex frames that are the '
                f'recurrent weight of an sk.nn.OrthogonalRNN or OrthogonalRNNCell, got {got}; use gradient="exact".'
            )


def ask_readers(group: dict[str, Any]) -> None:
    """Tells what reads the frames which gradient to give; those that nobody reads are watched from now on."""
    if group["manifold"] is None:
        return
    watched = frames()
    for p in group["params"]:
        if id(p) not in watched:
            watch_frame(p, group["manifold"])
        elif watched[id(p)].coordinate_list is not None:
            watched[id(p)].coordinate_list.gradient = group.get("gradient", "exact")
