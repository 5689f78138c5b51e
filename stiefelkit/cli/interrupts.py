"""Ctrl-C for the whole of a program: no traceback, wherever it comes.

Imports next to nothing: until it has, a Ctrl-C ends the program without a word; while Python itself starts, and before
it has found this package, it is Python's.
"""

import os
import signal
import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    from types import FrameType
    from typing import Any

STOPPED = "Stopped at once; what was saved is kept."


def guard(is_program: bool = False) -> None:
    """Lets Ctrl-C end the program at once while something is imported, and raise KeyboardInterrupt elsewhere.

    Libraries in C lose an exception that comes while they are imported, or print it, and no work is going on yet. One
    that comes in a destructor, where Python would print it and go on, ends the program too. A program that was started
    with SIGINT ignored, in the background of a script, goes on ignoring it.

    Args:
        is_program: whether the process is the command, for which Ctrl-C ended it without a word until now.
    """
    held = signal.getsignal(signal.SIGINT)
    if held is signal.default_int_handler or (is_program and held is signal.SIG_DFL):
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = _unraisable


def ignore() -> None:
    """Lets a late Ctrl-C change nothing: all is said and saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(number: int, frame: "FrameType | None") -> None:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            _leave()
        frame = frame.f_back
    raise KeyboardInterrupt


def _unraisable(unraisable: "Any") -> None:
    if unraisable.exc_type is KeyboardInterrupt:
        _leave()
    sys.__unraisablehook__(unraisable)


def _leave() -> None:
    try:
        sys.stdout.flush()
    except Exception:  # the signal came in the middle of a write, or there is nobody to read
        pass
    os.write(2, f"{STOPPED}\n".encode())
    os._exit(128 + signal.SIGINT)
