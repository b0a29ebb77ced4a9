"""The user's shelf of own text: what a model wrote once, later runs read, and runs at once share out.

A batch lies in the user's cache folder under the digest of all that it depends on. Nothing rests on the
shelf: where it cannot be read, written or locked, a run writes its text itself.

The folder may hold files of the user's. What is ours is listed in a file that we wrote, before it is
made: nothing else is ever removed or replaced, and no link is followed.
"""

from __future__ import annotations

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
from blr.compressor.workspace.ownership import Entries, is_named, is_scratch

MOST = 1 << 30  # bytes kept; beyond them what was read longest ago goes
LIST = "blr-own-text.list"  # names of the files that are ours, a line each, behind the first one
MARK = "own text kept by blr: files that it may remove\n"
MAX_LIST = 64 * 2**20  # bytes
STALE = 3600.0  # seconds after which a file that was not finished is nobody's
OFF = "off"  # of BLR_TEXT_DIR
UNLOCKED = -1
_OURS = re.compile(r"[0-9a-f]{64}\.safetensors\n")
FAILURES = (BlrError, OSError, SafetensorError)


def shelf_folder() -> Path | None:
    """BLR_TEXT_DIR, else the user's cache folder; None if that is "off" or not absolute."""
    named = os.environ.get("BLR_TEXT_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(named or f"{cache}/blr/own-text")
    return Path(folder) if os.path.isabs(folder) else None


class Shelf:
    """Batches of own text [n, length] (int32) that `fits` takes under `folder`; None keeps nothing.
    `read` counts those found."""

    def __init__(self, folder: Path | None, fits: Callable[[Tensor], bool] = lambda ids: True) -> None:
        self.folder, self.fits, self.read = folder, fits, 0

    def load(self, key: str) -> Tensor | None:
        """What lies under `key`, if it is whole."""
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
        """Keep a batch, for which others go where there are too many."""
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
        """Every number with its batch, from the shelf or written for it; those that another process
        is writing last. `begin` is called before each, and what is waited for is said."""
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
        """Whether the batch is this process's to write: not while another one does, for which `wait`
        waits. Where there are no locks it is."""
        descriptor = UNLOCKED if self.folder is None else _locked(self.folder, key, wait)
        try:
            yield descriptor is not None
        finally:
            if descriptor is not None and descriptor != UNLOCKED:
                os.close(descriptor)


def _locked(folder: Path, key: str, wait: bool) -> int | None:
    """An open descriptor that holds the lock of `key`, a byte of one file; UNLOCKED where there are
    no locks, None if another process holds it."""
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(folder / ".lock", flags, 0o666)
    except (ImportError, OSError):
        return UNLOCKED
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB), 1, int(key[:15], 16))
        return descriptor
    except OSError as error:
        os.close(descriptor)
        return None if isinstance(error, (BlockingIOError, PermissionError)) else UNLOCKED
    except BaseException:  # interrupted while it waits
        os.close(descriptor)
        raise


def _listed(folder: Path) -> set[str]:
    """Names of the files in `folder` that are ours. Raises InputError for a list that cannot be read."""
    path = folder / LIST
    if not os.path.lexists(path) or not stat.S_ISREG(os.lstat(path).st_mode):
        return set()
    mark, *names = read_text(path, MAX_LIST).splitlines(keepends=True)
    return {name[:-1] for name in names if _OURS.fullmatch(name)} if mark == MARK else set()


def _is_listed(folder: Path, name: str) -> bool:
    """Whether `name` is listed as ours, by now: not where the user has a file of that name."""
    listed = _listed(folder)
    if name in listed:
        return True
    path, mine = folder / LIST, not os.path.lexists(folder / name)
    if not mine or (os.path.lexists(path) and not _is_marked(path)):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        new = os.fstat(descriptor).st_size == 0
        os.write(descriptor, f"{MARK if new else ''}{name}\n".encode())
    finally:
        os.close(descriptor)
    return name in _listed(folder)


def _is_marked(path: Path) -> bool:
    """Whether the file at `path` is a list of ours."""
    return stat.S_ISREG(os.lstat(path).st_mode) and read_text(path, MAX_LIST).startswith(MARK)


def _trim(folder: Path) -> None:
    """Of our own files, remove what was read longest ago beyond MOST bytes, and what was not
    finished."""
    left, listed = MOST, _listed(folder)
    found = _own_files(folder, listed)
    whole = [name for name in found if not is_scratch(name)]
    for name in sorted(whole, key=lambda name: _read_at(folder / name), reverse=True):
        left -= found[name].st_size
        if left < 0:
            (folder / name).unlink(missing_ok=True)
    for name in found.keys() - set(whole):
        if _read_at(folder / name) < time.time() - STALE:
            (folder / name).unlink(missing_ok=True)


def _own_files(folder: Path, listed: set[str]) -> Entries:
    """Plain files in `folder` that are `listed`, or were to become one of these."""
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if is_named(entry.name, listed)]
    found = {name: os.lstat(folder / name) for name in names}
    return {name: status for name, status in found.items() if stat.S_ISREG(status.st_mode)}


def _read_at(path: Path) -> float:
    return os.lstat(path).st_mtime
