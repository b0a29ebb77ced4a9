"""One run at a time on one output: a lock file that names the process that holds it, and tells, if that
was killed, whether it had begun to move folders. Where a file system has no locks, one whose process is
gone is taken over by that text."""

import errno
import fcntl
import os
import socket
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

from blr.compressor.base.disk import flush
from blr.compressor.base.errors import InputError, OutputError
from blr.compressor.checkpoint.regular import parse_json
from blr.compressor.workspace.journal import canonical_json
from blr.compressor.workspace.ownership import in_the_way

ABOUT = "lock of a blr run"
MARK = canonical_json({"about": ABOUT})[:-1]
MAX_BYTES = 4096
MAX_PROCESS = 2**31
CLOSED = -1  # no descriptor
TRIES, PAUSE = 20, 0.01  # seconds; for a file that another run is just making or removing
UNSUPPORTED = (
    *(errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL),
    *(errno.ENOTTY, errno.EPROTONOSUPPORT, errno.EREMOTEIO),
)
HELD_LOCKS: set[Path] = set()  # lock files of this process, for whoever ends it abruptly
LOCKING = threading.Lock()  # held while a lock file comes or goes, when the line above is not yet true


class Lock:
    """The exclusive lock on `output`, at `path`. `after_kill`: another run left it behind; `moving`:
    that run was killed while it moved folders."""

    def __init__(self, path: Path, output: Path) -> None:
        self.path, self.output = path, output
        self.after_kill = self.moving = False
        self._descriptor = CLOSED

    def acquire(self) -> None:
        """Take the lock without waiting. Raises OutputError if that cannot be."""
        for _ in range(TRIES):
            with LOCKING:
                if self._try():
                    HELD_LOCKS.add(self.path)
                    return
            time.sleep(PAUSE)
        in_the_way(self.path, "not a lock file of blr")

    def begin_moving(self) -> None:
        """Note durably that folders are being moved: until then the lock stays after a kill."""
        self.moving = True
        HELD_LOCKS.discard(self.path)
        self._write()
        flush(self._descriptor)

    def settled(self) -> None:
        """Take over a lock whose run was killed, once what it left is in order."""
        self.moving = False
        self._write()

    def release(self) -> None:
        """Give the lock back; its file goes unless folders are still on their way."""
        if self._descriptor == CLOSED:
            return
        with LOCKING:
            with suppress(OSError):  # a folder made read-only meanwhile
                if not self.moving and self._is_in_place():
                    os.unlink(self.path)  # while held: whoever waits for it looks again
            os.close(self._descriptor)
            self._descriptor = CLOSED
            HELD_LOCKS.discard(self.path)

    def _try(self) -> bool:
        """Whether the lock is ours now; False if its file is not marked, or changed hands under us."""
        try:
            made = self._open()
        except FileNotFoundError:  # removed by its holder at this moment
            return False
        taken = False
        try:
            taken = self._take(made)
        finally:
            if not taken:
                if made:  # no room even for this
                    os.unlink(self.path)
                os.close(self._descriptor)
                self._descriptor = CLOSED
        return taken

    def _open(self) -> bool:
        """Open the lock file; whether this made it."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with suppress(FileExistsError):
            self._descriptor = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            return True
        if not stat.S_ISREG(os.lstat(self.path).st_mode):
            in_the_way(self.path, "not a lock file of blr")
        self._descriptor = os.open(self.path, flags)
        return False

    def _take(self, made: bool) -> bool:
        if not made and self._read() is None:
            return False
        locked = _flock(self._descriptor)
        left = None if made else self._read() or {}
        if locked is False or (locked is None and left and self._is_alive(left)):
            remedy = "wait for it or choose another --output"
            raise OutputError(f"{self.output}: another blr run is writing it; {remedy}")
        if not self._is_in_place():
            return False
        self.after_kill = left is not None
        self.moving = left is not None and left.get("moving") is True
        if not self.moving:
            self._write()
        return True

    def _is_alive(self, left: dict[str, object]) -> bool:
        """Whether the process that a lock names still runs, as far as that can be seen from here."""
        process, host = left.get("pid"), left.get("host")
        if host != socket.gethostname():
            found = f"a blr run on {host} holds the output, and this file system has no locks that"
            remedy = "if it does not, remove this file"
            raise OutputError(f"{self.path}: {found} would tell whether it still runs; {remedy}")
        if type(process) is not int or not 0 < process < MAX_PROCESS or process == os.getpid():
            return self.path in HELD_LOCKS
        try:
            os.kill(process, 0)
        except OSError as error:
            return error.errno == errno.EPERM
        return True

    def _read(self) -> dict[str, object] | None:
        """The contents of the lock file, {} if damaged, None if it is not a lock of blr."""
        data = os.pread(self._descriptor, MAX_BYTES, 0)
        if not data.startswith(MARK):
            return None
        with suppress(InputError):
            return parse_json(data, self.path)
        return {}

    def _write(self) -> None:
        text = {"about": ABOUT, "host": socket.gethostname(), "moving": self.moving, "pid": os.getpid()}
        data = canonical_json(text)
        os.pwrite(self._descriptor, data.ljust(os.fstat(self._descriptor).st_size), 0)

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False


def _flock(descriptor: int) -> bool | None:
    """Whether the descriptor's file is locked now; None if the file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return None
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True
