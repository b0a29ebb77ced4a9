"""Runs `blr` command lines in forks of the warm process and kills or stops them at chosen points.

Nothing in `blr` knows about it: the fork replaces the functions of `os` that change
the disk (and the layer boundaries) by ones that count, and die by SIGKILL when their turn comes.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from warm import Warm, redirect

BOUNDARIES = ("fsync", "rename", "unlink", "rmdir")  # a mkdir shows at the next of these
NOBODY = 65534
PAUSE = 600.0  # seconds a job hangs where a signal must end it


@dataclass(frozen=True)
class Fate:
    """What happens to a job besides its command line.

    Attributes:
        die_at: SIGKILL itself in place of the boundary of this number (from 0); an fsync of a
            file loses half of its bytes first, as a power failure would.
        after: killed from outside after so many seconds.
        stop_at, stop: signal number `stop` is sent 0.2 s after the boundary `stop_at`, which
            does not return unless it is the start of a factorization.
        suspended: in place of `stop`, SIGSTOP, and SIGCONT after so many seconds.
        file_limit: no file may grow beyond so many bytes (RLIMIT_FSIZE).
        blind: the check for free space sees none missing, as if the disk filled up later.
        umask, nobody: of the process; `nobody` runs without the rights of root.
        ignored: a signal that the process is started with no ear for.
        stdout, stderr: "closed", "full" (a device without room) or "left" (a pipe that its reader
            left), in place of what `Outcome` holds.
    """

    die_at: int | None = None
    after: float | None = None
    stop_at: int | None = None
    stop: int = 0
    suspended: float | None = None
    file_limit: int | None = None
    blind: bool = False
    umask: int | None = None
    ignored: int | None = None
    nobody: bool = False
    stdout: str | None = None
    stderr: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How a job ended: `code` is negative for a signal; `events` are the boundaries it reached;
    `seconds` is how long it took."""

    code: int
    events: list[str]
    stdout: str
    stderr: str
    seconds: float

    @property
    def fits(self) -> int:
        """Layers whose factorization began."""
        return self.events.count("fit")


class Killer:
    """Commands with a fate, in forks of `warm`."""

    def __init__(self, warm: Warm) -> None:
        self.warm = warm

    def run(self, *arguments: object, cwd: Path, **fate: Any) -> Outcome:
        """Run ``blr *arguments`` in `cwd`; `fate` as in `Fate`."""
        job = {"argv": [*map(str, arguments)], "cwd": str(cwd), "fate": vars(Fate(**fate))}
        return Outcome(**self.warm.ask("killer", **job))


def answer(job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """On the side of the warm process: run the command of a job in a fork; what `Outcome` holds."""
    return _answer(job["argv"], job["cwd"], Fate(**job["fate"]), scratch)


def _answer(argv: list[str], cwd: str, fate: Fate, scratch: Path) -> dict[str, Any]:
    for name in ("events", "out", "err"):
        (scratch / name).touch()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            _child(argv, cwd, fate, scratch)
        finally:
            os._exit(99)
    if fate.stop_at is not None:
        _stop(child, fate, scratch / "events")
    status = _wait(child, fate.after)
    events, out, err = ((scratch / name).read_text() for name in ("events", "out", "err"))
    return {
        **{"code": os.waitstatus_to_exitcode(status), "events": events.split()},
        **{"stdout": out, "stderr": err, "seconds": time.monotonic() - started},
    }


def _stop(child: int, fate: Fate, events: Path) -> None:
    """Send the signal once the job is at its boundary, or has ended before."""
    ended = os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT
    while len(events.read_text().split()) <= fate.stop_at and os.waitid(*ended) is None:
        time.sleep(0.005)
    time.sleep(0.2)
    os.kill(child, fate.stop if fate.suspended is None else signal.SIGSTOP)
    if fate.suspended is not None:
        time.sleep(fate.suspended)
        os.kill(child, signal.SIGCONT)


def _wait(child: int, after: float | None) -> int:
    """The status of `child` at its end, brought about after so many seconds if it takes longer."""
    deadline = time.monotonic() + (after or 0)
    while after is not None and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.001)
    if after is not None:
        os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _child(argv: list[str], cwd: str, fate: Fate, scratch: Path) -> None:
    """Become the command; never returns."""
    from blr.compressor.cli import main

    redirect(scratch)
    _instrument(os.open(scratch / "events", os.O_WRONLY | os.O_APPEND), fate)
    os.chdir(cwd)
    _limit(fate)
    sys.argv = ["blr", *argv]
    for descriptor, kind in ((1, fate.stdout), (2, fate.stderr)):
        _spoil(descriptor, kind)  # last: the next file to be opened gets the number of a closed one
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _spoil(descriptor: int, kind: str | None) -> None:
    """Make of a standard stream one that takes nothing, and let Python find it as when it starts."""
    if kind is None:
        return
    if kind == "closed":
        os.close(descriptor)
    elif kind == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
    else:
        reader, writer = os.pipe()
        os.dup2(writer, descriptor)
        os.close(reader)
        os.close(writer)
    stream = None if kind == "closed" else open(descriptor, "w", closefd=False)  # noqa: SIM115
    for name in {1: ("stdout", "__stdout__"), 2: ("stderr", "__stderr__")}[descriptor]:
        setattr(sys, name, stream)


def _limit(fate: Fate) -> None:
    if fate.file_limit is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (fate.file_limit, fate.file_limit))
    if fate.blind:
        shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10**15, 0, 10**15)
    if fate.umask is not None:
        os.umask(fate.umask)
    if fate.ignored is not None:
        signal.signal(fate.ignored, signal.SIG_IGN)
    if fate.nobody:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _instrument(log: int, fate: Fate) -> None:
    """Count every boundary in `log`, and do at each what `fate` says."""
    from blr.compressor.fitting import factorize
    from blr.compressor.workspace.journal import Journal

    count = 0

    def reach(event: str, *arguments: Any) -> None:
        nonlocal count
        if count == fate.die_at:
            if event == "fsync":
                _lose_half(arguments[0])
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(log, f"{event}\n".encode())
        count += 1
        if count - 1 == fate.stop_at and event != "fit" and fate.suspended is None:
            time.sleep(PAUSE)

    def wrapped(event: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def boundary(*arguments: Any, **options: Any) -> Any:
            reach(event, *arguments)
            return call(*arguments, **options)

        return boundary

    for name in BOUNDARIES:
        setattr(os, name, wrapped(name, getattr(os, name)))
    factorize.factorize = wrapped("fit", factorize.factorize)
    Journal.store = wrapped("store", Journal.store)


def _lose_half(descriptor: int) -> None:
    """What was not flushed may be lost: cut the file behind `descriptor`, unless it is a folder."""
    size = os.fstat(descriptor).st_size
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    if os.path.isfile(path):
        os.truncate(path, size // 2)
