"""The laws that every parametrization keeps, as checks for a script and for pytest.

A third party tests a new parametrization in two lines:

    @parametrize_with_checks([MyMap])
    def test_laws(check):
        check()

or `check_parametrization(MyMap)` in a script. Each law runs on its `examples()`, in the dtypes that it is
about, and one that breaks some raises `LawBroken`, which lists all of them: law, case, figure and bound, seed,
coordinates, and one line that repeats it. The laws that take most of the time run on few of the cases, so that a map
takes seconds; before a release, `full=True` or STIEFELKIT_LAWS=full in the environment runs them on more.

`check_activation` does the same for an activation of recurrences, by its name; `check_optimizer` and
`parametrize_optimizers_with_checks` for an optimizer that moves frames; `check_minimizer` and
`parametrize_minimizers_with_checks` for one of deterministic losses; and `check_manifold` for a Stiefel manifold in
geoopt's interface. `retraction_order` measures how closely a retraction follows the geodesic.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from stiefelkit.contract.param import OrthogonalParam
from stiefelkit.contract.table import registered
from stiefelkit.errors import OptionError, suggest_names
from stiefelkit.optim.deterministic.minimizer import Minimizer
from stiefelkit.testing import derivatives, numerical, portable
from stiefelkit.testing.activation import ACTIVATION_LAWS, check_activation
from stiefelkit.testing.cases import Case, cases, random_coordinates
from stiefelkit.testing.decoder import DECODER_LAWS, check_decoder
from stiefelkit.testing.failure import Failure, LawBroken, again, check_laws, laws_of, named, only_case, run, settle
from stiefelkit.testing.lowered import lowered_products
from stiefelkit.testing.manifold import MANIFOLD_LAWS, check_manifold, retraction_order
from stiefelkit.testing.minimizer import (
    MINIMIZER_LAWS,
    MinimizerCase,
    check_minimizer,
    minimizer_cases,
    minimizer_checks,
)
from stiefelkit.testing.model import MODEL_LAWS, check_model
from stiefelkit.testing.numerical import require_purity
from stiefelkit.testing.optimizer import OPTIMIZER_LAWS, check_optimizer, optimizer_checks
from stiefelkit.testing.optimizer_cases import OptimizerCase, optimizer_cases
from stiefelkit.testing.portable import refusing_reads, require_declared
from stiefelkit.testing.task import TASK_LAWS, check_task

__all__ = [
    "ACTIVATION_LAWS",
    "DECODER_LAWS",
    "LAWS",
    "MANIFOLD_LAWS",
    "MINIMIZER_LAWS",
    "MODEL_LAWS",
    "OPTIMIZER_LAWS",
    "TASK_LAWS",
    "Case",
    "Failure",
    "LawBroken",
    "MinimizerCase",
    "OptimizerCase",
    "cases",
    "check_activation",
    "check_decoder",
    "check_manifold",
    "check_minimizer",
    "check_model",
    "check_optimizer",
    "check_parametrization",
    "check_task",
    "lowered_products",
    "minimizer_cases",
    "optimizer_cases",
    "parametrize_minimizers_with_checks",
    "parametrize_optimizers_with_checks",
    "parametrize_with_checks",
    "random_coordinates",
    "refusing_reads",
    "retraction_order",
]
suggest_names(__name__)

LAWS: dict[str, Callable[[Case], None]] = named(
    {
        "contract": portable.law_contract,
        **laws_of(numerical.__name__, derivatives.__name__, portable.__name__),
    }
)
"""Name to law. Each takes a case and raises `LawBroken`."""
CAUSES: dict[str, Callable[[Case], object]] = {"contract": require_declared, "pure": require_purity}
"""The laws that name a cause: where another law fails, these run first, and if one of them fails, it is reported."""
FORM = "STIEFELKIT_LAWS"
"""The environment variable that says "full" where the slow laws of parametrizations run on frames of every kind."""


def check_parametrization(
    cls: type[OrthogonalParam],
    laws: Iterable[str] = tuple(LAWS),
    only: str | None = None,
    offset: int | None = None,
    device: str = "cpu",
    full: bool | None = None,
) -> None:
    """Checks a parametrization against the laws, and returns if it keeps them all.

    Args:
        cls: the parametrization.
        laws: names in `LAWS`, all by default.
        only: the name of a case as failures print it, such as "Cayley-6x6-float32"; every case by default.
        offset: shifts every seed; what `STIEFELKIT_SEED_OFFSET` says by default.
        device: where all lives; draws are the same everywhere. The laws "threads", "compile", "reads" and "meta" are
            about other things, and are for the CPU.
        full: run the slow laws on frames of every kind; as STIEFELKIT_LAWS=full does by default.

    Raises:
        LawBroken: lists every failure: the law, the case, figure and bound, seed, coordinates, and a line that
            repeats it.
    """
    settle((check for _, check in _checks([cls], laws, only, device, full)), offset)


def parametrize_with_checks(classes: Iterable[type[OrthogonalParam]], full: bool | None = None) -> Any:
    """Decorates a pytest function `test(check)` so that it runs every law on the cases of the classes.

    Args:
        classes: the parametrizations.
        full: run the slow laws on frames of every kind; as STIEFELKIT_LAWS=full does by default.
    """
    return _parametrized(_checks(classes, LAWS, full=full))


def parametrize_optimizers_with_checks(classes: Iterable[type[torch.optim.Optimizer]]) -> Any:
    """Decorates a pytest function `test(check)` so that it runs every law on every case of some optimizers.

    Args:
        classes: the optimizers.
    """
    return _parametrized(optimizer_checks(classes))


def parametrize_minimizers_with_checks(classes: Iterable[type[Minimizer]]) -> Any:
    """Decorates a pytest function `test(check)` so that it runs every law on every case of some minimizers.

    Args:
        classes: the minimizers.
    """
    return _parametrized(minimizer_checks(classes))


def _parametrized(checks: Iterable[tuple[str, Callable[[], None]]]) -> Any:
    import pytest

    named = list(checks)
    return pytest.mark.parametrize("check", [check for _, check in named], ids=[name for name, _ in named])


def _checks(
    classes: Iterable[type[OrthogonalParam]],
    laws: Iterable[str],
    only: str | None = None,
    device: str = "cpu",
    full: bool | None = None,
) -> Iterator[tuple[str, Callable[[], None]]]:
    laws, full = check_laws(laws, LAWS), os.environ.get(FORM) == "full" if full is None else full
    for cls in classes:
        registered.check(cls)
        seen: set[tuple[Any, ...]] = set()
        examples = cases(cls, device)
        if not examples:
            raise OptionError(f"The laws need examples() to give a shape and a dtype, got none from {cls.__name__}.")
        for law in laws:
            for case in only_case(cls, examples, only):
                # Slow: one square, one tall and one batched frame of each field (of each dtype and option) tell.
                kind: tuple[Any, ...] = (law, case.dtype.is_complex, len(case.shape), case.shape[-1] == case.shape[-2])
                if law == "compile" and not full:
                    kind = kind[:2]
                if law == "threads" and full:
                    kind = (*kind, case.dtype)
                if law in ("threads", "reads", "meta") and full:
                    kind = (*kind, str(case.options))
                if law in ("compile", "threads", "reads", "meta") and (kind in seen or case.shape[-1] < 2):
                    continue
                seen.add(kind)
                yield f"{law}-{case}", lambda law=law, case=case: _run(law, case)


def _run(law: str, case: Case) -> None:
    try:
        return run(LAWS[law], [case], case.details, partial(again, "check_parametrization", case.cls, law, case))
    except LawBroken as broken:
        failures = broken.failures
    for cause in itertools.takewhile(lambda cause: cause != law, CAUSES):
        if _breaks(CAUSES[cause], case):
            return _run(cause, case)
    raise LawBroken(*failures)


def _breaks(check: Callable[[Case], object], case: Case) -> bool:
    try:
        with torch.random.fork_rng(devices=[]):
            check(case)
    except Exception as error:
        return isinstance(error, LawBroken)
    return False
