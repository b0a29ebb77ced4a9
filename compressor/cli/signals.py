"""Stops a long command within a moment of SIGINT, SIGTERM or SIGHUP, in whatever it is doing.

A Python signal handler waits for the linear algebra call in progress, which can last minutes. So
the signals are blocked everywhere and a watching thread takes them: everything on disk is safe
against a kill at any moment by design, hence it prints how to resume and leaves at once. This
also covers background jobs of non-interactive shells, which start with SIGINT ignored.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blr.compressor.checkpoint.workspace import HELD_LOCKS

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stop_on_signals(output: Path) -> Iterator[None]:
    """While active, a stopping signal ends the process with 128 + its number.

    `output` is the folder being produced: the message tells how to resume it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)  # an ignored signal would be discarded
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_watch, args=(output,), daemon=True).start()
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _watch(output: Path) -> None:
    number = signal.sigwait(SIGNALS)
    partial = Path(os.path.abspath(output)).with_name(output.name + ".blr-partial")
    for lock in HELD_LOCKS:
        lock.unlink(missing_ok=True)
    command = shlex.join(["blr", *sys.argv[1:]])
    state = f"finished layers are kept in {partial}" if partial.exists() else "nothing was written"
    print(
        f"\nblr: stopped by {signal.Signals(number).name}; {state}; resume with: {command}",
        file=sys.stderr,
        flush=True,
    )
    os._exit(128 + number)
