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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from blr.compressor.checkpoint.workspace import HELD_LOCKS, sibling
from blr.compressor.cli.failure import report_now

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
POLL = 0.25  # seconds within which the watching thread notices that it is not needed any more


@dataclass
class Running:
    """What the message of a stop tells: the folder being produced, once it is known, and whether the
    same command goes on where it stopped (or starts over)."""

    output: Path | None = None
    resumes: bool = True
    done: bool = False


@contextmanager
def stop_on_signals() -> Iterator[Running]:
    """While active, a stopping signal ends the process with 128 + its number.

    Set `output` of what is yielded: the message tells how to resume it.
    """
    running = Running()
    if threading.current_thread() is not threading.main_thread():
        yield running
        return
    # an ignored signal would be discarded even while blocked
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    threading.Thread(target=_watch, args=(running,), daemon=True).start()
    try:
        yield running
    finally:
        running.done = True
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _watch(running: Running) -> None:
    while not running.done:
        if taken := signal.sigtimedwait(SIGNALS, POLL):
            _stop(taken.si_signo, running)


def _stop(number: int, running: Running) -> None:
    """End the process at once, whatever else happens."""
    try:
        for lock in tuple(HELD_LOCKS):
            with suppress(OSError):
                lock.unlink()
        message = f"stopped by {signal.Signals(number).name}; {_state(running)}"
        again = "resume with" if running.resumes else "start again with"
        report_now(f"{message}; {again}: {resume_command(sys.argv)}", 128 + number)
    finally:
        os._exit(128 + number)


def _state(running: Running) -> str:
    output = running.output
    partial = sibling(Path(os.path.abspath(output)), "partial") if output else None
    if partial is None or not partial.exists():
        return "nothing was written"
    if not running.resumes:
        return f"there is no output yet, the next run replaces {partial}"
    return f"finished layers are kept in {partial}"


def resume_command(arguments: list[str]) -> str:
    """The command line to type again; without --restart, which would discard what is kept."""
    return shlex.join(["blr", *(a for a in arguments[1:] if a != "--restart")])
