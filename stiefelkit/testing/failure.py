"""How laws are run, and what a broken one says: which, where, with what, by how much, and how to see it again."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from stiefelkit.errors import OptionError, UnknownNameError, did_you_mean
from stiefelkit.testing import seeds

C = TypeVar("C")

_PRINTED = 16


@dataclass(frozen=True)
class Failure:
    """One law that does not hold in one case.

    Attributes:
        law: its name.
        where: the case, as tests are named.
        found: what was found, in words and figures.
        figure: what was measured, where it is a number.
        bound: what the law permits it to be.
        details: class, shape, dtype, options, seed and coordinates, a line each.
        line: Python that raises the same again.
    """

    law: str
    where: str
    found: str
    figure: float | None = None
    bound: float | None = None
    details: tuple[str, ...] = ()
    line: str = ""

    def __str__(self) -> str:
        lines = [f"{self.law}: {self.where}: {self.found.rstrip('.')}."]
        if self.figure is not None and self.bound is not None:
            lines.append(f"figure {self.figure!r}, bound {self.bound!r}")
        lines += self.details
        if self.line:
            lines.append(f"again: {self.line}")
        return "\n    ".join(lines)


class LawBroken(AssertionError):
    """One of the laws does not hold, or several: `failures` has all that were found, one for each law and case."""

    def __init__(self, *failures: Failure):
        super().__init__("\n".join(map(str, failures)))
        self.failures = failures


@dataclass(frozen=True)
class Draw:
    """Tensors that a law was run on, and the words that draw them again."""

    how: str
    tensors: tuple[tuple[str, Tensor], ...]

    def __str__(self) -> str:
        small = sum(value.numel() for _, value in self.tensors) <= _PRINTED
        # repr of a Python float is exact, of a tensor it is four digits
        shown = [f"{name} = torch.tensor({t.tolist()!r}, dtype={t.dtype})" for name, t in self.tensors if t.numel()]
        return f"coordinates: {self.how}" + (f": {'; '.join(shown)}" if small and shown else "")


_draws: ContextVar[list[Draw] | None] = ContextVar("_draws", default=None)


@contextlib.contextmanager
def drawing() -> Iterator[list[Draw]]:
    """Context whose list has the last draw, if there was one."""
    draws: list[Draw] = []
    token = _draws.set(draws)
    try:
        yield draws
    finally:
        _draws.reset(token)


def record(how: str, names: Iterable[str], tensors: Sequence[Tensor]) -> None:
    """Remembers a draw, if anybody asks."""
    draws = _draws.get()
    if draws is not None:
        values = (value.detach().clone() for value in tensors)
        draws[:] = [Draw(how, tuple(zip(names, values, strict=True)))]


def machine() -> str:
    """Returns what figures depend on beside the law: seed, threads, kernels and precision of products."""
    flags: Any = torch.backends
    return (
        f"seed: {seeds.OFFSET}={seeds.seed()}; {torch.get_num_threads()} threads,"
        f" {torch.backends.cpu.get_cpu_capability()}, float32 products {flags.mkldnn.matmul.fp32_precision}"
    )


def named(laws: Mapping[str, Callable[..., None]], title: Callable[..., str] = str) -> dict[str, Callable[..., None]]:
    """Returns the same laws, whose every error is a `LawBroken` that names the law and the title of its arguments."""

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


def laws_of(*modules: str) -> dict[str, Callable[..., None]]:
    """Returns the laws that modules define, by name: their functions called law_*, in the order in which they stand."""
    return {
        name.removeprefix("law_"): value
        for module in modules
        for name, value in vars(sys.modules[module]).items()
        if name.startswith("law_") and value.__module__ == module
    }


def check_laws(laws: Iterable[str], table: Mapping[str, Any], of: str = "") -> list[str]:
    """Returns the names of laws; raises UnknownNameError for one that is not in the table."""
    laws = list(laws)
    for law in laws:
        if law not in table:
            raise UnknownNameError(f"No law{of} is named {law!r}{did_you_mean(law, table)}")
    return laws


def only_case(cls: type, cases: Sequence[C], only: str | None) -> Sequence[C]:
    """Returns the cases of a class that have a name, all if that is None; raises UnknownNameError if none has it."""
    names = [str(case) for case in cases]
    if only is not None and only not in names:
        raise UnknownNameError(f"No case of {cls.__name__} is named {only!r}{did_you_mean(only, names)}")
    return [case for case, name in zip(cases, names, strict=True) if only in (None, name)]


def settle(checks: Iterable[Callable[[], None]], offset: int | None = None) -> None:
    """Runs all checks with shifted seeds; raises LawBroken with each law and case that is broken, once."""
    failures: dict[tuple[str, str], Failure] = {}
    with seeds.shifted(offset), torch.random.fork_rng(devices=[]):
        for check in checks:
            try:
                check()
            except LawBroken as broken:
                failures |= {(failure.law, failure.where): failure for failure in broken.failures}
    if failures:
        raise LawBroken(*failures.values())


def run(law: Callable[..., None], case: Sequence[Any], details: Callable[[], str], line: Callable[[], str]) -> None:
    """Runs a law on a case; a failure says on what, and with which line of Python it is seen again."""
    with drawing() as draws, torch.random.fork_rng(devices=[]):
        seeds.reseed()
        try:
            law(*case)
            return
        except LawBroken as broken:
            failure = broken.failures[0]
    lines = [details(), machine(), *map(str, draws)]
    raise LawBroken(replace(failure, details=tuple(filter(None, lines)), line=line()))


@dataclass(frozen=True)
class NamedCase:
    """What has a registered name, with options."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name, *(f"{key}={value}" for key, value in self.options.items())])

    def details(self) -> str:
        """Returns what it is checked on."""
        raise NotImplementedError

    def settle(
        self, check: str, table: Mapping[str, Callable[..., None]], laws: Iterable[str], offset: int | None
    ) -> None:
        """Runs laws of a table on it, for a public check of that name."""
        given = f", options={dict(self.options)!r}" if self.options else ""

        def line(law: str) -> str:
            call = f"{check}({self.name!r}, [{law!r}]{given}, offset={seeds.seed()})"
            return f"from stiefelkit.testing import {check}; {call}"

        settle((partial(run, table[law], [self], self.details, partial(line, law)) for law in laws), offset)


