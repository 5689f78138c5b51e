"""Suites of laws that run on cases, and the report of a broken one, with a line that repeats it."""

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, Protocol, TypeVar
from unittest.mock import patch

import torch

from stiefelkit.errors import StiefelkitError, UnknownNameError, did_you_mean
from stiefelkit.testing import seeds
from stiefelkit.testing.lowered import flags_of


@dataclass(frozen=True)
class Failure:
    """One law that does not hold in one case.

    Attributes:
        law: its name.
        where: the case, as tests are named.
        found: the finding, in words and figures.
        figure: the measured number, if there is one.
        bound: what the law permits it to be.
        details: what figures depend on beside the law: seed, threads, kernels and precision of products.
        line: Python that raises the same again.
    """

    law: str
    where: str
    found: str
    figure: float | None = None
    bound: float | None = None
    details: str = ""
    line: str = ""

    def __str__(self) -> str:
        found = f"{self.law}: {self.where}: {self.found.rstrip('.')}."
        figures = "" if self.figure is None else f"figure {self.figure!r}, bound {self.bound!r}"
        return "\n    ".join(filter(None, [found, figures, self.details, self.line and f"again: {self.line}"]))


class LawBroken(AssertionError):
    """One of the laws does not hold, or several: `failures` has all that were found, one for each law and case."""

    def __init__(self, *failures: Failure):
        super().__init__("\n".join(map(str, failures)))
        self.failures = failures


def require(holds: bool, words: str, figure: float | None = None, bound: float | None = None) -> None:
    """Raises LawBroken with what was found unless the law holds; the suite adds which law, and in which case."""
    if not holds:
        raise LawBroken(Failure("", "", words, figure, bound))


def require_within(figure: float, bound: float, what: str) -> None:
    """Raises LawBroken unless what is measured stays within what is permitted."""
    require(figure <= bound, f"{what} {figure:.3g}, permitted {bound:.3g}", figure, bound)


def require_refused(error: type[Exception], act: Callable[[], object], what: str) -> None:
    """Raises LawBroken unless an act raises an error of some type, one of ours in one sentence."""
    try:
        act()
    except error as caught:
        is_sentence = "\n" not in str(caught) or not isinstance(caught, StiefelkitError)
        require(is_sentence, f"{what} is refused in more than a sentence: {caught}")
    except Exception as caught:
        require(False, f"{what} is {type(caught).__name__}, and not {error.__name__}: {caught}")
    else:
        require(False, f"{what} is not refused")


class _CheckedCase(Protocol):
    """Attributes of a case that a suite uses; its `str` is its name."""

    @property
    def cls(self) -> type: ...
    @property
    def device(self) -> str: ...


C = TypeVar("C", bound=_CheckedCase)
F = TypeVar("F", bound=Callable[..., object])


def laws_of(*modules: str) -> dict[str, Callable[..., None]]:
    """Returns the functions law_* of modules by name, each of whose errors is a LawBroken with the law and the case."""
    laws = {
        name.removeprefix("law_"): value
        for module in modules
        for name, value in vars(sys.modules[module]).items()
        if name.startswith("law_")
    }
    return {name: _named(name, law) for name, law in laws.items()}


def _named(name: str, law: Callable[[C], None]) -> Callable[[C], None]:
    @functools.wraps(law)
    def named(case: C) -> None:
        try:
            return law(case)
        except LawBroken as broken:
            failure = broken.failures[0]
        except Exception as error:
            failure = Failure("", "", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")
        raise LawBroken(replace(failure, law=name, where=str(case)))

    return named


@dataclass(frozen=True)
class Suite(Generic[C]):
    """The laws of a kind of class, and the cases that they are run on; `check` is the public function that runs it."""

    check: str
    laws: Mapping[str, Callable[[C], None]]
    cases: Callable[[type, str], Sequence[C]]
    spread: Callable[[str, Sequence[C]], Sequence[C]] = lambda law, cases: cases

    def checks(
        self, classes: Iterable[type], laws: Iterable[str] | None = None, only: str | None = None, device: str = "cpu"
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """Yields each law on each of its cases of some classes, with a name; refuses unknown laws and cases."""
        chosen = list(self.laws) if laws is None else list(laws)
        for law in chosen:
            if law not in self.laws:
                raise UnknownNameError(f"No law is named {law!r}{did_you_mean(law, self.laws)}")
        for cls in classes:
            every = self.cases(cls, device)
            names = [str(case) for case in every]
            if only is not None and only not in names:
                raise UnknownNameError(f"No case of {cls.__name__} is named {only!r}{did_you_mean(only, names)}")
            among = every if only is None else [every[names.index(only)]]
            for law in chosen:
                for case in self.spread(law, among):
                    yield f"{law}-{case}", partial(self._run, law, case)

    def settle(self, cls: type, laws: Iterable[str], only: str | None, offset: int | None, device: str = "cpu") -> None:
        """Runs all checks of a class with shifted seeds; raises LawBroken with every law and case that is broken."""
        failures: dict[tuple[str, str], Failure] = {}
        shifted = {} if offset is None else {seeds.OFFSET: str(offset)}
        with patch.dict(os.environ, shifted), torch.random.fork_rng(devices=[]):
            for _, check in self.checks([cls], laws, only, device):
                try:
                    check()
                except LawBroken as broken:
                    failures |= {(failure.law, failure.where): failure for failure in broken.failures}
        if failures:
            raise LawBroken(*failures.values())

    def parametrize(self, classes: Iterable[type]) -> Callable[[F], F]:
        """Returns the decorator of a pytest function `test(check)` that runs every law on its cases of some classes."""
        import pytest

        return pytest.mark.parametrize("check", [pytest.param(check, id=name) for name, check in self.checks(classes)])

    def _run(self, law: str, case: C) -> None:
        with torch.random.fork_rng(devices=[]):
            seeds.reseed()
            try:
                return self.laws[law](case)
            except LawBroken as broken:
                failure = broken.failures[0]
        raise LawBroken(replace(failure, details=_machine(), line=self._line(law, case)))

    def _line(self, law: str, case: C) -> str:
        """Returns Python that runs one law on one case again."""
        cls = case.cls
        # A class of a script or inside a function has to be in scope already.
        is_importable = cls.__module__ != "__main__" and "." not in cls.__qualname__
        imports = f"from {cls.__module__} import {cls.__name__}; " if is_importable else ""
        place = "" if case.device == "cpu" else f", device={case.device!r}"
        arguments = f"{cls.__name__}, [{law!r}], only={str(case)!r}, offset={seeds.seed()}{place}"
        return f"{imports}from stiefelkit.testing import {self.check}; {self.check}({arguments})"


def _machine() -> str:
    return (
        f"seed: {seeds.OFFSET}={seeds.seed()}; {torch.get_num_threads()} threads,"
        f" {torch.backends.cpu.get_cpu_capability()}, float32 products {flags_of('cpu').fp32_precision}"
    )
