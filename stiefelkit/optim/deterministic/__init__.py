"""Optimizers of deterministic losses, and their table."""

from typing import Any

from stiefelkit.errors import OptionError, shown
from stiefelkit.registry import Registry

__all__ = ["minimizers"]


def _check(minimizer: Any) -> None:
    from stiefelkit.optim.deterministic.minimizer import Minimizer

    if not (isinstance(minimizer, type) and issubclass(minimizer, Minimizer)):
        known = ", ".join(minimizers.names())
        raise OptionError(
            f"A minimizer needs to be a name, of {known}, or a subclass of sk.optim.Minimizer, got {shown(minimizer)}."
        )


minimizers = Registry(
    "",
    "minimizer",
    {
        "conjugate_gradient": "stiefelkit.optim.deterministic.conjugate_gradient:ConjugateGradient",
        "lbfgs": "stiefelkit.optim.deterministic.lbfgs:LBFGS",
        "trust_region": "stiefelkit.optim.deterministic.trust_region:TrustRegion",
    },
    _check,
)
"""Name to class: built-ins and registered ones; what `minimize` takes as `method`."""