def checks_of(
    check: str,
    base: tuple[type, str],
    cases: Callable[[Any], Sequence[Any]],
    classes: Iterable[type],
    table: Mapping[str, Callable[..., None]],
    laws: Iterable[str],
    only: str | None,
    is_due: Callable[[str, Any], bool] = lambda law, case: True,
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields each law on each case of some classes, with a name; raises for a law or a case that there is not.

    `check` names the public check, `base` what the classes derive from, with its name; cases say their `details`; all
    are due if `only` is None, but for those that `is_due` leaves out.
    """
    kind = check.removeprefix("check_") + "s"
    laws = check_laws(laws, table, f" of {kind}")
    for cls in classes:
        if not (isinstance(cls, type) and issubclass(cls, base[0])):
            raise OptionError(f"The laws of {kind} need a subclass of {base[1]}, got {cls!r}.")
        for law in laws:
            for case in only_case(cls, cases(cls), only):
                if is_due(law, case):
                    line = partial(again, check, cls, law, case)
                    yield f"{law}-{case}", partial(run, table[law], [case], case.details, line)


def again(check: str, cls: type, law: str, case: object) -> str:
    """Returns Python that runs one law on one case of a class again."""
    # A class of a script or inside a function has to be in scope already.
    is_importable = cls.__module__ != "__main__" and "." not in cls.__qualname__
    imports = f"from {cls.__module__} import {cls.__name__}; " if is_importable else ""
    device = getattr(case, "device", "cpu")
    place = "" if device == "cpu" else f", device={device!r}"
    arguments = f"{cls.__name__}, [{law!r}], only={str(case)!r}, offset={seeds.seed()}{place}"
    return f"{imports}from stiefelkit.testing import {check}; {check}({arguments})"
