"""The log of a run as curves of TensorBoard."""

from pathlib import Path

from stiefelkit.errors import OptionError
from stiefelkit.files import refuse_links, remove, writable
from stiefelkit.training.display import Record, Silent, Terminal
from stiefelkit.training.run_folder import LOG, read_log, worst_ratio


class Curves(Silent):
    """Writes each line of the log of a run as scalars, one curve for a number and a kind of line, beside a display."""

    def __init__(self, run: Path, display: Silent):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise OptionError(
                '--tensorboard needs tensorboard, got an installation without; pip install "stiefelkit[tensorboard]".'
            ) from error
        self._run, self._display, self._open = run, display, SummaryWriter
        self.stepped, self.note = display.stepped, display.note

    def begin(self, title: str, step: int, steps: int) -> None:
        """Begins the curves anew, with what the log has."""
        folder = self._run / "tensorboard"
        with writable("A run with curves", folder):
            refuse_links(folder, self._run)
            remove(folder, self._run)
            self._writer = self._open(str(folder))
        for record in read_log(self._run / LOG) if step else ():
            self._write(record)
        self._display.begin(title, step, steps)

    def record(self, record: Record) -> None:
        """Adds a point to each curve that a line of the log has something for."""
        self._write(record)
        self._display.record(record)

    def end(self) -> None:
        """Closes the file."""
        self._display.end()
        self._writer.close()

    def _write(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])


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


def shown(run: Path, tensorboard: bool) -> Silent:
    """Returns the display of a command that trains into a folder."""
    return Curves(run, Terminal()) if tensorboard else Terminal()
