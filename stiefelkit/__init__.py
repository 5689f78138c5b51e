"""Orthogonal and unitary weights for PyTorch: interchangeable parametrizations behind one interface.

Names are imported when they are first asked for, and torch with them: the command line shows its help without.
"""

from stiefelkit._version import __version__

TYPE_CHECKING = False  # as in typing, whose import takes longer than all of this file

if TYPE_CHECKING:
    from stiefelkit import (
        errors,
        functional,
        init,
        manifolds,
        metrics,
        models,
        nn,
        optim,
        parametrizations,
        scan,
        testing,
    )
    from stiefelkit.contract.param import OrthogonalParam, Traits
    from stiefelkit.errors import StiefelkitError
    from stiefelkit.weights.attach import available, orthogonal, register
    from stiefelkit.weights.change import (
        Drift,
        assign_,
        bake,
        coordinates,
        drift,
        fully_shard_coordinates,
        rebase_,
        reset_,
        tie,
    )
    from stiefelkit.weights.coordinate_list import CoordinateList
    from stiefelkit.weights.grouped import group_, grouped, ungroup_
    from stiefelkit.weights.modules import check_state_dict

__all__ = [
    "CoordinateList", "Drift", "OrthogonalParam", "StiefelkitError", "Traits", "__version__", "assign_", "available",
    "bake", "check_state_dict", "coordinates", "drift", "errors", "fully_shard_coordinates", "functional", "group_",
    "grouped", "init", "manifolds", "metrics", "models", "nn", "optim", "orthogonal", "parametrizations", "rebase_",
    "register", "reset_", "scan", "testing", "tie", "ungroup_",
]  # fmt: skip


_HOMES = ("errors", "weights.attach", "weights.change", "weights.coordinate_list", "weights.grouped", "weights.modules")
_HOMES += ("param",)
"""Modules whose names of `__all__` stand here; `errors` first, which needs no torch."""

if not TYPE_CHECKING:  # else a checker would believe that every name is here

    def __getattr__(name):
        import importlib

        if name in __all__:
            try:
                return importlib.import_module(f"stiefelkit.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"stiefelkit.{name}":
                    raise
        for home in _HOMES if name in __all__ else ():
            module = importlib.import_module(f"stiefelkit.{home}")
            if name in module.__all__:
                globals()[name] = value = getattr(module, name)
                return value
        from stiefelkit.errors import no_attribute

        raise no_attribute(__name__, name)

    def __dir__():
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
