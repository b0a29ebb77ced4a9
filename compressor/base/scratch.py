"""Temporary folders. They go when what made them is done, and when a signal ends the process."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blr.compressor.base.errors import CapabilityError

_made: set[Path] = set()


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """A temporary folder of this block. Raises as `make_scratch`."""
    folder = make_scratch()
    try:
        yield folder
    finally:
        remove_scratch(folder)


def make_scratch() -> Path:
    """A temporary folder, for `remove_scratch`. Raises CapabilityError where there can be none."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="blr-"))
    except OSError as error:
        raise CapabilityError(f"no folder for temporary files ({error}); set TMPDIR to one") from None
    _made.add(folder)
    return folder


def remove_scratch(*folders: Path) -> None:
    """Remove these folders, or all that are left."""
    for folder in folders or tuple(_made):
        shutil.rmtree(folder, ignore_errors=True)
        _made.discard(folder)
