"""Lazy tables from a name to an object, filled by built-ins, by installed plugins and by hand.

Built-ins take the plugins' road: both are dotted strings `"module:attribute"`, imported at first use. Plugins
announce themselves by an entry point; one that cannot be read or imported, whatever it raises, warns and leaves the
rest usable. Two plugins with one name are an error where it is used; a plugin with the name of a built-in is warned
about and left out.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from importlib.metadata import EntryPoint
from typing import Any, TypeVar

from stiefelkit._version import __version__
from stiefelkit.errors import OptionError, PluginError, UnknownNameError, did_you_mean, shown

__all__ = ["Registry", "code_of_others"]

T = TypeVar("T")


def entry_points(group: str) -> list[EntryPoint]:
    """Returns the entry points of a group; a distribution that cannot be read is warned about and left out."""
    # Not by metadata.entry_points, which one damaged distribution takes all others with.
    found: dict[Any, list[EntryPoint]] = {}
    for place in metadata.distributions():
        text = group
        try:
            text = place.read_text("entry_points.txt") or ""
            if group in text and place.name not in found:  # of two with one name Python takes the first
                found[place.name] = [point for point in place.entry_points if point.group == group]
        except Exception as error:
            if group in text and place.name not in found:
                found[place.name] = []
                warnings.warn(
                    f"The plugins of {place.name} are left out: its entry_points.txt needs lines of the form "
                    f"name = module:object, got {error!r}.",
                    stacklevel=4,
                )
    return [point for points in found.values() for point in points]


@contextlib.contextmanager
def code_of_others(needs: str, *passing: type[BaseException]) -> Iterator[None]:
    """Turns what a plugin raises, or ends the program with, into a PluginError; Ctrl-C passes, and so do some errors.

    The sentence of the error is `needs` and what was raised.
    """
    try:
        yield
    except (KeyboardInterrupt, *passing):
        raise
    except BaseException as error:  # sys.exit, and a test framework's skip
        raise PluginError(f"{needs}, got {error!r}.") from error


class Registry:
    """A table from names to objects that are imported when first asked for.

    `group` is that of the plugins' entry points, "" for a table without; `kind` says in messages what the table holds;
    `built_in` has dotted strings or objects, and `check` raises OptionError for what is not of this kind.
    """

    def __init__(
        self, group: str, kind: str, built_in: Mapping[str, Any], check: Callable[[Any], None] = lambda target: None
    ):
        self.group = group
        self.kind = kind
        self._check_kind = check
        self._targets: dict[str, Any] = dict(built_in)
        self._origins: dict[str, str | None] = dict.fromkeys(built_in, f"stiefelkit {__version__}")
        self._loaded: dict[str, Any] = {}
        self._checked: dict[int, Any] = {}
        self._contested: dict[str, tuple[Any, Any]] = {}
        self._plugins_read = not group

    def register(self, name: str, target: object) -> None:
        """Adds a name of an object, or of a dotted string `"package.module:attribute"`."""
        if not isinstance(name, str) or not name or not name.replace("_", "a").replace("-", "a").isalnum():
            raise OptionError(f"A {self.kind} name needs letters, digits, - and _ only, got {shown(name)}.")
        self._read_plugins()
        if name in self._targets and self._targets[name] != target:
            raise OptionError(f"The {self.kind} name {shown(name)} is taken by {shown(self._targets[name])}.")
        self._targets[name] = target

    def names(self) -> list[str]:
        """Returns every known name, sorted, without importing anything."""
        self._read_plugins()
        return sorted(self._targets)

    def get(self, name: str) -> Any:
        """Returns the object behind a name."""
        self._read_plugins()
        self._require(name)
        if name in self._contested:
            first, second = self._contested[name]
            raise OptionError(
                f"The {self.kind} name {name!r} needs one owner, got {first!r} and plugin {second!r}; uninstall one."
            )
        target = self._targets[name]
        if isinstance(target, str) and name not in self._loaded:
            with code_of_others(f"The {self.kind} {name!r} needs {target!r} to import"):
                self._loaded[name] = EntryPoint(name, target, self.group).load()
        return self._loaded.get(name, target)

    def origin(self, name: str) -> str | None:
        """Returns the distribution that a name comes from, with its version, as "mypackage 1.2", or None."""
        self._read_plugins()
        self._require(name)
        return self._origins.get(name)

    def check(self, target: Any) -> None:
        """Raises OptionError for a class that lacks an abstract method, or an object that is not of this kind."""
        article = "An" if self.kind[0] in "aeiou" else "A"
        missing = sorted(getattr(target, "__abstractmethods__", ())) if isinstance(target, type) else ()
        if missing:
            raise OptionError(f"{article} {self.kind} needs {', '.join(missing)}, got {target.__name__} without.")
        with code_of_others(f"{article} {self.kind} needs to be one that can be looked at", OptionError):
            self._check_kind(target)

    def find(self, target: Any) -> Any:
        """Returns the object that a name stands for, or the object itself, either checked."""
        if isinstance(target, str):
            target = self._loaded[target] if target in self._loaded else self.get(target)
        if id(target) not in self._checked:
            self.check(target)
            self._checked[id(target)] = target
        return target

    def available(self) -> dict[str, Any]:
        """Returns name to object for all that import and are of this kind; others are warned about and left out."""
        return self.map(lambda name, target: target, stacklevel=3)

    def map(self, function: Callable[[str, Any], T], stacklevel: int = 2) -> dict[str, T]:
        """Returns name to `function(name, object)`; what fails is warned about and left out."""
        results = {}
        for name in self.names():
            try:
                target = self.find(name)
                with code_of_others(f"The {self.kind} {name!r} needs code that runs"):
                    results[name] = function(name, target)
            except (PluginError, OptionError) as error:
                warnings.warn(f"The {self.kind} {name!r} is left out: {error}", stacklevel=stacklevel)
        return results

    def class_names(self) -> dict[str, str]:
        """Returns own name to registered name of every object, without importing anything."""
        self._read_plugins()
        targets = self._targets.items()
        return {t.partition(":")[2] if isinstance(t, str) else getattr(t, "__name__", ""): name for name, t in targets}

    def by_class_name(self, attribute: str) -> Any | None:
        """Returns the object whose own name is the given one, or None; imports nothing else."""
        name = self.class_names().get(attribute)
        return None if name is None else self.get(name)

    def name_of(self, target: Any) -> str | None:
        """Returns the name under which an object is registered, or None, without importing anything."""
        self._read_plugins()
        dotted = f"{target.__module__}:{target.__qualname__}"
        return next((name for name, entry in self._targets.items() if entry is target or entry == dotted), None)

    def _require(self, name: str) -> None:
        if not isinstance(name, str) or name not in self._targets:
            raise UnknownNameError(f"No {self.kind} is named {shown(name)}{did_you_mean(name, self._targets)}")

    def _read_plugins(self) -> None:
        if self._plugins_read:
            return
        self._plugins_read = True
        built_in = frozenset(self._targets)
        for point in entry_points(group=self.group):
            if point.name not in self._targets:
                self._targets[point.name] = point.value
                with contextlib.suppress(Exception):  # of metadata that are damaged
                    self._origins[point.name] = f"{point.dist.name} {point.dist.version}" if point.dist else None
            elif self._targets[point.name] == point.value:
                continue
            elif point.name in built_in:
                warnings.warn(
                    f"The plugin {point.value!r} is left out: the {self.kind} name {point.name!r} is built in.",
                    stacklevel=3,
                )
            else:
                self._contested[point.name] = (self._targets[point.name], point.value)
