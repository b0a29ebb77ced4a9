"""Commands of `blr` as processes of their own, some at once, each on the GPU that is least busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from blr.compressor.base import process_environment as environment

VISIBLE = "CUDA_VISIBLE_DEVICES"
PAUSE = 0.1  # seconds between two looks at what runs
LAST = 10.0  # seconds that killed ones are waited for: one in the kernel's hands may not end


class Running(Protocol):
    """A process that was started."""

    def poll(self) -> int | None:
        """Its exit code, None while it runs."""

    def kill(self) -> None:
        """End it."""


@dataclass(frozen=True)
class Command:
    """A line of `blr` and where its results and its talk go."""

    arguments: tuple[str, ...]
    out: Path
    log: Path


def start(command: Command, environ: dict[str, str], alive: int) -> Running:
    """Start a command, which ends when the other end of the pipe `alive` does."""
    with _own(command.out, os.O_TRUNC) as out, _own(command.log, os.O_APPEND) as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "blr.compressor", *command.arguments],
            env={**os.environ, **environ, environment.PARENT: str(alive)},
            pass_fds=(alive,),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=log,
        )


def _own(path: Path, how: int) -> BinaryIO:
    """A file of ours, opened to be written: no link is followed and no FIFO waited for."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | how
    return os.fdopen(os.open(path, flags, 0o666), "wb")


@contextmanager
def lifeline() -> Iterator[int]:
    """A descriptor that is at its end when this process is."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(writer)
        os.close(reader)


def slots(device: str, jobs: int) -> list[dict[str, str]]:
    """What the environment of each of the processes at once has of its own: `jobs` on every GPU."""
    if device not in ("auto", "cuda"):
        return [{} for _ in range(jobs)]
    import torch

    given = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    names = given or [str(n) for n in range(torch.cuda.device_count())]
    return [{VISIBLE: name} for _ in range(jobs) for name in names] or [{} for _ in range(jobs)]


class Pool:
    """Runs chains of commands, one chain a slot at a time.

    Args:
        places: of `slots`.
    """

    def __init__(self, places: Sequence[dict[str, str]]) -> None:
        self.places = list(places)

    def run(self, chains: Sequence[Chain]) -> None:
        """All chains to their ends, in their order as slots become free."""
        waiting, running = list(chains), list[tuple[Chain, Running, dict[str, str]]]()
        with ExitStack() as stack:
            alive = stack.enter_context(lifeline())
            stack.callback(_end, running)
            while waiting or running:
                while waiting and self.places:
                    self._next(waiting.pop(0), self.places.pop(0), running, alive)
                time.sleep(PAUSE)
                for entry in [e for e in running if e[1].poll() is not None]:
                    running.remove(entry)
                    chain, process, place = entry
                    chain.ended(process.poll() or 0)
                    self._next(chain, place, running, alive)

    def _next(
        self,
        chain: Chain,
        place: dict[str, str],
        running: list[tuple[Chain, Running, dict[str, str]]],
        alive: int,
    ) -> None:
        command = chain.command()
        if command is None:
            self.places.append(place)
        else:
            running.append((chain, start(command, place, alive), place))


def _end(running: list[tuple[Chain, Running, dict[str, str]]]) -> None:
    """What still runs when the pool is left, as an error has stopped it: none of it writes any more."""
    for chain, process, _ in running:
        process.kill()
        chain.stopped()
    until = time.monotonic() + LAST
    while any(process.poll() is None for _, process, _ in running) and time.monotonic() < until:
        time.sleep(PAUSE)


class Chain(Protocol):
    """Commands that follow each other."""

    def command(self) -> Command | None:
        """The next one, None if there is none."""

    def ended(self, code: int) -> None:
        """What to do with the exit code of the last one."""

    def stopped(self) -> None:
        """What to do where it was killed before its end."""
