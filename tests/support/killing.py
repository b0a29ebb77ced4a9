"""Ends a run of the command in this process as Ctrl-C would, by what it has written to its journal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from blr.compressor.workspace.journal import Journal


@contextmanager
def killed_after(stores: int) -> Iterator[None]:
    """While active, the entry after so many in a journal is not written, and the run must end there."""
    stored, left = Journal.store, iter(range(stores))

    def killed(journal: Journal, *arguments: Any) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        stored(journal, *arguments)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(Journal, "store", killed)
        yield
