"""A plan's fields are the options of its command: each is written once, with its line in the docstring.

What the command line has to know beyond that stands in the metadata of the field: "names", those of the option, with
their dashes, the first for messages; "negative", the name that switches it off; "shown", the default in help where that
is None; "read", from the words on the command line to the value; "fields", those of a dataclass that are options
themselves; "hidden", True if Python alone can set it.
"""

from typing import Any

__all__ = ["listed"]


def listed(values: tuple[Any, ...]) -> str:
    """Returns the words for a tuple on the command line.

    >>> listed(((64, 64), (2048, 32))), listed((1.0, 0.5))
    ('64,2048x32', '1,0.5')
    """
    return ",".join(map(_word, values))


def _word(value: Any) -> str:
    if isinstance(value, tuple):
        n, p = value
        return str(n) if n == p else f"{n}x{p}"
    return f"{value:g}" if isinstance(value, float) else str(value)
