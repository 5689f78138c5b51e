"""The command `stiefelkit`: it parses, calls `stiefelkit.training` or `stiefelkit.measuring`, and prints.

Nothing here imports torch before a command runs, so that help comes at once: what works with tensors is imported in the
functions of the commands.
"""

import contextlib
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec

from stiefelkit.errors import StiefelkitError, printable

__all__ = ["main"]

USER_ERROR = 2
STOPPED = "Stopped at once; what was saved is kept."
EXTRA = {name: name for name in ("cyclopts", "rich", "matplotlib", "jinja2")} | {"sklearn": "scikit-learn"}
"""Packages that `stiefelkit[cli]` installs, by the names of their imports."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line.

    An error that the user can mend is one sentence on standard error; any other keeps its traceback.

    Args:
        arguments: the words after the program's name; those of the process if left out.

    Returns:
        The exit code: 0, 2 after an error of the user, 128 + n after signal n.
    """
    try:
        return _run(list(sys.argv[1:] if arguments is None else arguments), is_program=arguments is None)
    except KeyboardInterrupt:
        print(STOPPED, file=sys.stderr)
        return 130


def _run(words: list[str], is_program: bool) -> int:
    missing = ", ".join(package for name, package in EXTRA.items() if find_spec(name) is None)
    if missing:
        return _refuse(f'The command line needs {missing}, got an installation without; pip install "stiefelkit[cli]".')
    from cyclopts import CycloptsError
    from rich.console import Console

    from stiefelkit.cli.app import app
    from stiefelkit.cli.options import asked

    if is_program:
        warnings.showwarning = _warn
    token = asked.set(tuple(words))
    if words[:1] in ([], ["--help"], ["-h"]):
        app.resolved_commands()  # the table of commands shows the first line of each
    app.console = app.meta.console = Console()  # as wide as the terminal is now; cyclopts would keep its first
    try:
        if words[:1] in (["train"], ["compare"], ["--install-completion"]):
            from stiefelkit.cli.runs import add_tasks

            add_tasks(words[1:2])
        code = app.meta(words, exit_on_error=False, print_error=False, result_action="return_value")
    except (StiefelkitError, CycloptsError) as error:
        return _refuse(str(error))
    except OSError as error:  # of a path or a disk; a bug in a program seldom raises it
        where = f" at {error.filename}" if error.filename else ""
        return _refuse(f"stiefelkit needs files that it can read and write, got {error.strerror or error}{where}.")
    finally:
        asked.reset(token)
    return code if isinstance(code, int) else 0


def _warn(message: Warning | str, category: type[Warning], *place: object, **more: object) -> None:
    _tell("Warning" if category is UserWarning else f"Warning ({category.__name__})", str(message))


def _refuse(sentence: str) -> int:
    _tell("Error", sentence)
    return USER_ERROR


def _tell(kind: str, sentence: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone, or a disk is full
        print(f"{kind}:", printable(" ".join(sentence.split())), file=sys.stderr, flush=True)
