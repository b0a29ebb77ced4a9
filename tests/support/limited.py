"""Runs `blr` command lines in forks of the warm process and says what each used.

Time is counted in CPU seconds, so that a busy machine decides nothing.
"""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from patience import PATIENCE
from warm import DEFAULTS, Warm, in_fork


@dataclass(frozen=True)
class Ended:
    """How a command ended. `code` is negative for a signal (-14: it waited for ever); `cpu` in
    seconds, its children's included; `memory` is the peak of the largest process in KiB."""

    code: int
    out: str
    err: str
    cpu: float
    memory: int

    @property
    def line(self) -> str:
        """The last line on standard error, the only one but for notes."""
        *notes, last = self.err.splitlines() or [""]
        assert all(note.startswith("blr: note: ") for note in notes), self.err
        return last


def refused(ended: Ended, code: int, fragment: str) -> None:
    """Assert that a command ended with one line of error that is no bug of ours."""
    assert ended.code == code, ended.err
    assert ended.err.count("blr: error: ") == 1 and "bug" not in ended.err
    assert fragment in ended.err


class Limited:
    """Commands as they are, in forks of `warm`."""

    def __init__(self, warm: Warm) -> None:
        self.warm = warm

    def run(
        self, *arguments: str | Path, cwd: Path, env: dict[str, str] | None = None, patch: str = ""
    ) -> Ended:
        """Run ``blr *arguments``; `env` is added, `patch` is Python that runs before the command."""
        argv = [os.fsdecode(argument) for argument in arguments]
        variables = {**os.environ, **DEFAULTS, **(env or {})}
        job = {"argv": argv, "cwd": os.fsdecode(cwd), "env": variables, "patch": patch}
        return Ended(**self.warm.ask("limited", **job))


def answer(job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """On the side of the warm process: run the command of a job in a fork; what `Ended` holds."""
    code, out, err, usage = in_fork(partial(_command, job), job, scratch)
    return {
        **{"code": code, "out": out, "err": err},
        **{"cpu": usage.ru_utime + usage.ru_stime, "memory": usage.ru_maxrss},
    }


def _command(job: dict[str, Any]) -> int:
    """Run it; its exit code."""
    resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE))
    from blr.compressor.cli import main

    sys.argv = ["blr", *job["argv"]]
    try:
        exec(job["patch"], {})
        main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
