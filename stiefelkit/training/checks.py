"""The range checks that every dataclass of options makes, worded once."""

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from stiefelkit.errors import OptionError, StiefelkitError, UnknownNameError, did_you_mean

__all__ = [
    "at_least",
    "at_most",
    "finite_positive",
    "known_parametrizations",
    "known_words",
    "non_negative",
    "of_type",
    "step_length",
    "tall_sizes",
    "usable_device",
    "usable_place",
    "usable_seed",
    "usable_threads",
    "within_memory",
]

LONGEST_STEP = 100.0
"""Longer ones turn a frame many times round and, far beyond, overflow."""


def at_least(who: str, name: str, value: int, least: int) -> None:
    """Raises OptionError unless an integer option is at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{who} needs {name} to be an integer >= {least}, got {value!r}.")


def at_most(who: str, name: str, value: float, most: float) -> None:
    """Raises OptionError if a number is above `most`."""
    if value > most:
        raise OptionError(f"{who} needs {name} <= {most}, got {value!r}.")


def finite_positive(who: str, name: str, value: float) -> None:
    """Raises OptionError unless a number is finite and greater than zero."""
    if not (_is_finite(value) and value > 0):
        raise OptionError(f"{who} needs a finite {name} > 0, got {value!r}.")


def _is_finite(value: Any) -> bool:
    """Whether something, as a file may give it, is a number that is neither infinite nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def non_negative(who: str, name: str, value: float) -> None:
    """Raises OptionError unless a number is finite and at least zero."""
    if not (_is_finite(value) and value >= 0):
        raise OptionError(f"{who} needs a finite {name} >= 0, got {value!r}.")


def finite_tables(who: str, tables: Mapping[str, Any]) -> None:
    """Raises OptionError for the first number in a table, or in a table or list of it, that JSON has no word for."""
    for name, value in tables.items():
        if isinstance(value, Mapping):
            finite_tables(who, {f"{name}.{key}": item for key, item in value.items()})
        elif isinstance(value, list | tuple):
            finite_tables(who, {f"{name}[{i}]": item for i, item in enumerate(value)})
        elif isinstance(value, float) and not math.isfinite(value):
            raise OptionError(f"{who} needs a finite {name}, got {value!r}.")


def of_type(who: str, kind: type, values: Mapping[str, Any]) -> None:
    """Raises OptionError for the first value, by name, that is of another type."""
    for name, value in values.items():
        if not isinstance(value, kind):
            raise OptionError(f"{who} needs {name} to be of type {kind.__name__}, got {value!r}.")


def step_length(who: str, value: float) -> None:
    """Raises OptionError unless a step of this length can be made."""
    finite_positive(who, "step_length", value)
    at_most(who, "step_length", value, LONGEST_STEP)


def usable_seed(who: str, value: int) -> None:
    """Raises OptionError unless torch takes the seed."""
    at_least(who, "seed", value, 0)
    at_most(who, "seed", value, 2**63 - 1)


def usable_threads(who: str, value: int) -> None:
    """Raises OptionError unless so many threads can be asked for."""
    at_least(who, "threads", value, 1)
    at_most(who, "threads", value, 1024)


def tall_sizes(who: str, sizes: Collection[tuple[int, int]]) -> None:
    """Raises OptionError unless there is a size, and all are those of frames."""
    if not sizes:
        raise OptionError(f"{who} needs one size or more, got none.")
    for n, p in sizes:
        if not n >= p >= 1:
            raise OptionError(f"{who} needs sizes n x p with n >= p >= 1, got {n} x {p}.")


def known_words(who: str, kind: str, words: Iterable[str], known: Collection[str]) -> None:
    """Raises OptionError for the first word that is not known."""
    for word in words:
        if word not in known:
            raise OptionError(f"{who} has no {kind} {word!r}{did_you_mean(word, known)}")


def known_parametrizations(names: Iterable[str]) -> None:
    """Raises UnknownNameError for the first name that no parametrization has."""
    from stiefelkit.attach import available

    known = available()
    for name in names:
        if name not in known:
            raise UnknownNameError(f"No parametrization is named {name!r}{did_you_mean(name, known)}")


def usable_device(who: str, name: str) -> None:
    """Raises OptionError unless a tensor can be made on the device and read back."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"{who} needs a device such as cpu or cuda, got {name!r}.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"{who} needs a CUDA device for {name!r}, but torch sees none; use --device cpu.")
    try:
        torch.zeros(1, device=device).cpu()
    except RuntimeError as error:
        raise OptionError(f"{who} needs a device that holds numbers, got {name!r}; use --device cpu.") from error


def usable_place(who: str, device: str, threads: int, seed: int) -> None:
    """Raises OptionError unless something can be measured there, with so many CPU threads, from that seed."""
    usable_seed(who, seed)
    usable_threads(who, threads)
    usable_device(who, device)


@contextlib.contextmanager
def within_memory(who: str, sizes: str) -> Iterator[None]:
    """Turns a failure to allocate into an OptionError that names the sizes, options with values; other errors pass."""
    try:
        yield
    except (RuntimeError, TypeError, MemoryError, OverflowError) as error:
        words = str(error).partition("\n")[0].lower()
        # torch has no type of its own for it on a CPU; a size that is beyond 64 bits overflows before
        if "without overflow" in words and not isinstance(error, StiefelkitError):  # a rate or an option, no size
            raise OptionError(
                f"{who} needs rates and options that fit its dtype, got one that does not: {words}."
            ) from error
        is_told = any(word in words for word in ("alloc", "out of memory", "overflow", "int too large"))
        if isinstance(error, StiefelkitError) or not (is_told or isinstance(error, MemoryError)):
            raise
        raise OptionError(f"{who} needs sizes that fit into memory, got {sizes}.") from error
