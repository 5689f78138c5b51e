"""Checks that dataclasses of options share, and the types of their fields that cyclopts needs words for."""

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Annotated, Any

from cyclopts import Parameter

from stiefelkit import numbers
from stiefelkit.errors import OptionError, StiefelkitError, did_you_mean
from stiefelkit.numbers import Check, above, integer

SEED, THREADS = integer(0, 2**63 - 1), integer(1, 1024)
STEP_LENGTH = above(0, 100.0)  # of steps of frames: longer ones turn a frame many times round and, far beyond, overflow

Option = int | float | bool | str | list[Any]
"""Types of the values of options of models, optimizers and maps."""
Sizes = Annotated[tuple[tuple[int, int], ...], Parameter(n_tokens=1)]
"""Sizes n x p on the command line, in one word: 64,2048x32."""


def finite_tables(who: str, tables: Mapping[str, Any]) -> None:
    """Raises OptionError for a table with a number that JSON has no word for."""
    for name, value in tables.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise OptionError(f"{who} needs words and finite numbers in {name}, got {value!r}.") from error


def of_type(kind: type) -> Check:
    """Returns the check of values of a type."""
    return Check(f"{{key}} to be of type {kind.__name__}", lambda value: isinstance(value, kind))


def tall_sizes(who: str, sizes: Collection[tuple[int, int]]) -> None:
    """Raises OptionError unless there is a size, and all are those of frames."""
    if not sizes:
        raise OptionError(f"{who} needs one size or more, got none.")
    for size in sizes:
        pair = numbers.sizes(size) or ()
        if len(pair) != 2 or not pair[0] >= pair[1] >= 1:
            got = " x ".join(map(str, pair)) or repr(size)
            raise OptionError(f"{who} needs sizes n x p with n >= p >= 1, got {got}.")


def known_words(who: str, kind: str, words: Iterable[str], known: Collection[str]) -> None:
    """Raises OptionError for the first word that is not known."""
    for word in words:
        if word not in known:
            raise OptionError(f"{who} has no {kind} {word!r}{did_you_mean(word, known)}")


def named_device(who: str, name: str) -> Any:
    """Returns the device of a name, which need not be there; raises OptionError if it names none."""
    import torch

    try:
        return torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"{who} needs a device such as cpu or cuda, got {name!r}.") from error


def usable_device(who: str, name: str, remedy: str = "use --device cpu") -> None:
    """Raises OptionError unless a tensor can be made on the device and read back."""
    import torch

    device = named_device(who, name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise OptionError(f"{who} needs a CUDA device for {name!r}, but torch finds none; {remedy}.")
    try:
        torch.zeros(1, device=device).cpu()
    except RuntimeError as error:
        raise OptionError(f"{who} needs a device that holds numbers, got {name!r}; {remedy}.") from error


@contextlib.contextmanager
def within_memory(who: str, sizes: str) -> Iterator[None]:
    """Turns a failure to allocate into an OptionError that names the sizes; other errors pass."""
    try:
        yield
    except (RuntimeError, TypeError, MemoryError, OverflowError) as error:
        words = str(error).partition("\n")[0].lower()
        # torch has no type of its own for it on a CPU; a size that is beyond 64 bits overflows before
        is_told = any(word in words for word in ("alloc", "out of memory", "overflow", "int too large"))
        if isinstance(error, StiefelkitError) or not (is_told or isinstance(error, MemoryError)):
            raise
        if "without overflow" in words:  # a rate or an option, no size
            raise OptionError(f"{who} needs options that fit its dtype, got one that does not: {words}.") from error
        raise OptionError(f"{who} needs sizes that fit into memory, got {sizes}.") from error


def words_of(listed: str) -> tuple[str, ...]:
    """Returns the words of a list with commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in listed.split(",") if word.strip()))


def listed(values: object) -> str:
    """Returns the words for a tuple, or another default, on the command line."""
    return ",".join(map(_word, values)) if isinstance(values, tuple) else str(values)


def _word(value: object) -> str:
    if isinstance(value, tuple):
        n, p = value
        return str(n) if n == p else f"{n}x{p}"
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)
