"""Signals that end a benchmark early, with the results so far."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """A stopping signal arrived; `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    @property
    def name(self) -> str:
        """As "SIGINT"."""
        return signal.Signals(self.number).name


@contextmanager
def stoppable() -> Iterator[None]:
    """While active, SIGINT, SIGTERM and SIGHUP raise `Stopped` in the main thread, the first two also
    where the process was started with them ignored. The second one has its usual effect."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # else under nohup
    numbers = [number for number in SIGNALS if hangs_up or number is not signal.SIGHUP]
    before = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for each in SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    raise Stopped(number)
