"""What a person sees while a model trains: a live bar on a terminal, a line now and then elsewhere."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from stiefelkit.errors import printable

__all__ = ["Screen", "Silent", "Terminal", "say", "worst_ratio"]

REDRAWN = 0.1
"""Seconds between two drawings of the bar, at least."""


def worst_ratio(orthogonality: Mapping[str, Mapping[str, float]]) -> float | None:
    """Returns the largest error over limit of a record's weights, or None without such weights."""
    return max((weight["error"] / weight["limit"] for weight in orthogonality.values()), default=None)


class Screen(Console):
    """A console that shows text as it is: no markup, no emoji, control characters as escapes."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Returns what a string looks like, in a table too."""
        return super().render_str(printable(text), **options)


def say(sentence: str) -> None:
    """Prints a sentence, which may hold names and paths of others, as one line of any length."""
    print(printable(sentence))


class Silent:
    """Shows nothing; also what a display must be able to do."""

    def begin(self, title: str, step: int, steps: int) -> None:
        """A run begins, or resumes at `step`."""

    def stepped(self, step: int, loss: float) -> None:
        """One optimizer step is done; `loss` is the mean since the last record."""

    def record(self, record: Mapping[str, Any]) -> None:
        """A line was written to the log."""

    def note(self, sentence: str) -> None:
        """Something that the user should know."""

    def end(self) -> None:
        """The run stopped, finished or not."""


class Terminal(Silent):
    """A bar with the figures under it on an interactive console; elsewhere a plain line for every evaluation.

    It draws between the steps and in no thread of its own, so that the time of a step is the step's.

    Args:
        console: where to; standard output if left out.
    """

    def __init__(self, console: Console | None = None):
        self._console = console or Screen()
        self._live: Live | None = None
        self._title, self._steps, self._step, self._since, self._drawn = "", 0, 0, (0, 0.0), 0.0
        self._last: dict[str, Any] = {}

    def begin(self, title: str, step: int, steps: int) -> None:
        """Draws the empty bar."""
        self._title, self._steps, self._step, self._last = title, steps, step, {}
        self._since = (step, time.monotonic())
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}", "bold", markup=False), BarColumn(None), MofNCompleteColumn())
            self._bar = Progress(*columns, TimeRemainingColumn(compact=True), console=self._console, expand=True)
            self._task = self._bar.add_task(printable(title), total=steps, completed=step)
            self._live = Live(self._bar, console=self._console, auto_refresh=False)
            self._live.start()

    def stepped(self, step: int, loss: float) -> None:
        """Moves the bar, ten times a second at most."""
        self._step = step
        self._last["loss"] = loss
        if self._live and time.monotonic() - self._drawn > REDRAWN:
            self._draw()

    def record(self, record: Mapping[str, Any]) -> None:
        """Takes the figures over; without a bar, prints them at an evaluation."""
        if record["kind"] == "train":
            self._last |= {"accuracy": record.get("accuracy"), "ratio": worst_ratio(record["orthogonality"])}
            return
        if record["kind"] != "test":
            return
        self._last |= {"test_loss": record["loss"], "test_accuracy": record.get("accuracy")}
        if not self._live:
            self.note("  ".join([self._title, f"{record['step']}/{self._steps}", *self._words()]))

    def note(self, sentence: str) -> None:
        """Prints a sentence above the bar."""
        with self._going_on():
            self._console.print(sentence, soft_wrap=True)

    def end(self) -> None:
        """Leaves the last state of the bar on the screen."""
        live = self._live
        if live:
            self._draw()
            self._live = None
            with self._going_on():
                live.stop()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        self._bar.update(self._task, completed=self._step)
        if self._live:
            with self._going_on():
                self._live.update(Group(self._bar, Text("  ".join(self._words()))), refresh=True)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Has a run go on where whoever read is gone, or the disk under the output is full."""
        try:
            yield
        except OSError:
            self._console.quiet = True

    def _words(self) -> Iterator[str]:
        last = self._last
        if "loss" in last:
            yield f"loss {last['loss']:.4f}" if last["loss"] < 1e4 else f"loss {last['loss']:.3g}"
        if last.get("accuracy") is not None:
            yield f"accuracy {last['accuracy']:.1%}"
        if last.get("test_loss") is not None:
            yield f"test loss {last['test_loss']:.4f}"
        if last.get("test_accuracy") is not None:
            yield f"test {last['test_accuracy']:.1%}"
        start, clock = self._since
        yield f"{(self._step - start) / max(time.monotonic() - clock, 1e-9):.0f} steps/s"
        if last.get("ratio") is not None:
            yield f"orthogonality {last['ratio']:.2f} x limit"
