"""Ctrl-C that waits for the end of a step, once."""

import signal
import threading
from types import FrameType

__all__ = ["Interruption"]


class Interruption:
    """Context in which the first SIGINT, SIGTERM or SIGHUP is only noted, and a second one acts at once.

    One that the process ignores, as under nohup, stays ignored. Outside the main thread, where Python allows no
    handlers, it changes nothing.

    Attributes:
        signal: number of the signal that came, or None.
    """

    SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            heeded = [number for number in self.SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
