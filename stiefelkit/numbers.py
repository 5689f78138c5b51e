"""Numbers of any kind, made Python's where they come in, and what options must be."""

import dataclasses
import math
import operator
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

from stiefelkit.errors import OptionError, shown

_PLAIN = {bool, int, float, str, type(None)}


def as_python_number(value: Any, keep: type | tuple[()] = ()) -> Any:
    """Returns Python's int, float or bool for a number of any kind, and what is none as it is.

    Kinds are those of NumPy, arrays and tensors without dimensions, fractions, decimals, and all that has `__index__`
    or `__float__`. Of a list, a tuple or a dictionary a copy with plain values is returned, of a named tuple as well.

    Args:
        value: a number or anything else.
        keep: a class whose instances are left as they are.

    >>> from fractions import Fraction
    >>> import torch
    >>> as_python_number(Fraction(1, 4)), as_python_number((torch.tensor(3), "haar", None))
    (0.25, (3, 'haar', None))
    """
    kind = type(value)
    if kind in _PLAIN or isinstance(value, keep) or (kind is tuple and _PLAIN.issuperset(map(type, value))):
        return value
    shape = getattr(value, "shape", ())
    try:
        if isinstance(value, list | tuple):
            return getattr(kind, "_make", list if kind is list else tuple)(
                as_python_number(item, keep) for item in value
            )
        if kind is dict:
            return {key: as_python_number(item, keep) for key, item in value.items()}
        if shape == () and hasattr(value, "item"):  # NumPy's, and tensors; those on the meta device have no value
            value = value.item()
        if shape != () or isinstance(value, bool):
            return value
        if hasattr(type(value), "__index__"):
            return int(operator.index(value))
        return float(value) if hasattr(type(value), "__float__") else value
    except (TypeError, ValueError, RuntimeError, ArithmeticError):
        return value


def sizes(shape: Any) -> tuple[int, ...] | None:
    """Returns a shape as Python's integers, or None if it is no sequence of integers."""
    if isinstance(shape, tuple) and {*map(type, shape)} <= {int}:
        return tuple(shape)
    shape = as_python_number(shape)
    try:
        found: Any = as_python_number(tuple(shape)) if isinstance(shape, Iterable) else (None,)
    except Exception:  # of what says that it can be gone through, as tensors without dimensions, and cannot
        return None
    return found if all(type(length) is int for length in found) else None


def validate_fields_(options: Any, who: str = "", /, **checks: "Check") -> None:
    """Makes the numbers in a dataclass, frozen or not, Python's own, and checks the fields that are named."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if type(value) not in _PLAIN:
            object.__setattr__(options, field.name, as_python_number(value))
    for name, check in checks.items():
        check.require(who, name, getattr(options, name))


@dataclasses.dataclass(frozen=True)
class Check:
    """A requirement on an option: in words that follow "needs", with {key} for its name, and as a test of plain values.

    `plain` says which value of a number of another kind is tested, and kept.
    """

    words: str
    holds: Callable[[Any], bool]
    as_plain: Callable[[Any], Any] = as_python_number

    def require(self, who: str, key: str, value: Any) -> Any:
        """Returns the plain value; raises OptionError unless it is such."""
        if type(value) not in _PLAIN:
            value = self.as_plain(value)
        if self.holds(value):
            return value
        is_whole = isinstance(value, float) and value.is_integer() and self.holds(int(value))
        remedy = f"; write {int(value)}" if is_whole else ""
        raise OptionError(f"{who} needs {self.words.format(key=key)}, got {shown(value)}{remedy}.")


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a plain value is a number, and one that a float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def at_least(low: float, below: float = math.inf, most: float = math.inf) -> Check:
    """Checks a finite number, low <= number < below, and <= most."""
    upper = f" and < {below:g}" if below < math.inf else f" and <= {most:g}" if most < math.inf else ""
    words = f"{{key}} >= {low:g}{upper}" if upper else f"a finite {{key}} >= {low:g}"
    return Check(words, lambda value: is_number(value) and low <= value < below and value <= most)


def above(low: float, most: float = math.inf) -> Check:
    """Checks a finite number, low < number <= most."""
    words = f"{{key}} > {low:g} and <= {most:g}" if most < math.inf else f"a finite {{key}} > {low:g}"
    return Check(words, lambda value: is_number(value) and low < value < math.inf and value <= most)


def integer(low: int, most: float = math.inf, name: str = "") -> Check:
    """Checks an integer, low <= integer <= most; no float, though it be whole, as torch takes none."""
    upper = f"{name} = {most}" if name else most
    words = f"an integer {{key}} >= {low}" if most == math.inf else f"an integer {{key}} from {low} to {upper}"
    return Check(words, lambda value: type(value) is int and low <= value <= most)


_COUNT = integer(0, sys.maxsize)


def check_counts(who: str, **counts: Any) -> None:
    """Raises OptionError unless all counts are integers of any kind, of those that tensors may have."""
    for name, count in counts.items():
        if type(count) is not int or not 0 <= count <= sys.maxsize:
            _COUNT.require(who, name, count)


def one_of(*values: Any) -> Check:
    """Checks that it is one of some values, of the same type."""
    known = [(type(v), v) for v in values]
    return Check(f"{{key}} in {values}", lambda value: (type(value), value) in known)


def optional(check: Check) -> Check:
    """Checks the same, and takes None."""
    return Check(f"{check.words}, or None", lambda value: value is None or check.holds(value), check.as_plain)


PRECISIONS = ("exact", "fast")
"""The values of `precision`."""
PRECISION = one_of(*PRECISIONS)
"""A value of `precision`."""
FLAG = Check("{key} to be True or False", lambda value: isinstance(value, bool))
"""A flag: a word, "False" as well, would count as on."""
