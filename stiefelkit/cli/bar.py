"""A bar that is drawn between the steps of what it shows."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from stiefelkit.errors import printable

__all__ = ["Bar"]

REDRAWN = 0.1
"""Seconds between two drawings of the bar, at least."""


class Bar:
    """Progress on a terminal, drawn when told of it and in no thread of its own, whose time would count."""

    def __init__(self, console: Console):
        self._console, self._progress, self._drawn = console, None, 0.0

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *exception: object) -> None:
        self.hide()

    def show(self, what: str, done: int, rounds: int) -> None:
        """Moves the bar, ten times a second at most."""
        if not self._console.is_terminal or time.monotonic() - self._drawn < REDRAWN:
            return
        what = printable(what)
        if self._progress is None:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
            self._progress = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
            self._task = self._progress.add_task(what)
            self._progress.start()
        self._progress.update(self._task, description=what, completed=done, total=rounds)
        self._progress.refresh()
        self._drawn = time.monotonic()

    def hide(self) -> None:
        """Takes the bar away, so that something can be printed."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
