"""Starts the processes of `splitting.py`, which hold a model together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from limited import Limited
from ranks import FORK

# Follows `FORK`: each process says what it computed, and the first ends after the others
SPLIT = """
import splitting
splitting.main({folder!r})
first = os.environ["RANK"] == "0"
raise SystemExit(max(abs(os.wait()[1]) for _ in range(1, {count})) if first else 0)
"""


def run_split(limited: Limited, folder: Path, size: int = 2) -> list[dict[str, Any]]:
    """What every one of `size` processes says."""
    patch = FORK.format(count=size) + SPLIT.format(folder=str(folder), count=size)
    done = limited.run(cwd=folder, patch=patch)
    assert done.code == 0, done.err
    found = [json.loads(line) for line in done.out.splitlines()]
    assert len(found) == size
    return found
