"""The view of a run: a bar on a terminal, and a line for each evaluation elsewhere."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from stiefelkit.errors import printable

REDRAW_SECONDS = 0.1


class Screen(Console):
    """A console that shows text as it is: no markup, no emoji, control characters as escapes; or nothing if quiet."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, quiet=quiet)

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns what a string looks like, in a table too."""
        return super().render_str(printable(text), **options)


def say(sentence: str) -> None:
    """Prints a sentence, which may hold names and paths of others, as one line of any length."""
    print(printable(sentence))


class Bar(Progress):
    """Progress on a terminal, drawn when told of it and in no thread of its own, whose time would count."""

    def __init__(self, console: Console, stays: bool = False):
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[words]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=not stays,
            expand=True,
            disable=console.quiet or not console.is_terminal,
        )
        self._task, self._drawn = self.add_task("", words=""), 0.0

    def show(self, what: str, done: int, rounds: int, words: str = "", at_once: bool = False) -> None:
        """Moves the bar, with words beside it, ten times a second at most unless it is to be at once."""
        if not self.disable and (at_once or time.monotonic() - self._drawn > REDRAW_SECONDS):
            self.update(self._task, description=printable(what), completed=done, total=rounds, words=words)
            self.start()
            self.refresh()
            self._drawn = time.monotonic()


class Terminal:
    """A bar with loss and scores on an interactive console; elsewhere a plain line for every evaluation."""

    def __init__(self, console: Console | None = None):
        self._console = console or Screen()

    def begin(self, title: str, step: int, steps: int) -> None:
        """Takes a run up; the bar appears with its first step."""
        self._bar, self._title, self._step, self._steps = Bar(self._console, stays=True), title, step, steps
        self._words: dict[str, str] = {}

    def stepped(self, step: int, loss: float) -> None:
        """Moves the bar."""
        self._step, self._words["loss"] = step, f"loss {loss:.4g}"
        self._draw()

    def record(self, record: Mapping[str, Any]) -> None:
        """Takes the scores of a line of the log over; without a bar, prints them."""
        if record["kind"] == "test":
            accuracy = f", {record['accuracy']:.1%}" if "accuracy" in record else ""
            self._words["test"] = f"test {record['loss']:.4f}{accuracy}"
            if self._bar.disable:
                self.note("  ".join([self._title, f"{record['step']}/{self._steps}", *self._words.values()]))

    def note(self, sentence: str) -> None:
        """Prints a sentence above the bar."""
        self._print(lambda: self._console.print(sentence, soft_wrap=True))

    def end(self) -> None:
        """Leaves the last state of the bar on the screen."""
        self._draw(at_once=True)
        self._print(self._bar.stop)

    def _draw(self, at_once: bool = False) -> None:
        words = "  ".join(self._words.values())
        self._print(lambda: self._bar.show(self._title, self._step, self._steps, words, at_once))

    def _print(self, output: Callable[[], object]) -> None:
        """Lets a run go on where nobody reads any longer, or the disk under the output is full."""
        try:
            output()
        except OSError:
            self._console.quiet = True
