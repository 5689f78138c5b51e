"""The laws that every parametrization keeps, as checks for a script and for pytest.

A third party tests a new member in two lines:

    @parametrize_with_checks([MyMap])
    def test_laws(check):
        check()

or `check_parametrization(MyMap)` in a script. Each law runs on the member's `examples()`, in the dtypes that it is
about, and a member that breaks one raises `LawBroken` with the law's name, the case and the figures.

`check_manifold` does the same for a Stiefel manifold in geoopt's interface, and `retraction_order` measures how closely
a retraction follows the geodesic.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from stiefelkit.errors import OptionError, UnknownNameError, did_you_mean
from stiefelkit.param import OrthogonalParam
from stiefelkit.testing.cases import Case, LawBroken, cases, random_coordinates
from stiefelkit.testing.laws import LAWS
from stiefelkit.testing.lowered import lowered_products
from stiefelkit.testing.manifold import MANIFOLD_LAWS, check_manifold, retraction_order

__all__ = [
    "LAWS",
    "MANIFOLD_LAWS",
    "Case",
    "LawBroken",
    "cases",
    "check_manifold",
    "check_parametrization",
    "lowered_products",
    "parametrize_with_checks",
    "random_coordinates",
    "retraction_order",
]


def check_parametrization(cls: type[OrthogonalParam], laws: Iterable[str] = tuple(LAWS)) -> None:
    """Checks a parametrization against the laws, and returns if it keeps them all.

    Args:
        cls: the parametrization.
        laws: names in `LAWS`, all by default.

    Raises:
        LawBroken: names the law, the case and the figures.
    """
    for _, check in _checks([cls], laws):
        check()


def parametrize_with_checks(classes: Iterable[type[OrthogonalParam]]) -> Any:
    """Decorates a pytest function `test(check)` so that it runs every law on every case of the classes."""
    import pytest

    named = list(_checks(classes, LAWS))
    return pytest.mark.parametrize("check", [check for _, check in named], ids=[name for name, _ in named])


def _checks(classes: Iterable[type[OrthogonalParam]], laws: Iterable[str]) -> Iterator[tuple[str, Callable[[], None]]]:
    laws = list(laws)
    for law in laws:
        if law not in LAWS:
            raise UnknownNameError(f"No law is named {law!r}{did_you_mean(law, LAWS)}")
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, OrthogonalParam)):
            raise OptionError(f"The laws need a subclass of OrthogonalParam, got {cls!r}.")
        seen: set[tuple[str, bool, int, bool]] = set()
        found = cases(cls)
        if not found:
            raise OptionError(f"The laws need examples() to give a shape and a dtype, got none from {cls.__name__}.")
        for case in found:
            for law in laws:
                # Tracing takes seconds: one square, one tall and one batched frame of each field tell.
                kind = (law, case.dtype.is_complex, len(case.shape), case.shape[-1] == case.shape[-2])
                if law == "compile" and (kind in seen or case.shape[-1] < 2):
                    continue
                seen.add(kind)
                yield f"{law}-{case}", lambda law=law, case=case: _run(law, case)


def _run(law: str, case: Case) -> None:
    try:
        LAWS[law](case)
    except LawBroken:
        raise
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise LawBroken(f"{law}: {case}: {type(error).__name__}: {first_line}") from error
