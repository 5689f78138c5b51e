"""The curves of a run for TensorBoard, beside its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stiefelkit.errors import OptionError
from stiefelkit.training.files import refuse_links, writable

__all__ = ["Board", "Curves"]

FOLDER = "tensorboard"


@dataclass(frozen=True)
class Board:
    """Where the curves of a run can be watched.

    Args:
        tensorboard: write the log for TensorBoard too, into tensorboard/ in the folder of the run.
    """

    tensorboard: bool = False

    def check(self) -> None:
        """Raises OptionError if what is asked for is not installed."""
        if not self.tensorboard:
            return
        try:
            import torch.utils.tensorboard  # noqa: F401
        except ImportError as error:
            raise OptionError(
                '--tensorboard needs tensorboard, got an installation without; pip install "stiefelkit[tensorboard]".'
            ) from error


class Curves:
    """Writes the lines of a log as scalars: one curve for each number, by the kind of the line.

    Points behind the step that it goes on from, which will come again, are dropped; what the curves lack of the lines
    before is added.
    """

    def __init__(self, run: Path, step: int, before: Iterable[Mapping[str, Any]] = ()):
        from torch.utils.tensorboard import SummaryWriter

        folder = run / FOLDER
        with writable("A run with curves", folder):
            refuse_links(folder, run)
        last = _last_step(folder)
        self._writer = SummaryWriter(str(folder), purge_step=None if last is None else step + 1)
        for record in before:
            if last is None or record["step"] > last:
                self.write(record)

    def write(self, record: Mapping[str, Any]) -> None:
        """Adds a point to each curve that a line of the log has something for."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def flush(self) -> None:
        """Waits until all points are on the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()


def _last_step(folder: Path) -> int | None:
    """Returns the last step that the curves of a folder have a point of; None where there are no curves."""
    if not any(folder.glob("events.*")):
        return None
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 1}).Reload()  # the last point of each curve
    return max((events.Scalars(tag)[-1].step for tag in events.Tags()["scalars"]), default=0)


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of a line of the log by name; of the orthogonality the worst error over its limit.

    >>> weights = {"a": {"error": 2e-7, "limit": 1e-7}, "b": {"error": 0.0, "limit": 1e-7}}
    >>> scalars({"kind": "train", "step": 3, "loss": 0.5, "orthogonality": weights})
    {'loss': 0.5, 'drift_over_limit': 2.0}
    """
    from stiefelkit.training.display import worst_ratio

    numbers = {name: float(value) for name, value in record.items() if isinstance(value, int | float)}
    del numbers["step"]
    ratio = worst_ratio(record.get("orthogonality", {}))
    return numbers if ratio is None else {**numbers, "drift_over_limit": ratio}
