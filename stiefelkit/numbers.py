"""Numbers of any kind, made Python's where they come in, and what options must be."""

import dataclasses
import math
import operator
import sys
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, TypeGuard

from stiefelkit.errors import OptionError, shown

_OF_PYTHON = {bool, int, float, str, type(None)}


def as_python_number(value: Any, keep: type | tuple[()] = ()) -> Any:
    """Returns Python's int, float or bool for a number of any kind, and anything else as it is.

    Kinds are those of NumPy, arrays and tensors without dimensions, fractions, and all that has `__index__`. Of a list,
    a tuple or a dictionary a copy with Python's numbers is returned. Instances of `keep` are left as they are.

    >>> from fractions import Fraction
    >>> import torch
    >>> as_python_number(Fraction(1, 4)), as_python_number((torch.tensor(3), "haar", None))
    (0.25, (3, 'haar', None))
    """
    kind = type(value)
    if kind in _OF_PYTHON or isinstance(value, keep) or (kind is tuple and _OF_PYTHON.issuperset(map(type, value))):
        return value
    if isinstance(value, list | tuple):
        items = [as_python_number(item, keep) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if kind is dict:
        return {k: v if type(v) in _OF_PYTHON else as_python_number(v, keep) for k, v in value.items()}
    shape = getattr(value, "shape", None)
    try:
        found = value.item() if shape == () else value  # raises for a tensor on the meta device
        if type(found) in _OF_PYTHON or shape not in (None, ()):
            return found
        return float(found) if isinstance(found, Real) and not isinstance(found, Integral) else operator.index(found)
    except (TypeError, AttributeError, RuntimeError, OverflowError):
        return value


def sizes(shape: Any) -> tuple[int, ...] | None:
    """Returns a shape as Python's integers, or None if it is no sequence of integers."""
    if not (isinstance(shape, tuple) and {*map(type, shape)} <= {int}):
        try:
            shape = as_python_number(tuple(shape))
        except TypeError:
            return None
    return tuple(shape) if {*map(type, shape)} <= {int} else None


def validate_fields_(options: Any, who: str = "", /, **checks: "Check") -> None:
    """Makes the numbers in a dataclass, frozen or not, Python's own, and checks the fields that are named."""
    for name, value in vars(options).items():
        if type(value) not in _OF_PYTHON:
            object.__setattr__(options, name, as_python_number(value))
    for name, check in checks.items():
        check.require(who, name, getattr(options, name))


@dataclasses.dataclass(frozen=True)
class Check:
    """A requirement on an option: in words that follow "needs", with {key} for its name, and as a test.

    `convert` makes the number that is tested and kept. A value of the type and between the bounds of `quick` passes.
    """

    words: str
    holds: Callable[[Any], bool]
    convert: Callable[[Any], Any] = as_python_number
    quick: tuple[type | None, float, float] = (None, 0, 0)

    def require(self, who: str, key: str, value: Any) -> Any:
        """Returns the value as a Python number; raises OptionError unless it is permitted."""
        kind, least, most = self.quick
        if type(value) is kind and least <= value <= most:
            return value
        if type(value) not in _OF_PYTHON:
            value = self.convert(value)
        if self.holds(value):
            return value
        is_whole = isinstance(value, float) and value.is_integer() and self.holds(int(value))
        remedy = f"; write {int(value)}" if is_whole else ""
        raise OptionError(f"{who} needs {self.words.format(key=key)}, got {shown(value)}{remedy}.")


def is_number(value: object) -> TypeGuard[float]:
    """Returns whether a value is a Python number that a float can hold."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)


def at_least(low: float, below: float = math.inf, most: float = math.inf) -> Check:
    """Checks a finite number, low <= number < below, and <= most."""
    upper = f" and < {below:g}" if below < math.inf else f" and <= {most:g}" if most < math.inf else ""
    words = f"{{key}} >= {low:g}{upper}" if upper else f"a finite {{key}} >= {low:g}"
    most = min(math.nextafter(below, -math.inf), most)
    return Check(words, lambda value: is_number(value) and low <= value <= most, quick=(float, low, most))


def above(low: float, most: float = math.inf) -> Check:
    """Checks a finite number, low < number <= most."""
    words = f"{{key}} > {low:g} and <= {most:g}" if most < math.inf else f"a finite {{key}} > {low:g}"
    most = min(most, sys.float_info.max)
    return Check(words, lambda value: is_number(value) and low < value <= most)


def integer(low: int, most: float = math.inf, name: str = "") -> Check:
    """Checks an integer, low <= integer <= most; a whole float is none, as torch takes none."""
    upper = f"{name} = {most}" if name else most
    words = f"an integer {{key}} >= {low}" if most == math.inf else f"an integer {{key}} from {low} to {upper}"
    return Check(words, lambda value: type(value) is int and low <= value <= most, quick=(int, low, most))


def check_counts(who: str, **counts: object) -> None:
    """Raises OptionError unless all counts are integers of any kind that tensors may have."""
    for name, count in counts.items():
        if type(count) is not int or not 0 <= count <= sys.maxsize:
            integer(0, sys.maxsize).require(who, name, count)


def one_of(*values: object) -> Check:
    """Checks that it is one of some values, of the same type."""
    known = [(type(v), v) for v in values]
    return Check(f"{{key}} in {values}", lambda value: (type(value), value) in known)


def optional(check: Check) -> Check:
    """Checks the same, and permits None."""
    words = f"{check.words}, or None"
    return dataclasses.replace(check, words=words, holds=lambda value: value is None or check.holds(value))


PRECISIONS = ("exact", "fast")
PRECISION = one_of(*PRECISIONS)
FLAG = Check("{key} to be True or False", lambda value: isinstance(value, bool), quick=(bool, False, True))
"""A flag: a word, "False" as well, would count as on."""
