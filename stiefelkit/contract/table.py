"""The table of parametrizations: their names, and the options that a class takes."""

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from stiefelkit.errors import OptionError, did_you_mean, needs, shown
from stiefelkit.registry import Registry

if TYPE_CHECKING:
    from stiefelkit.contract.param import OrthogonalParam, Parametrization


_INIT = 'def __init__(self, shape, *, dtype=None, device=None, precision="exact", ...)'


def _check(cls: Any) -> None:
    from stiefelkit.contract.param import OrthogonalParam

    if not (isinstance(cls, type) and issubclass(cls, OrthogonalParam)):
        raise OptionError(f"A parametrization needs to be a name or a subclass of OrthogonalParam, got {shown(cls)}.")
    if not hasattr(cls, "coordinate_names"):
        raise OptionError(f"A parametrization needs coordinate_names, got {cls.__name__} without.")
    taken = inspect.signature(cls.__init__).parameters
    missing = [] if rest_of(cls) else [name for name in ("shape", "dtype", "device", "precision") if name not in taken]
    if missing:
        raise OptionError(
            f"A parametrization needs an __init__ that takes shape, dtype, device and precision, got {cls.__name__} "
            f"without {' and '.join(missing)}; write {_INIT} and pass these on to super().__init__."
        )


registered = Registry(
    "stiefelkit.parametrizations",
    "parametrization",
    {
        "block_diagonal": "stiefelkit.parametrizations.block_diagonal:BlockDiagonal",
        "cayley": "stiefelkit.parametrizations.cayley:Cayley",
        "fourier": "stiefelkit.parametrizations.fourier:Fourier",
        "givens": "stiefelkit.parametrizations.givens:Givens",
        "hadamard": "stiefelkit.parametrizations.hadamard:Hadamard",
        "householder": "stiefelkit.parametrizations.householder:Householder",
        "margin": "stiefelkit.parametrizations.margin:Margin",
        "matrix_exp": "stiefelkit.parametrizations.matrix_exp:MatrixExp",
        "rebased": "stiefelkit.parametrizations.rebased:Rebased",
        "stiefel": "stiefelkit.parametrizations.stiefel_point:StiefelPoint",
    },
    _check,
)
"""The parametrizations, by name: built-ins, installed plugins, registered ones."""


def find_parametrization(parametrization: "Parametrization") -> "type[OrthogonalParam]":
    """Returns the class of a `parametrization`, a name or a class; raises what `Registry.find` does."""
    return registered.find(parametrization)


def option_names(cls: type) -> tuple[str, ...]:
    """Returns the names of the options of the class `cls` of a parametrization, `precision` among them."""
    return _option_names(cls)


@functools.lru_cache(256)
def _option_names(cls: type) -> tuple[str, ...]:
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [key for key, p in inspect.signature(cls.__init__).parameters.items() if p.kind not in kinds]
    return tuple(key for key in named if key not in ("self", "shape", "dtype", "device"))


def rest_of(cls: type) -> list[str]:
    """Returns what `cls` takes without naming it, "*args" and "**kwargs"."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [f"{stars[p.kind]}{p.name}" for p in parameters if p.kind in stars]


def check_options(cls: type, options: Any, near: Iterable[str] = ()) -> None:
    """Raises OptionError unless options are a mapping whose keys `cls` takes; names in `near` may be meant too."""
    if not isinstance(options, Mapping):
        raise OptionError(f"{cls.__name__} needs options as a mapping, got {shown(options)}.")
    names = _option_names(cls)
    for key in options:
        if key not in names:
            rest = ", ".join(rest_of(cls))
            needs(not rest, OptionError, cls.__name__, f"an __init__ that names its options, as {_INIT}", rest)
            raise no_option(cls.__name__, key, names, near)


def no_option(who: str, key: str, names: Iterable[str], near: Iterable[str] = ()) -> OptionError:
    """Returns the error for an option of a map or layer that is not among the known ones; `near` may be meant too."""
    if key in ("dtype", "field"):
        return OptionError(f"{who} has no option {key!r}; make a layer of dtype=torch.complex64 for unitary weights.")
    return OptionError(f"{who} has no option {key!r}{did_you_mean(key, names, near)}")
