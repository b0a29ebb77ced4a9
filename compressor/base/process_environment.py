"""What the environment says of the processes of a run, as torchrun, `accelerate launch` and `--gpus` set
it. Nothing here imports torch."""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subprocess import Popen

MEETING = "BLR_MEETING"  # the file where the processes that --gpus started find each other
PARENT = "BLR_PARENT"  # in those, a descriptor that is at its end when the first process is


def count() -> int:
    """Of processes."""
    return _number("WORLD_SIZE", 1)


def rank() -> int:
    """This process's number; 0 where it is alone, whatever a launcher left behind."""
    return _number("RANK", 0) if count() > 1 else 0


def local_rank() -> int:
    """This process's number among those of its host."""
    return _number("LOCAL_RANK", rank())


def local_count() -> int:
    """Of processes on this host."""
    return _number("LOCAL_WORLD_SIZE", count())


def is_first() -> bool:
    """Whether this one talks and writes."""
    return rank() == 0


def is_started_by_us() -> bool:
    """Whether `--gpus` of another process started this one."""
    return PARENT in os.environ


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else default


def start(arguments: Sequence[str], alive: int, own: Mapping[str, str], **streams: Any) -> "Popen[Any]":
    """Start a command of `blr` with `own` variables, which ends when the other end of `alive` does."""
    import subprocess  # as slow

    return subprocess.Popen(
        [sys.executable, "-P", "-m", "blr.compressor", *arguments],
        env={**os.environ, **own, PARENT: str(alive)},
        pass_fds=(alive,),
        stdin=subprocess.DEVNULL,
        **streams,
    )


def follow() -> None:
    """Follow the process that started this one: ignore the terminal's signals, and end when it does."""
    import signal  # whose import takes long: `__main__` comes by here first
    import threading

    def end_with() -> None:
        with suppress(OSError):
            os.read(descriptor, 1)
        os._exit(128 + signal.SIGTERM)

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    descriptor = int(os.environ[PARENT])
    threading.Thread(target=end_with, daemon=True).start()


def share_out(costs: Sequence[float], count: int) -> list[int]:
    """The process that does each item: the costliest first, each to the least busy (Graham 1969)."""
    owners, loads = [0] * len(costs), [0.0] * count
    for item in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        owner = min(range(count), key=lambda process: (loads[process], process))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners
