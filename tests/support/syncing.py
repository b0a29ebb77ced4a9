"""No fsync: tests outlive no power failure, and a kill loses nothing that was written.

Commands in processes of their own do wait for the disk, as everywhere.
"""

from __future__ import annotations

import os


def never_wait() -> None:
    """Let fsync, in this process and its forks, do no more than refuse what is no open file."""
    os.fsync = _known


def _known(descriptor: int) -> None:
    os.fstat(descriptor)
