"""Holds a stopping signal back for a moment, until work in progress is saved."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_holding = False  # whether work is in progress that will be saved
_number = 0  # of the signal that waits
_leave: Callable[[], object] | None = None  # what ends the process then


def hold(number: int, leave: Callable[[], object]) -> bool:
    """Whether the signal `number` waits until work is saved; `leave` is called then. Only one waits: a
    second one stops at once."""
    global _number, _leave
    with _lock:
        if not _holding or _number:
            return False
        _number, _leave = number, leave
        return True


def waiting() -> int:
    """The number of the signal that waits; 0 for none."""
    return _number


def leave(number: int) -> None:
    """End the process for the signal `number`, which this process or another has received."""
    if _leave is not None:
        _leave()
    os._exit(128 + number)


@contextmanager
def holding(held: bool = True) -> Iterator[None]:
    """Meanwhile signals wait (or not, if not `held`); one that came in time is followed in the end."""
    global _holding
    with _lock:
        before, _holding = _holding, held
    try:
        yield
    finally:
        with _lock:
            _holding = before
    if _number and not before:
        leave(_number)
