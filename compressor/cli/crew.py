"""`--gpus N`: this process starts N − 1 more of itself, and becomes the first of them.

The others only compute: their standard output is dropped and their standard error kept, for what they
say last if they fail. One that dies ends the run with one line. They hold the end of a pipe whose other
end is this process's alone, and end when it does, however that happens.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from blr.compressor.base import process_environment as environment
from blr.compressor.base.disk import make_scratch, remove_scratch
from blr.compressor.base.errors import CapabilityError, LostProcess, UsageError
from blr.compressor.cli.signals import Running, leave_at_once, resume_command, state_of

ERROR = "blr: error: "
LAST_LINES = 50  # of what a process said
LEAVING = 10.0  # seconds that processes take to end, or their end to be noticed


@contextmanager
def started(gpus: int | None, running: Running) -> Iterator[None]:
    """Meanwhile be the first of `gpus` processes. Raises UsageError under torchrun or accelerate."""
    if environment.is_started_by_us() or gpus is None:
        yield
        return
    if environment.count() > 1:
        raise UsageError(
            f"--gpus {gpus} in one of {environment.count()} processes; leave it out under a launcher"
        )
    if gpus == 1:
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
    """Processes 1 to `count` − 1; `running` tells what is kept if one of them fails."""

    def __init__(self, count: int, running: Running) -> None:
        self.count, self.running, self.over = count, running, False
        self.lock = threading.Lock()
        self.folder = make_scratch()
        shared = {
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            environment.MEETING: str(self.folder / "meeting"),
        }
        if any(name == "lo" for _, name in socket.if_nameindex()):
            shared["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        os.environ.update(shared | {"RANK": "0", "LOCAL_RANK": "0"})
        reader, self.alive = os.pipe()
        self.members = [self._start(number, reader) for number in range(1, count)]
        os.close(reader)
        self.watchers = [
            threading.Thread(target=self._watch, args=(number, member), daemon=True)
            for number, member in enumerate(self.members, 1)
        ]
        for watcher in self.watchers:
            watcher.start()

    def _start(self, number: int, reader: int) -> subprocess.Popen[str]:
        own = {"RANK": str(number), "LOCAL_RANK": str(number), environment.PARENT: str(reader)}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "blr.compressor", *sys.argv[1:]],
            env={**os.environ, **own},
            pass_fds=(reader,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",
        )

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
