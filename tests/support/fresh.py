"""Commands, fresh processes and work that several processes share. Imports neither torch nor blr."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
TINY, SAMPLE = ROOT / "tests" / "data" / "tiny-llama", ROOT / "tests" / "data" / "sample.txt"
LIMIT = 240.0  # seconds of a process
MAIN = "from blr.compressor.cli import main; main()"
# Modules that cannot be imported: torch and transformers see them as not installed.
HIDE = (
    "import json, sys; job = json.loads(sys.argv[1]); sys.modules.update(dict.fromkeys(job['hidden']))\n"
)
CALL = "-- call"  # printed on standard error by a process ahead of each thing it does


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return (self.err.strip().splitlines() or ["nothing on standard error"])[-1][:300]

    @property
    def messages(self) -> list[str]:
        """What blr said on standard error."""
        return messages(self.err)


def messages(text: str) -> list[str]:
    """The lines of `text` that are blr's."""
    return [line for line in text.splitlines() if line.startswith("blr: ")]


def blr(*arguments: object) -> Done:
    """The command in this process, which has imported torch already. Raises RuntimeError if it fails."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    from blr.compressor.cli import main

    argv = patch.object(sys, "argv", ["blr", *map(str, arguments)])
    with argv, redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code
    done = Done(code or 0, out.getvalue(), err.getvalue())
    if done.code:
        raise RuntimeError(f"blr {arguments[0]}: exit code {done.code}: {done.last_line}")
    return done


def blr_process(
    *arguments: object, hidden: Iterable[str] = (), environment: Mapping[str, str] | None = None
) -> Done:
    """The command in a process of its own, where the modules `hidden` are not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({list(hidden)!r})); {MAIN}"
    return run([sys.executable, "-c", code, *map(str, arguments)], environment)


def as_user() -> dict[str, str]:
    """This environment without what only tests set."""
    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def run(command: list[str], environment: Mapping[str, str] | None = None) -> Done:
    """A command with more environment variables than this process has."""
    variables = {**as_user(), **(environment or {})}
    options = {"capture_output": True, "text": True, "env": variables, "timeout": LIMIT}
    done = subprocess.run(command, **options)
    return Done(done.returncode, done.stdout, done.stderr)


def fresh(
    code: str, job: dict[str, Any], hidden: Iterable[str] = ("blr",), **environment: str
) -> tuple[Any, list[list[str]]]:
    """What `code` prints as its last line, JSON, in a process where `hidden` are not installed.

    The code finds the dict `job`; code of a checkpoint is cached in a folder of its own.

    Returns:
        The value, and blr's messages: those before the first `CALL`, after it, after the next …

    Raises:
        RuntimeError: it failed; its last line.
    """
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-c", HIDE + code, json.dumps({**job, "hidden": list(hidden)})]
        done = run(command, {"HF_MODULES_CACHE": cache, **environment})
    if done.code:
        raise RuntimeError(f"exit code {done.code}: {done.last_line}")
    pieces = re.split(rf"^{CALL}.*\n", done.err, flags=re.M)
    return json.loads(done.out.splitlines()[-1]), [messages(piece) for piece in pieces]


def shared(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made by whichever process needs it first."""
    from filelock import FileLock

    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock", timeout=LIMIT):
        if not path.exists():
            make(path)
    return path
