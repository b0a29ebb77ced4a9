"""Keeps own text in the user's cache folder, where later runs read what a model wrote.

A batch lies under the digest of all that it depends on. Nothing depends on the shelf: where it cannot be
read or written, a run writes its text itself. Only files whose names begin with START are removed.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from blr.compressor.base.errors import BlrError
from blr.compressor.workspace.journal import Journal

MOST = 1 << 30  # bytes kept; beyond them the files that were read longest ago are removed
START = "blr-own-text-"
FAILURES = (BlrError, OSError, SafetensorError, KeyError)


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

    def batch(self, key: str, write: Callable[[], Tensor]) -> Tensor:
        """The batch under `key`, from the shelf or else by `write`."""
        if (ids := self.load(key)) is not None:
            self.read += 1
            return ids
        self.store(key, ids := write())
        return ids

    def load(self, key: str) -> Tensor | None:
        """The batch under `key`; None if it is missing or damaged."""
        with suppress(*FAILURES):
            if self.folder is not None and (journal := Journal(self.folder)).load(START + key):
                ids: Tensor = journal.tensors(START + key)["ids"]
                if self.fits(ids):
                    os.utime(self.folder / f"{START}{key}.safetensors")
                    return ids
        return None

    def store(self, key: str, ids: Tensor) -> None:
        """Keep a batch; those read longest ago are removed if there are too many."""
        with suppress(*FAILURES):
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
                Journal(self.folder).store(START + key, {"ids": ids}, {})
                _trim(self.folder)


def _trim(folder: Path) -> None:
    left, sizes = MOST, {path: os.lstat(path) for path in folder.glob(f"{START}*")}
    for path in sorted(sizes, key=lambda path: sizes[path].st_mtime, reverse=True):
        left -= sizes[path].st_size
        if left < 0:
            path.unlink(missing_ok=True)
