"""What a process does that `--gpus` of another has started, from its first moment."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

from blr.compressor.base import process_environment as environment


def follow() -> None:
    """In a process that another has started so: signals of the terminal are the other's to answer, and
    its end is this one's."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = int(os.environ[environment.PARENT])
    threading.Thread(target=_end_with, args=(descriptor,), daemon=True).start()


def _end_with(descriptor: int) -> None:
    with suppress(OSError):
        os.read(descriptor, 1)
    os._exit(128 + signal.SIGTERM)
