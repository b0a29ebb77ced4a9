"""How a command says that it failed: one line on standard error, JSON too if that was asked for."""

from __future__ import annotations

import json
import os
import select
import sys
from contextlib import suppress
from itertools import pairwise

from blr.compressor.base.quoting import printable

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
