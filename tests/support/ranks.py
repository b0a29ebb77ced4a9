"""Runs a `blr` command as several processes: forks of a warm one, with the environment of torchrun."""

from __future__ import annotations

import hashlib
from pathlib import Path

from limited import Ended, Limited

# Runs in the process that becomes the command: it forks the others, which write where it does
FORK = """
import os, socket
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
os.environ.update(WORLD_SIZE="{count}", LOCAL_WORLD_SIZE="{count}", RANK="0", LOCAL_RANK="0",
    MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
for rank in range(1, {count}):
    if os.fork() == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        break
"""
# What is shared out only where it is large
SMALL = """
from blr.compressor.planning import training_sizes
from blr.compressor.structures import blast
blast.SHARES, blast.LARGE, training_sizes.PART_WORK = 2, 1, 1 << 16
"""


def run_ranks(warm: Limited, count: int, *arguments: object, cwd: Path, patch: str = SMALL) -> Ended:
    """``blr *arguments`` as `count` processes; `patch` is Python that runs in each."""
    forking = FORK.format(count=count) if count > 1 else ""
    return warm.run(*map(str, arguments), cwd=cwd, patch=forking + patch)


def weights(folder: Path) -> str:
    """SHA-256 of an output's tensors."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
