"""The view of a run: a bar on a terminal, a line for each evaluation elsewhere, and the curves of TensorBoard."""

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from stiefelkit.errors import OptionError, printable
from stiefelkit.files import refuse_links, remove, writable

REDRAW_SECONDS = 0.1
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
    """Progress on a terminal, drawn when told of it and in no thread of its own, whose time would count."""

    def __init__(self, console: Console, stays: bool = False):
        texts = [TextColumn(f"{{task.{field}}}", markup=False) for field in ("description", "fields[words]")]
        columns = texts[0], BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn(compact=True), texts[1]
        self._progress = Progress(*columns, console=console, auto_refresh=False, transient=not stays, expand=True)
        self._task, self._drawn = self._progress.add_task("", words=""), 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.hide()

    def show(self, what: str, done: int, rounds: int, words: str = "", at_once: bool = False) -> None:
        """Moves the bar, with words beside it, ten times a second at most unless it is to be at once."""
        if self._progress.console.is_terminal and (at_once or time.monotonic() - self._drawn > REDRAW_SECONDS):
            self._progress.update(self._task, description=printable(what), completed=done, total=rounds, words=words)
            self._progress.start()
            self._progress.refresh()
            self._drawn = time.monotonic()

    def hide(self) -> None:
        """Ends the bar, so that something can be printed."""
        if self._progress.live.is_started:
            self._progress.stop()


class Terminal(Silent):
    """A bar with loss and scores on an interactive console; elsewhere a plain line for every evaluation."""

    def __init__(self, console: Console | None = None):
        self._console = console or Screen()
        self._bar, self._title, self._step, self._steps = Bar(self._console, stays=True), "", 0, 0
        self._words: dict[str, str] = {}

    def begin(self, title: str, step: int, steps: int) -> None:
        """Draws the empty bar."""
        self._bar, self._title, self._step, self._steps = Bar(self._console, stays=True), title, step, steps
        self._words = {}
        self._draw(at_once=True)

    def stepped(self, step: int, loss: float) -> None:
        """Moves the bar."""
        self._step, self._words["loss"] = step, f"loss {loss:.4g}"
        self._draw()

    def record(self, record: Record) -> None:
        """Takes the scores over; without a bar, prints them."""
        if record["kind"] == "test":
            accuracy = f", {record['accuracy']:.1%}" if "accuracy" in record else ""
            self._words["test"] = f"test {record['loss']:.4f}{accuracy}"
            if not self._console.is_terminal:
                self.note("  ".join([self._title, f"{record['step']}/{self._steps}", *self._words.values()]))

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
            self._bar.show(self._title, self._step, self._steps, "  ".join(self._words.values()), at_once)

    @contextlib.contextmanager
    def _going_on(self) -> Iterator[None]:
        """Lets a run go on where nobody reads any longer, or the disk under the output is full."""
        try:
            yield
        except OSError:
            self._console.quiet = True


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

        folder = run / "tensorboard"
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
