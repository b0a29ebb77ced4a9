"""Stops a long command within a moment of SIGINT, SIGTERM or SIGHUP, in whatever it is doing.

A training is stopped at the end of its step, once it is saved; a second signal stops it at once.

A Python signal handler waits for the linear algebra call in progress, which can last minutes. So
the interpreter writes the number of a signal into a pipe as it arrives, and a watching thread reads
it there: everything on disk is safe against a kill at any moment by design, hence it prints how to
resume and leaves at once. This also covers background jobs of non-interactive shells, which start
with SIGINT ignored. No wait has a deadline, so that a job may be suspended and continued.
"""

import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from blr.compressor.base import process_environment as environment
from blr.compressor.base import stopping
from blr.compressor.base.disk import make_scratch, remove_scratch
from blr.compressor.base.errors import CapabilityError, LostProcess, UsageError
from blr.compressor.base.progress import Progress
from blr.compressor.cli.streams import report_now, say_now
from blr.compressor.workspace.lock import HELD_LOCKS, LOCKING
from blr.compressor.workspace.ownership import sibling

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DONE = b"\0"  # tells the watching thread that it is not needed any more
NOTHING = "nothing was written"
SETTLING = 1.0  # seconds that taking or giving up a lock may hold up a stop
ERROR = "blr: error: "
LAST_LINES = 50  # of what a process said
LEAVING = 10.0  # seconds that processes take to end, or their end to be noticed


@dataclass
class Running:
    """What the message of a stop tells: the output of `progress`, whether the command `resumes`, what is
    `kept` for that, and its `place` if not beside the output."""

    progress: Progress | None = None
    resumes: bool = True
    kept: str = "finished layers are"
    place: Path | None = None


@contextmanager
def stop_on_signals(running: Running | None = None) -> Iterator[Running]:
    """Meanwhile a stopping signal ends the process with 128 + its number and a line on how to resume. A
    SIGHUP that is ignored stays so (nohup)."""
    running = running or Running()
    inside = threading.current_thread() is not threading.main_thread()
    if inside or environment.is_started_by_us():
        yield running
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = threading.Thread(target=_watch, args=(reader, running), daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer)
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    taken = [number for number in SIGNALS if number is not signal.SIGHUP or hangs_up]
    handlers = {number: signal.signal(number, _noted) for number in taken}
    try:
        yield running
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.write(writer, DONE)
        watcher.join()
        os.close(writer)
        os.close(reader)


def _noted(number: int, frame: FrameType | None) -> None:
    """A signal whose number is in the pipe already."""


def _hold() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _go_on() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _forget() -> None:
    """In a forked helper process, let signals end it as usual."""
    if signal.getsignal(signal.SIGTERM) is _noted:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
    _go_on()


_forking = threading.local()
os.register_at_fork(before=_hold, after_in_parent=_go_on, after_in_child=_forget)


def _watch(reader: int, running: Running) -> None:
    while (taken := os.read(reader, 1)) != DONE:
        if taken[0] in SIGNALS:
            number = taken[0]
            leave, known = partial(_leave, number, running), stopping.waiting()
            if not stopping.hold(number, leave):
                leave()
            if environment.is_first() and not known:
                say_now("stopping once this step is done and saved; a second signal stops at once")


def _leave(number: int, running: Running) -> None:
    """End the process; the first one tells how to go on."""
    if not environment.is_first():
        os._exit(128 + number)
    left = state_of(running)
    again = "resume with" if running.resumes and left != NOTHING else "start again with"
    message = f"stopped by {signal.Signals(number).name}; {left}"
    leave_at_once(f"{message}; {again}: {resume_command(sys.argv)}", 128 + number)


def leave_at_once(message: str, code: int) -> None:
    """End the process from any of its threads, with one line; locks and temporary folders go with it."""
    try:
        LOCKING.acquire(timeout=SETTLING)  # never released: no lock is taken any more
        for lock in tuple(HELD_LOCKS):
            with suppress(OSError):
                lock.unlink()
        report_now(message, code)
        remove_scratch()
    finally:
        os._exit(code)


