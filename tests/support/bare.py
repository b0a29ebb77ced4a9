"""Runs Python code in forks of a process that has imported torch, and neither blr nor transformers.

What they read of their environment as they are imported (where the hub is, where code of checkpoints is
kept) is that of each run, and `blr` can be missing. Torch, most of the time that such a process takes to
start, is imported once; how many threads it has is settled then, too.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from warm import Warm, in_fork, serve

MAIN = "from blr.compressor.cli import main; main()"
APART = ("scipy.optimize", "numpy.f2py", "pydantic", "rich.progress", "typer", "jinja2", "PIL.Image")
APART += ("httpx2", "ruamel.yaml", "safetensors.torch", "torch.distributed.checkpoint")
REFUSING = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
refuse = Refuse()
sys.meta_path.insert(0, refuse)
"""


def without(*packages: str) -> str:
    """Python that ends in a newline: from there on `packages` cannot be imported, as where they are not
    installed, until ``sys.meta_path.remove(refuse)``."""
    return REFUSING.format(packages=packages)


def run(
    code: str, *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """As ``python -c code *arguments`` in `cwd` with the environment `env`, by default this process's
    without TRITON_INTERPRET; standard input is empty."""
    given = {n: v for n, v in os.environ.items() if n != "TRITON_INTERPRET"} if env is None else env
    argv = [*map(str, arguments)]
    job = {"code": code, "argv": argv, "cwd": str(cwd or Path.cwd()), "env": dict(given)}
    return subprocess.CompletedProcess(argv, **_server().ask("bare", **job))


@cache
def _server() -> Warm:
    started = Warm(__file__, TRITON_INTERPRET="0").__enter__()
    atexit.register(started.__exit__)
    return started


def answer(job: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """On the side of the process that forks: run the code of a job; exit code and what it wrote."""
    done = in_fork(partial(_executed, job["code"], job["argv"]), job, scratch)
    return {"returncode": done.code, "stdout": done.out, "stderr": done.err}


def _executed(code: str, argv: list[str]) -> int:
    """Run `code` as the interpreter does; the exit code."""
    sys.argv, sys.path[0] = ["-c", *argv], ""
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def import_torch() -> None:
    """And what of it, and beside it, transformers imports."""
    import torch
    import torch._dynamo
    import torch._refs
    import torch.distributed.tensor

    torch.set_num_threads(1)
    for name in APART:
        with suppress(ModuleNotFoundError):
            import_module(name)
    ours = {"blr", "transformers", "huggingface_hub"}
    assert not ours & {name.partition(".")[0] for name in sys.modules}


if __name__ == "__main__":
    import_torch()
    serve({"bare": answer})
