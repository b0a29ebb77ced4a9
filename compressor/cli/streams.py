"""Standard output and error of a command, which may be closed, full, or a pipe that nobody reads, and
the one line that says how a command failed.

Results that cannot be written are never lost in silence; talk that nobody hears stops nothing.
"""

import errno
import json
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import TextIO

from blr.compressor.base.errors import StorageError
from blr.compressor.base.quoting import printable

KEPT = 1 << 20  # characters of results that are repeated on standard error at most


class ReaderGone(Exception):
    """Whoever read standard output has left, as `head` does: no error, but nothing more to do."""


class Results:
    """Standard output. What it does not take is written to standard error; from then on it fails."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self._unread = stream, ""
        self.failure: Exception | None = None  # from which on it takes nothing

    def write(self, text: str) -> int:
        """Write as a stream does. Raises ReaderGone, or StorageError when it fails otherwise."""
        if not text:
            return self.stream.write(text) if isinstance(text, bytes) else 0
        self._unread = (self._unread + text)[-KEPT:]
        self._do(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        """Flush as a stream does. Raises as `write`."""
        self._do(self.stream.flush)

    def _do(self, act: Callable[[], object]) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            act()
        except OSError as error:
            silence_results()
            self.failure = ReaderGone()
            if error.errno != errno.EPIPE:
                sys.stderr.write(self._unread.rstrip("\n") + "\n")
                self.failure = StorageError(
                    f"standard output: {os.strerror(error.errno or 0).lower()}; the results are on "
                    "standard error, above: give standard output a file with room or a pipe that is read"
                )
            raise self.failure from error

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)


class Talk:
    """Standard error, which may fail: what is said there is worth no failure."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write as a stream does, or nothing."""
        with suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush as a stream does, or not."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def prepare() -> None:
    """Guard the standard streams of this process. Raises StorageError for a closed standard output."""
    closed = [number for number in range(3) if not _is_open(number)]
    for _ in closed:
        os.open(os.devnull, os.O_RDWR)  # the lowest number: no file of ours may get one of these
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if 1 in closed:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise StorageError("standard output: closed, results would be lost; give it a file or a pipe")
    if sys.__stderr__ is not None and sys.stderr is sys.__stderr__:
        sys.stderr = Talk(sys.stderr)
    if sys.__stdout__ is not None and sys.stdout is sys.__stdout__:
        sys.stdout = Results(sys.stdout)


def let_go() -> None:
    """Drop a standard output that failed, so that the interpreter's last flush succeeds."""
    if isinstance(sys.stdout, Results) and sys.stdout.failure:
        sys.stdout = sys.stdout.stream


def silence_results() -> None:
    """Send standard output nowhere."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


LONGEST = 2000  # characters of a message


def report(message: str, code: int) -> None:
    """Print `message` as one line of printable text; with --format json also as an object."""
    line = one_line(message)
    print(f"blr: error: {line}", file=sys.stderr, flush=True)
    if wants_json(sys.argv):
        print(json.dumps({"error": line, "exit_code": code}), flush=True)


def report_now(text: str, code: int) -> None:
    """`report` for a process about to end: never waits for a reader, never fails."""
    if wants_json(sys.argv):
        _write(1, json.dumps({"error": one_line(text), "exit_code": code}))
    say_now(text)


def say_now(text: str) -> None:
    """Print one line on standard error; never waits for a reader, never fails."""
    _write(2, f"blr: {one_line(text)}")


def one_line(text: str) -> str:
    """`text` without line ends, control characters and others that a terminal might obey."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]}...{line[-LONGEST // 2 :]}"


def wants_json(arguments: list[str]) -> bool:
    """Whether a command line asks for JSON."""
    return "--format=json" in arguments or ("--format", "json") in pairwise(arguments)


def _write(descriptor: int, line: str) -> None:
    with suppress(OSError, ValueError):  # closed, or a terminal that is gone
        if select.select([], [descriptor], [], 1.0)[1]:
            os.write(descriptor, line.encode("utf-8", "backslashreplace") + b"\n")
