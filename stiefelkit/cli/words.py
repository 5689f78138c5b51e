"""Docstrings as help: paragraphs that the console breaks into lines, not the source."""

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["entries", "sections", "unwrapped", "with_plain_help"]

F = TypeVar("F", bound=Callable[..., Any])
HEADING = re.compile(r"^(Args|Attributes|Raises|Returns|References):$")


def unwrapped(text: str) -> str:
    r"""Returns a docstring in which each paragraph, each entry of a list and each argument is one line.

    >>> unwrapped("One sentence, broken\nin two.\n\nArgs:\n    n: size\n        of it.")
    'One sentence, broken in two.\n\nArgs:\n    n: size of it.'
    """
    lines: list[str] = []
    starts_anew = True
    section = ""
    for line in inspect.cleandoc(text).splitlines():
        depth = len(line) - len(line.lstrip())
        heading = HEADING.match(line)
        if heading or (line and not depth):
            section = heading[1] if heading else ""
        # references have no names in front, and may go on at the same depth
        is_entry = depth <= 4 and (section != "References" or lines[-1].endswith((".", ":")))
        if starts_anew or not line or (section and is_entry) or line.lstrip().startswith("* "):
            lines.append(line)
        else:
            lines[-1] += f" {line.strip()}"
        starts_anew = not line
    return "\n".join(lines)


def with_plain_help(command: F) -> F:
    """Decorates a command whose docstring is its help."""
    command.__doc__ = unwrapped(command.__doc__ or "")
    return command


def sections(text: str) -> dict[str, list[str]]:
    r"""Returns the paragraphs of a docstring, without its examples, by the heading of their section; "" is the first.

    >>> sections("What it is.\n\nArgs:\n    n: size.\n\n>>> 1 + 1\n2\n")
    {'': ['What it is.'], 'Args': ['n: size.']}
    """
    paragraphs: dict[str, list[str]] = {"": []}
    heading = ""
    for line in unwrapped(text.partition("\n    >>>")[0].partition("\n>>>")[0]).splitlines():
        matched = HEADING.match(line)
        if matched:
            heading = matched[1]
            paragraphs[heading] = []
        elif line.strip():
            paragraphs[heading].append(line.strip())
    return paragraphs


def entries(lines: Iterable[str]) -> dict[str, str]:
    """Returns name to words, of the lines of a section.

    >>> entries(["n: size.", "p: columns: at most n."])
    {'n': 'size.', 'p': 'columns: at most n.'}
    """
    return {name: words for name, _, words in (line.partition(": ") for line in lines)}
