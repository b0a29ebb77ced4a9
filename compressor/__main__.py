"""The `blr` command, also as ``python -m blr.compressor``: its first moments.

Until a command has something to keep, a stopping signal ends it at once with the code that it has
later, too. Nothing heavy is imported before that holds: a KeyboardInterrupt within the imports
would be a traceback, or be taken for a missing package.
"""

from __future__ import annotations

import _signal  # what `signal` wraps in enumerations, whose import takes longer than all before it
import os
import sys

TYPE_CHECKING = False  # not from typing, as in `__init__.py`
if TYPE_CHECKING:
    from types import FrameType
    from typing import NoReturn

SIGNALS = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)
TALK = "TRANSFORMERS_VERBOSITY"
NO_DOCSTRINGS = (  # of CapabilityError, as every error of the commands
    "Python leaves docstrings out (-OO, PYTHONOPTIMIZE=2): expected them, which blr and transformers "
    "read as they are imported; take -O or PYTHONOPTIMIZE=1 at most"
)


def main() -> None:
    """Run the command line; never returns."""
    for number in SIGNALS:
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, _leave)
    if sys.flags.optimize > 1:
        _end(f"error: {NO_DOCSTRINGS}", 9)
    os.environ.setdefault(TALK, "error")  # what transformers has to say of a model is ours to say
    from blr.compressor.base import process_environment as environment

    if environment.is_started_by_us():
        from blr.compressor.base.process_environment import follow

        follow()
    from blr.compressor.cli import main as command

    command()


def _leave(number: int, frame: FrameType | None) -> None:
    """Say so and end the process, from whichever import or call the signal has interrupted."""
    import signal

    _end(f"stopped by {signal.Signals(number).name}", 128 + number)


def _end(message: str, code: int) -> NoReturn:
    """End the process with one line."""
    from itertools import pairwise

    arguments, told = sys.argv[1:], message.removeprefix("error: ")
    if os.environ.get("RANK", "0") != "0":  # the first process says so
        os._exit(code)
    try:
        if "--format=json" in arguments or ("--format", "json") in pairwise(arguments):
            os.write(1, f'{{"error": "{told}", "exit_code": {code}}}\n'.encode())
        os.write(2, f"blr: {message}\n".encode())
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
