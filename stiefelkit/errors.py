"""The errors of stiefelkit, one small type per family, all children of `StiefelkitError`; warnings of what is no error.

Each message is one sentence "{who} needs {requirement}, got {value}", with the remedy if there is one. Every type also
derives from the built-ins that torch raises in its place, so that handlers of torch's errors catch ours.
"""

import difflib
import re
import sys
import warnings
from collections.abc import Iterable
from types import ModuleType
from typing import NoReturn

__all__ = [
    "CheckpointError", "DataError", "DivergedError", "DtypeError", "ImageError", "NoAttributeError", "NonFiniteError",
    "NotAFrameError", "OptimizerError", "OptionError", "PluginError", "RankError", "RunError", "ShapeError",
    "StiefelkitError", "UnfilledError", "UnknownNameError", "did_you_mean", "needs", "no_attribute", "printable",
    "shown", "suggest_names", "warn_caller",
]  # fmt: skip


_LISTED, _MEANT = 32, 4
"""The most names that are listed, and that are suggested."""
_NEAR = 0.65  # below this ratio of difflib a name is another word, "precision" for "reflections", and no slip
_SYNONYMS = {"unitary": "orthogonal", "riemannian": "stiefel", "nonlinearity": "activation"}


class StiefelkitError(Exception):
    """Root of every error that stiefelkit raises on purpose."""


class ShapeError(StiefelkitError, ValueError, RuntimeError):
    """A tensor has the wrong shape or number of dimensions."""


class DtypeError(StiefelkitError, TypeError, ValueError, RuntimeError):
    """A tensor has a dtype or field that the operation does not do."""


class OptionError(StiefelkitError, ValueError, TypeError):
    """An option is unknown, or its value is outside the permitted range."""


class NotAFrameError(StiefelkitError, ValueError):
    """A matrix that must have orthonormal columns does not."""


class RankError(StiefelkitError, ValueError, RuntimeError):
    """A matrix has linearly dependent columns where they must be independent."""


class ImageError(StiefelkitError, ValueError, NotImplementedError):
    """A frame is outside the image of a parametrization, or the map has no right inverse."""


class NonFiniteError(StiefelkitError, ValueError, RuntimeError):
    """A tensor holds NaN or infinity."""


class DivergedError(NonFiniteError):
    """The loss, a gradient or a weight of a run became NaN or infinite; `found` says which, and at which step."""

    def __init__(self, message: str, found: str = "") -> None:
        super().__init__(message)
        self.found = found


class CheckpointError(StiefelkitError, RuntimeError, ValueError):
    """A state dict does not belong to the weight that it is loaded into."""


class DataError(StiefelkitError, ValueError):
    """A file of a data set is missing, damaged, or another than it should be."""


class OptimizerError(StiefelkitError, RuntimeError, ValueError):
    """An optimizer holds parameters that it must not move."""


class PluginError(StiefelkitError, ImportError):
    """A registered or installed object cannot be imported, or is not what its table holds."""


class UnfilledError(StiefelkitError, RuntimeError):
    """A weight is read before its coordinates hold values (meta device, `to_empty`)."""


class RunError(StiefelkitError, RuntimeError):
    """A run folder is missing, truncated or does not fit the command."""


class UnknownNameError(StiefelkitError, ValueError):
    """A name is in none of the tables that were searched."""


class NoAttributeError(UnknownNameError, AttributeError):
    """A module has no such name. Reading the message looks up, and imports, the names that may be meant."""

    def __init__(self, message: str, module: str = "", name: str = "") -> None:
        super().__init__(message, module, name)
        self.name, self.obj = name, None  # else Python adds a suggestion of its own

    def __str__(self) -> str:
        message, module, name = self.args
        if module not in sys.modules:
            return message
        here, within, calls = sys.modules[module], [], {}
        known = _public(here)
        for before, held in [("", here), *((f"{inner}.", getattr(here, inner)) for inner in known)]:
            if isinstance(held, ModuleType):
                within += [before + other for other in _public(held)]
                if {"create", "names"} <= vars(held).keys():  # as of models, which are no attributes
                    calls |= {before + other: f"{before}create({other!r})" for other in held.names()}
        said = did_you_mean(name, known, [*within, *calls])
        return message + re.sub(r'(?<=")[\w.]+(?=")', lambda found: calls.get(found[0], found[0]), said)


