"""The user's shelf of own text: what a model wrote once, later runs read, and runs at once share out.

A batch lies in the user's cache folder under the digest of all that it depends on. Nothing rests on the
shelf: where it cannot be read, written or locked, a run writes its text itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from blr.compressor.checkpoint.disk import SCRATCH
from blr.compressor.checkpoint.journal import Journal
from blr.compressor.errors import BlrError

MOST = 1 << 30  # bytes kept; beyond them what was read longest ago goes
STALE = 3600.0  # seconds after which a file that was not finished is nobody's
OFF = "off"  # of BLR_TEXT_DIR
UNLOCKED = -1
FAILURES = (BlrError, OSError, SafetensorError)


def shelf_folder() -> Path | None:
    """BLR_TEXT_DIR, else the user's cache folder; None for BLR_TEXT_DIR=off and for one that is not
    absolute."""
    named = os.environ.get("BLR_TEXT_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = os.path.expanduser(named or f"{cache}/blr/own-text")
    return Path(folder) if os.path.isabs(folder) else None


class Shelf:
    """Batches of own text [n, length] (int32) under `folder`; None keeps nothing. `read` counts those
    that `batches` found."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.read = folder, 0

    def load(self, key: str) -> Tensor | None:
        """What lies under `key`, if it is whole."""
        with suppress(*FAILURES, KeyError):
            if self.folder is not None and (journal := Journal(self.folder)).load(key) is not None:
                ids: Tensor = journal.tensors(key)["ids"]
                os.utime(self.folder / f"{key}.safetensors")
                return ids
        return None

    def store(self, key: str, ids: Tensor) -> None:
        """Keep a batch, for which others go where there are too many."""
        with suppress(*FAILURES):
            if self.folder is not None:
                Journal(self.folder).store(key, {"ids": ids}, {})
                _trim(self.folder)

    def batches(
        self,
        keys: Mapping[int, str],
        write: Callable[[int], Tensor],
        begin: Callable[[], None],
        say: Callable[[str], None],
    ) -> Iterator[tuple[int, Tensor]]:
        """Every number with its batch, from the shelf or written for it. Those that another process is
        writing come last, so that processes that want the same share the work; `begin` is called
        before each, and what is waited for is said."""
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
    """An open descriptor that holds the lock of `key`, a byte of one file; UNLOCKED where there are no
    locks, None if another process holds it."""
    try:
        import fcntl

        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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


def _trim(folder: Path) -> None:
    """Remove what was read longest ago beyond MOST bytes, and what killed processes have left."""
    left = MOST
    for path in sorted(folder.glob("*.safetensors"), key=_read_at, reverse=True):
        left -= path.stat().st_size
        if left < 0:
            path.unlink(missing_ok=True)
    for path in folder.glob(f"*{SCRATCH}"):
        if _read_at(path) < time.time() - STALE:
            path.unlink(missing_ok=True)


def _read_at(path: Path) -> float:
    return path.stat().st_mtime
