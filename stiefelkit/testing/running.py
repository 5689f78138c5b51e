"""How laws are required, run and repeated: the same for maps, optimizers, manifolds and activations."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from stiefelkit.errors import UnknownNameError, did_you_mean
from stiefelkit.testing import seeds
from stiefelkit.testing.failure import Failure, LawBroken

__all__ = ["again", "check_laws", "failures_of", "named", "only_case", "require", "require_refused", "require_within"]

C = TypeVar("C")


def require(holds: bool, words: str, figure: float | None = None, bound: float | None = None) -> None:
    """Raises LawBroken with what was found unless the law holds; `named` adds which law, and in which case."""
    if not holds:
        raise LawBroken(Failure("", "", words, figure, bound))


def require_within(figure: float, bound: float, what: str) -> None:
    """Raises LawBroken unless what is measured stays within what is permitted."""
    require(figure <= bound, f"{what} {figure:.3g}, permitted {bound:.3g}", figure, bound)


def require_refused(error: type[Exception], act: Callable[[], Any], what: str) -> None:
    """Raises LawBroken unless an act raises an error of some type, in one sentence."""
    try:
        act()
    except error as caught:
        require("\n" not in str(caught), f"{what} is refused in more than a sentence: {caught}")
    except Exception as caught:
        require(False, f"{what} is {type(caught).__name__}, and not {error.__name__}: {caught}")
    else:
        require(False, f"{what} is not refused")


def named(laws: Mapping[str, Callable[..., None]], title: Callable[..., str] = str) -> dict[str, Callable[..., None]]:
    """The same laws, whose every error is a `LawBroken` that names the law and the title of its arguments."""

    def naming(law: str, check: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(check)
        def run(*case: Any) -> None:
            try:
                return check(*case)
            except LawBroken as broken:
                failure = broken.failures[0]
            except Exception as error:
                failure = Failure("", "", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
            raise LawBroken(replace(failure, law=law, where=title(*case)))

        return run

    return {law: naming(law, check) for law, check in laws.items()}


def check_laws(laws: Iterable[str], table: Mapping[str, Any], of: str = "") -> list[str]:
    """Returns the names of laws; raises UnknownNameError for one that is not in the table."""
    laws = list(laws)
    for law in laws:
        if law not in table:
            raise UnknownNameError(f"No law{of} is named {law!r}{did_you_mean(law, table)}")
    return laws


def only_case(cls: type, cases: Sequence[C], only: str | None) -> Sequence[C]:
    """The cases of a class that have a name, all if that is None; raises UnknownNameError if none has it."""
    names = [str(case) for case in cases]
    if only is not None and only not in names:
        raise UnknownNameError(f"No case of {cls.__name__} is named {only!r}{did_you_mean(only, names)}")
    return [case for case, name in zip(cases, names, strict=True) if only in (None, name)]


def failures_of(checks: Iterable[Callable[[], None]]) -> list[Failure]:
    """Runs all checks, and returns what they found."""
    failures = []
    for check in checks:
        try:
            check()
        except LawBroken as broken:
            failures += broken.failures
    return failures


def again(check: str, cls: type, law: str, case: object) -> str:
    """Python that runs one law on one case of a class again."""
    # A class of a script or inside a function has to be in scope already.
    is_importable = cls.__module__ != "__main__" and "." not in cls.__qualname__
    imports = f"from {cls.__module__} import {cls.__name__}; " if is_importable else ""
    arguments = f"{cls.__name__}, [{law!r}], only={str(case)!r}, offset={seeds.seed()}"
    return f"{imports}from stiefelkit.testing import {check}; {check}({arguments})"
