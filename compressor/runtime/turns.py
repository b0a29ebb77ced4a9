"""One thread at a time, where caches and buffers are one's own."""

from __future__ import annotations

import threading
from typing import Any

from blr.compressor.runtime.failures import BusyError


class Turn:
    """A lock that a thread holds as a context; others wait. Copies and pickles have their own.

    Raises BusyError where a thread enters it again, which would wait for itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        me = threading.get_ident()
        if self._holder == me:
            raise BusyError(
                "asked for another sequence while a token of one is handed on: expected one at a time; "
                "generate it before or after"
            )
        self._lock.acquire()
        self._holder = me

    def __exit__(self, *error: object) -> None:
        self._holder = None
        self._lock.release()

    def __reduce__(self) -> Any:
        return Turn, ()
