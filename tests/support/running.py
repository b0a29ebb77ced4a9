"""The types of the fixtures that run the `blr` command."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

Run = Callable[..., subprocess.CompletedProcess[str]]
Invoke = Callable[..., tuple[int, str, str]]  # exit code, standard output and error of a command
