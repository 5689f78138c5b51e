"""Optimizers of deterministic losses, and their table."""

from stiefelkit.errors import OptionError, needs
from stiefelkit.registry import Registry

__all__ = ["minimizers"]


def _check(minimizer: object) -> None:
    from stiefelkit.optim.deterministic.minimizer import Minimizer

    is_one = isinstance(minimizer, type) and issubclass(minimizer, Minimizer)
    needs(is_one, OptionError, "A minimizer", "a name or a subclass of sk.optim.Minimizer", minimizer)


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
