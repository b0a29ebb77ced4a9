"""Keeps own text in the user's cache folder: later runs read what a model wrote, and runs at the same
time share it.

A batch lies under the digest of all that it depends on. Nothing depends on the shelf: where it cannot
be read, written or locked, a run writes its text itself.

The folder may hold files of the user. Those of ours are listed in a file before they are written. No
other file is ever removed or replaced, and no link is followed.
"""

import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from blr.compressor.base.errors import BlrError
from blr.compressor.checkpoint.regular import read_text
from blr.compressor.workspace.journal import Journal
from blr.compressor.workspace.ownership import is_named, is_scratch

MOST = 1 << 30  # bytes kept; beyond them the files that were read longest ago are removed
LIST = "blr-own-text.list"  # has a first line MARK, then the name of a file of ours on each line
MARK = "own text kept by blr: files that it may remove\n"
MAX_LIST = 64 * 2**20  # bytes
STALE = 3600.0  # seconds after which an unfinished file is taken to be abandoned
OFF = "off"  # value of BLR_TEXT_DIR
_OURS = re.compile(r"[0-9a-f]{64}\.safetensors\n")
FAILURES = (BlrError, OSError, SafetensorError)


def shelf_folder() -> Path | None:
    """The folder BLR_TEXT_DIR, else one in the user's cache folder; None if that is "off" or not
    absolute."""
    named = os.environ.get("BLR_TEXT_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(named or f"{cache}/blr/own-text")
    return Path(folder) if os.path.isabs(folder) else None


class Shelf:
    """Batches of own text [n, length] (int32) in `folder` (None: keep nothing), of which those that
    `fits` accepts are used. `read` counts them."""

    def __init__(self, folder: Path | None, fits: Callable[[Tensor], bool] = lambda ids: True) -> None:
        self.folder, self.fits, self.read = folder, fits, 0

    def load(self, key: str) -> Tensor | None:
        """The batch under `key`; None if it is missing or damaged."""
        with suppress(*FAILURES, KeyError):
            if self.folder is None or os.path.islink(self.folder / f"{key}.safetensors"):
                return None
            if (journal := Journal(self.folder)).load(key) is not None:
                ids: Tensor = journal.tensors(key)["ids"]
                if self.fits(ids):
                    os.utime(self.folder / f"{key}.safetensors")
                    return ids
        return None

    def store(self, key: str, ids: Tensor) -> None:
        """Keep a batch; the oldest are removed if there are too many."""
        with suppress(*FAILURES):
            if self.folder is not None and _is_listed(self.folder, f"{key}.safetensors"):
                Journal(self.folder).store(key, {"ids": ids}, {})
                _trim(self.folder)

    def batches(
        self,
        keys: Mapping[int, str],
        write: Callable[[int], Tensor],
        begin: Callable[[], None],
        say: Callable[[str], None],
    ) -> Iterator[tuple[int, Tensor]]:
        """Every number with its batch, from the shelf or by `write`; batches that another process is
        writing come last. `begin` is called before each; `say` is told if the run has to wait."""
        late: list[int] = []
        for n, wait in chain(((n, False) for n in keys), ((n, True) for n in late)):
            if wait and n == late[0]:
                say(f"waits for what another run is writing of it (BLR_TEXT_DIR={OFF}: nobody waits)")
            with self._claimed(keys[n], wait) as ours:
                if not (ours or wait):
                    late.append(n)
                    continue
                begin()
                if (ids := self.load(keys[n])) is not None:
                    self.read += 1
                else:
                    self.store(keys[n], ids := write(n))
            yield n, ids

    @contextmanager
    def _claimed(self, key: str, wait: bool) -> Iterator[bool]:
        """While active, the batch is this process's to write if the value is true. If another process
        writes it, `wait` waits, else the value is false. Without locks it is always true."""
        descriptor = None
        try:
            if self.folder is not None:
                with suppress(OSError):
                    self.folder.mkdir(parents=True, exist_ok=True)
                    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    descriptor = os.open(self.folder / ".lock", flags, 0o666)
            yield descriptor is None or _is_locked(descriptor, key, wait)
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _is_locked(descriptor: int, key: str, wait: bool) -> bool:
    """Lock `key`, one byte of a file. False if another process has the lock; true where locks do not
    work."""
    try:
        import fcntl

        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, int(key[:15], 16))
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):
        pass
    return True


def _listed(folder: Path) -> set[str] | None:
    """The names of the files in `folder` that are ours; None if the list is a file of the user's. Raises
    InputError if it cannot be read."""
    path = folder / LIST
    if not os.path.lexists(path):
        return set()
    text = read_text(path, MAX_LIST) if stat.S_ISREG(os.lstat(path).st_mode) else "a link or folder"
    mark, *names = text.splitlines(keepends=True) or [MARK]  # an empty one, as a full disk leaves it
    return {name[:-1] for name in names if _OURS.fullmatch(name)} if mark == MARK else None


def _is_listed(folder: Path, name: str) -> bool:
    """List `name` as ours, unless the user has a file of that name; returns whether it is listed."""
    listed = _listed(folder)
    if listed is None:
        return False
    if name in listed or os.path.lexists(folder / name):
        return name in listed
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(folder / LIST, flags, 0o666)
    try:
        new = os.fstat(descriptor).st_size == 0
        os.write(descriptor, f"{MARK if new else ''}{name}\n".encode())
    finally:
        os.close(descriptor)
    return name in (_listed(folder) or ())


def _trim(folder: Path) -> None:
    """Remove our own files: those read longest ago beyond MOST bytes, and abandoned ones."""
    left, listed = MOST, _listed(folder) or set()
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if is_named(entry.name, listed)]
    seen = {name: os.lstat(folder / name) for name in names}
    found = {name: status for name, status in seen.items() if stat.S_ISREG(status.st_mode)}
    whole = [name for name in found if not is_scratch(name)]
    for name in sorted(whole, key=lambda name: found[name].st_mtime, reverse=True):
        left -= found[name].st_size
        if left < 0:
            (folder / name).unlink(missing_ok=True)
    for name in found.keys() - set(whole):
        if found[name].st_mtime < time.time() - STALE:
            (folder / name).unlink(missing_ok=True)
