"""The laws that every parametrization keeps, and those of optimizers that move frames, for scripts and for pytest.

A third party tests a new parametrization in two lines:

    @parametrize_with_checks([MyMap])
    def test_laws(check):
        check()

or `check_parametrization(MyMap)` in a script; `parametrize_optimizers_with_checks` and `check_optimizer` do the same
for an optimizer. Laws run on the class's examples, in the dtypes that they are about, and broken ones raise one
`LawBroken`, which lists each: law, case, figure and bound, seed, and one line that repeats it.
"""

from collections.abc import Callable, Iterable

import torch

from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.errors import suggest_names
from stiefelkit.testing import numerical, portable
from stiefelkit.testing.cases import Case, cases, random_coordinates, spread
from stiefelkit.testing.lowered import lowered_products
from stiefelkit.testing.optimizer import OPTIMIZERS
from stiefelkit.testing.optimizer_cases import OptimizerCase, optimizer_cases
from stiefelkit.testing.portable import refusing_reads
from stiefelkit.testing.suite import F, Failure, LawBroken, Suite, laws_of

__all__ = [
    "LAWS", "OPTIMIZER_LAWS", "Case", "Failure", "LawBroken", "OptimizerCase", "cases", "check_optimizer",
    "check_parametrization", "lowered_products", "optimizer_cases", "parametrize_optimizers_with_checks",
    "parametrize_with_checks", "random_coordinates", "refusing_reads",
]  # fmt: skip
suggest_names(__name__)

LAWS: dict[str, Callable[[Case], None]] = laws_of(numerical.__name__, portable.__name__)
"""The laws of parametrizations by name. Each takes a case and raises `LawBroken`."""
OPTIMIZER_LAWS: dict[str, Callable[[OptimizerCase], None]] = dict(OPTIMIZERS.laws)
"""The laws of optimizers by name. Each takes a case and raises `LawBroken`."""
PARAMETRIZATIONS = Suite("check_parametrization", LAWS, cases, spread)


def check_parametrization(
    cls: type[OrthogonalParam],
    laws: Iterable[str] = tuple(LAWS),
    only: str | None = None,
    offset: int | None = None,
    device: str = "cpu",
) -> None:
    """Checks a parametrization against the laws, and returns if it keeps them all.

    Args:
        cls: the parametrization.
        laws: names in `LAWS`, all by default.
        only: the name of a case as failures print it, such as "Cayley-6x6-float32"; every case by default.
        offset: shifts every seed; `STIEFELKIT_SEED_OFFSET` by default.
        device: where all lives; draws are the same everywhere. The laws "threads", "compile", "reads" and "meta" are
            about other things, and are for the CPU.

    Raises:
        LawBroken: lists every failure.
        UnknownNameError: no law or case has such a name.
    """
    PARAMETRIZATIONS.settle(cls, laws, only, offset, device)


def parametrize_with_checks(classes: Iterable[type[OrthogonalParam]]) -> Callable[[F], F]:
    """Decorates a pytest function `test(check)` so that it runs every law on the cases of some classes of maps."""
    return PARAMETRIZATIONS.parametrize(classes)


def check_optimizer(
    cls: type[torch.optim.Optimizer],
    laws: Iterable[str] = tuple(OPTIMIZER_LAWS),
    only: str | None = None,
    offset: int | None = None,
    device: str = "cpu",
) -> None:
    """Checks an optimizer of frames, `cls`, with the settings in its `examples`; raises LawBroken with every failure.

    As `check_parametrization` it takes `laws`, the case `only`, the `offset` of seeds and the `device`.
    """
    OPTIMIZERS.settle(cls, laws, only, offset, device)


def parametrize_optimizers_with_checks(classes: Iterable[type[torch.optim.Optimizer]]) -> Callable[[F], F]:
    """Decorates a pytest function `test(check)` so that it runs all laws on all cases of some classes of optimizers."""
    return OPTIMIZERS.parametrize(classes)
