"""Starts the processes of `splitting.py`, which hold a model together."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import splitting
from patience import PATIENCE


def run_split(folder: Path, size: int = 2) -> list[dict[str, Any]]:
    """What every one of `size` processes says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, splitting.__file__]
    given = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": given}
    members = [
        subprocess.Popen([*command, str(rank), str(size), port, str(folder)], **pipes)
        for rank in range(size)
    ]
    try:
        ended = [member.communicate(timeout=PATIENCE) for member in members]
    finally:
        for member in members:
            member.kill()
    assert all(member.returncode == 0 for member in members), ended
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]