def _public(module: ModuleType) -> list[str]:
    """Returns the names that a module offers: of its `__dir__`, if it has one, or of `__all__`."""
    names = vars(module)["__dir__"]() if "__dir__" in vars(module) else module.__all__
    return [name for name in names if not name.startswith("_")]


def no_attribute(module: str, name: str) -> NoAttributeError:
    """Returns the error for a name that a module lacks."""
    return NoAttributeError(f"module {module!r} has no attribute {name!r}", module, name)


def suggest_names(module: str) -> None:
    """Puts a `__getattr__` into a module, unseen by type checkers, that raises NoAttributeError for names it lacks."""

    def __getattr__(name: str) -> NoReturn:
        raise no_attribute(module, name)

    vars(sys.modules[module])["__getattr__"] = __getattr__


def shown(value: object, most: int = 80) -> str:
    """Returns the repr of a value in a line of at most `most` characters, or its type where repr fails.

    >>> shown("a"), shown(10**5000)
    ("'a'", 'a value of type int that cannot be printed')
    """
    try:
        text = repr(value)
        return (" ".join(text.split()) if "\n" in text else text)[:most]
    except Exception:
        return f"a value of type {type(value).__name__} that cannot be printed"


def needs(condition: bool, error: type[StiefelkitError], who: str, requirement: str, got: object) -> None:
    """Raises an `error` "{who} needs {requirement}, got {got}." unless a condition holds.

    The value `got` is shown by its repr, a text as it is.

    >>> needs(False, ShapeError, "haar", "n >= p", (2, 3))
    Traceback (most recent call last):
    stiefelkit.errors.ShapeError: haar needs n >= p, got (2, 3).
    """
    if not condition:
        raise error(f"{who} needs {requirement}, got {got if isinstance(got, str) else shown(got)}.")


def enumerated(names: list[str]) -> str:
    """Joins at most three names, and the number of the others."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def did_you_mean(name: object, known: Iterable[str], near: Iterable[str] = ()) -> str:
    """Returns `'; did you mean "..."?'` for the known names that may be meant, else a list of 32 at most.

    Names may be meant that end with `name` as a word, else have a word that begins so, else the nearest one; those in
    `near` too, which are not listed.

    >>> did_you_mean("urnn", ["eurnn", "full_urnn", "lie_urnn"])
    '; did you mean "full_urnn" or "lie_urnn"?'
    """
    known, typed = sorted(known), (name if isinstance(name, str) else shown(name)).lower()
    names, tries = [*dict.fromkeys([*known, *near])], [(typed, "")]
    notes = {"unitary": ", unitary where it is complex"}
    tries += [(typed.replace(word, ours), notes.get(word, "")) for word, ours in _SYNONYMS.items() if word in typed]
    for word, note in tries if typed else ():
        begins = rf"(?:^|[._]|(?<=[a-z\d])(?=[A-Z]))(?i:{re.escape(word)})"
        begun = [other for other in names if re.search(begins, other)]
        meant = [other for other in begun if re.search(f"{begins}$", other)] or begun
        if meant:
            return _suggested(meant, note)
    spelt = {other.lower(): other for other in names}
    close = difflib.get_close_matches(typed, spelt, n=1, cutoff=_NEAR)
    if close:
        return _suggested([spelt[close[0]]], "")
    more = f" and {len(known) - _LISTED} more" if len(known) > _LISTED else ""
    return f"; known: {', '.join(known[:_LISTED])}{more}." if known else "; none is known."


def _suggested(names: list[str], note: str) -> str:
    *most, last = [f'"{name}"' for name in names]
    if len(most) > _MEANT:  # never one of 1
        most, last = most[:_MEANT], f"one of {len(names) - _MEANT} more"
    return f"; did you mean {', '.join(most)}{' or ' if most else ''}{last}{note}?"


def printable(text: str) -> str:
    r"""Returns a text whose control characters, but for tabs and line ends, are written as escapes.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    return "".join(c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in text)


def warn_caller(text: str) -> None:
    """Warns by a text, as from the line outside of this package and of torch that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("torch.", "stiefelkit.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
