"""Ctrl-C that waits for the end of a step, once."""

import signal
import threading
from types import FrameType

__all__ = ["Interruption"]


class Interruption:
    """Context in which the first SIGINT or SIGTERM is only noted, and a second one acts at once.

    Outside the main thread, where Python allows no handlers, it changes nothing.

    Attributes:
        signal: number of the signal that came, or None.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._note) for number in self.SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