def state_of(running: Running) -> str:
    """What a run leaves that is stopped now."""
    if running.place is not None and running.place.exists():
        return f"{running.kept} kept in {running.place}"
    output = running.progress.output if running.progress else None
    partial = sibling(Path(os.path.abspath(output)), "partial") if output else None
    if partial is None or not os.path.exists(partial):
        return NOTHING
    if not running.resumes:
        return f"there is no output yet, the next run replaces {partial}"
    return f"{running.kept} kept in {partial}"


def resume_command(arguments: list[str]) -> str:
    """The command line to type again; without --restart, which would discard what is kept."""
    return shlex.join(["blr", *(a for a in arguments[1:] if a != "--restart")])


@contextmanager
def started(gpus: int | None, running: Running) -> Iterator[None]:
    """Meanwhile be the first of `gpus` processes. Raises UsageError under torchrun or accelerate."""
    ours, count = environment.is_started_by_us(), environment.count()
    if gpus is not None and not ours and count > 1:
        raise UsageError(f"--gpus {gpus} in one of {count} processes; leave it out under a launcher")
    if ours or gpus is None or gpus == 1:
        yield
        return
    crew = Crew(gpus, running)
    try:
        yield
    except LostProcess:
        for watcher in crew.watchers:
            watcher.join(LEAVING / crew.count)
        raise
    finally:
        with crew.lock:
            crew.over = True
        os.close(crew.alive)
        for member in crew.members:
            with suppress(subprocess.TimeoutExpired):
                member.wait(LEAVING)
            member.kill()
        remove_scratch(crew.folder)


class Crew:
    """Processes 1 to `count` − 1, of this command with `--gpus`; `running` tells what is kept. They only
    compute: their standard output is dropped and their standard error kept, for what they say last if
    they fail. One that dies ends the run with one line. They hold the end of a pipe whose other end is
    this process's alone, and end when it does, however that happens."""

    def __init__(self, count: int, running: Running) -> None:
        self.count, self.running, self.over = count, running, False
        self.lock = threading.Lock()
        self.folder = make_scratch()
        shared = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        shared[environment.MEETING] = str(self.folder / "meeting")
        if any(name == "lo" for _, name in socket.if_nameindex()):
            shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        os.environ.update(shared | {"RANK": "0", "LOCAL_RANK": "0"})
        reader, self.alive = os.pipe()
        self.members = [self._start(number, reader) for number in range(1, count)]
        os.close(reader)
        watcher = partial(threading.Thread, target=self._watch, daemon=True)
        self.watchers = [watcher(args=numbered) for numbered in enumerate(self.members, 1)]
        for thread in self.watchers:
            thread.start()

    def _start(self, number: int, reader: int) -> subprocess.Popen[str]:
        own = {"RANK": str(number), "LOCAL_RANK": str(number)}
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        how = {**streams, "text": True, "errors": "backslashreplace"}
        return environment.start(sys.argv[1:], reader, own, **how)

    def _watch(self, number: int, member: subprocess.Popen[str]) -> None:
        """End the run if this process fails."""
        last: deque[str] = deque(maxlen=LAST_LINES)
        assert member.stderr is not None
        for line in member.stderr:
            last.append(line)
            if os.environ.get("BLR_DEBUG") == "1":
                sys.stderr.write(f"[{number}] {line}")
        code = member.wait()
        with self.lock:  # held for ever by who ends the run
            if code and not self.over:
                reports = [line.removeprefix("blr: ") for line in last if line.startswith(ERROR)]
                if reports and code > 0:
                    leave_at_once(reports[-1], code)
                leave_at_once(
                    f"error: process {number} of {self.count} {_ended(code)}; {state_of(self.running)}; "
                    f"resume with: {resume_command(sys.argv)}",
                    CapabilityError.exit_code,
                )


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    number = -code
    name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
    return f"was ended by {name}" + (" (out of memory?)" if number == signal.SIGKILL else "")


def end_member(code: int = 0) -> None:
    """End a process that `--gpus` started at once: libraries that end late are no failure."""
    if environment.is_started_by_us():
        with suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)
