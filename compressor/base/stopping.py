"""Holds a stopping signal back for a moment, until work in progress is saved."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

BURST = 1.0  # seconds in which further signals are the same one: a launcher passes it on to us
_lock = threading.Lock()
_holding = False  # whether work is in progress that will be saved
_waiting: tuple[int, Callable[[], object], float] | None = None  # a signal, how to follow it, its time


def hold(number: int, follow: Callable[[], object]) -> bool:
    """Whether the signal `number`, unlike a later one, waits until work is saved and `follow` called."""
    global _waiting
    with _lock:
        if _holding and _waiting is None:
            _waiting = number, follow, monotonic()
        return _holding and _waiting is not None and monotonic() - _waiting[2] < BURST


def waiting() -> int:
    """The number of the signal that waits; 0 for none."""
    return _waiting[0] if _waiting else 0


def leave(number: int) -> None:
    """End the process for the signal `number`, which this process or another has received."""
    if _waiting:
        _waiting[1]()
    os._exit(128 + number)


@contextmanager
def holding(held: bool = True) -> Iterator[None]:
    """Meanwhile signals wait, or not if not `held`; one that waits is followed in the end."""
    global _holding
    before = _holding
    with _lock:
        _holding = held
    try:
        yield
    finally:
        with _lock:
            _holding = before
    if _waiting and not before:
        leave(_waiting[0])
