"""The view of a run: a bar on a terminal, a line now and then elsewhere, and the curves of TensorBoard."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from stiefelkit.errors import OptionError, printable
from stiefelkit.training.files import refuse_links, remove, writable

FOLDER = "tensorboard"
REDRAW_SECONDS = 0.1
FIGURES = {
    "loss": "loss {:.4g}",
    "accuracy": "accuracy {:.1%}",
    "test_loss": "test loss {:.4f}",
    "test_accuracy": "test {:.1%}",
    "speed": "{:.0f} steps/s",
    "ratio": "orthogonality {:.2f} x limit",
}
"""Figures under the bar, in words."""
Record = Mapping[str, Any]
"""A line of the log."""


def worst_ratio(record: Record) -> float | None:
    """Returns the largest error over limit of a record's weights, or None without such weights."""
    weights = record.get("orthogonality", {}).values()
    return max((weight["error"] / weight["limit"] for weight in weights), default=None)


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
        """Shows that a run begins, or resumes at `step`."""

    def stepped(self, step: int, loss: float) -> None:
        """Shows that one optimizer step is done; `loss` is the mean since the last record."""

    def record(self, record: Record) -> None:
        """Shows a line that was written to the log."""

    def note(self, sentence: str) -> None:
        """Says something that the user should know."""

    def end(self) -> None:
        """Shows that the run stopped, finished or not."""


class Bar:
    """Progress on a terminal, drawn when told of it and in no thread of its own, whose time would count.

    Args:
        console: where to; nothing is drawn where it is no terminal.
        stays: whether its last state is left on the screen, and the time that remains is shown.
    """

    def __init__(self, console: Console, stays: bool = False):
        self._console, self._stays, self._drawn = console, stays, 0.0
        self._progress: _Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hide()

    def show(self, what: str, done: int, rounds: int, words: Iterable[str] = (), at_once: bool = False) -> None:
        """Moves the bar, with words under it, ten times a second at most unless it is to be at once."""
        if not self._console.is_terminal or (not at_once and time.monotonic() - self._drawn < REDRAW_SECONDS):
            return
        if self._progress is None:
            columns = TextColumn("{task.description}", markup=False), BarColumn(None), MofNCompleteColumn()
            columns += (TimeRemainingColumn(compact=True),) if self._stays else ()
            self._progress = _Progress(
                *columns, console=self._console, auto_refresh=False, transient=not self._stays, expand=self._stays
            )
            self._progress.add_task("")
            self._progress.start()
        self._progress.words = "  ".join(words)
        self._progress.update(TaskID(0), description=printable(what), completed=done, total=rounds, refresh=True)
        self._drawn = time.monotonic()

    def hide(self) -> None:
        """Ends the bar, so that something can be printed."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class _Progress(Progress):
    """A bar with words under it."""

    words = ""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.words:
            yield Text(self.words)


class Terminal(Silent):
    """A bar with the figures under it on an interactive console; elsewhere a plain line for every evaluation."""

    def __init__(self, console: Console | None = None):
        self._console = console or Screen()
        self._bar = Bar(self._console, stays=True)
        self._title, self._steps, self._step, self._since = "", 0, 0, (0, 0.0)
        self._last: dict[str, float | None] = {}

    def begin(self, title: str, step: int, steps: int) -> None:
        """Draws the empty bar."""
        self._title, self._steps, self._step, self._last = title, steps, step, {}
        self._since = (step, time.monotonic())
        self._draw(at_once=True)

    def stepped(self, step: int, loss: float) -> None:
        """Moves the bar."""
        self._step, self._last["loss"] = step, loss
        self._draw()

    def record(self, record: Record) -> None:
        """Takes the figures over; without a bar, prints them at an evaluation."""
        if record["kind"] == "train":
            self._last |= {"accuracy": record.get("accuracy"), "ratio": worst_ratio(record)}
        elif record["kind"] == "test":
            self._last |= {"test_loss": record["loss"], "test_accuracy": record.get("accuracy")}
            if not self._console.is_terminal:
                self.note("  ".join([self._title, f"{record['step']}/{self._steps}", *self._words()]))

    def note(self, sentence: str) -> None:
        """Prints a sentence above the bar."""
        with self._going_on():
            self._console.print(sentence, soft_wrap=True)

    def end(self) -> None:
        """Leaves the last state of the bar on the screen."""
        self._draw(at_once=True)
        with self._going_on():
            self._bar.hide()

    def _draw(self, at_once: bool = False) -> None:
        with self._going_on():
            self._bar.show(self._title, self._step, self._steps, self._words(), at_once)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Lets a run go on where nobody reads any longer, or the disk under the output is full."""
        try:
            yield
        except OSError:
            self._console.quiet = True

    def _words(self) -> Iterator[str]:
        start, clock = self._since
        known = self._last | {"speed": (self._step - start) / max(time.monotonic() - clock, 1e-9)}
        for name, form in FIGURES.items():
            if known.get(name) is not None:
                yield form.format(known[name])


def require_tensorboard() -> None:
    """Raises OptionError if TensorBoard is not installed."""
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError as error:
        raise OptionError(
            '--tensorboard needs tensorboard, got an installation without; pip install "stiefelkit[tensorboard]".'
        ) from error


class Curves:
    """Writes the lines of a log as scalars, one curve for each number by the kind of the line; `before` anew."""

    def __init__(self, run: Path, before: Iterable[Record] = ()):
        from torch.utils.tensorboard import SummaryWriter

        folder = run / FOLDER
        with writable("A run with curves", folder):
            refuse_links(folder, run)
            remove(folder, run)
        self.writer = SummaryWriter(str(folder))
        for record in before:
            self.write(record)

    def write(self, record: Record) -> None:
        """Adds a point to each curve that a line of the log has something for."""
        for name, value in scalars(record).items():
            self.writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])


def scalars(record: Record) -> dict[str, float]:
    """Returns the numbers of a line of the log by name; of the orthogonality the worst error over its limit.

    >>> weights = {"a": {"error": 2e-7, "limit": 1e-7}, "b": {"error": 0.0, "limit": 1e-7}}
    >>> scalars({"kind": "train", "step": 3, "loss": 0.5, "orthogonality": weights})
    {'loss': 0.5, 'drift_over_limit': 2.0}
    """
    numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    del numbers["step"]
    ratio = worst_ratio(record)
    return numbers if ratio is None else {**numbers, "drift_over_limit": ratio}
