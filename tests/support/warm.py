"""Processes that have imported much, and fork for each job: most of what each would cost in a process of
its own. The one here has compressed and exported; tests say what a job is through `Limited` or `Killer`.
`bare.py` starts one that has imported torch alone."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from patience import PATIENCE

DEFAULTS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
NOTHING = (  # commands that have nothing to do: what they import, and how they read options
    *(("compress", "-o", "/tmp/nowhere"), ("export", "-o", "/tmp/nowhere")),
    *(("inspect",), ("verify",), ("plan",), ("eval", "--text", "/nowhere"), ("generate", "a")),
    ("heal", "--teacher", "/nowhere", "-o", "/tmp/nowhere"),
)
TINY = Path(__file__).parents[1] / "data" / "tiny-llama"
Answer = Callable[[dict[str, Any], Path], dict[str, Any]]  # to a job, with a folder that is removed then


class Forked(NamedTuple):
    """How a fork ended: its exit code, negative for a signal, what it wrote and what it used."""

    code: int
    out: str
    err: str
    usage: resource.struct_rusage


class Warm:
    """The process of a script that calls `serve`, from the side of the tests; a context manager."""

    def __init__(self, script: str = __file__, **environment: str) -> None:
        self.command, self.environment = [sys.executable, script], {**DEFAULTS, **environment}

    def __enter__(self) -> Warm:
        self.server = subprocess.Popen(
            self.command,
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
            env={**os.environ, **self.environment},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.server.communicate(timeout=PATIENCE)

    def ask(self, kind: str, **job: Any) -> dict[str, Any]:
        """What the answer named `kind` says of a job, once it has ended."""
        self.server.stdin.write(json.dumps({"kind": kind, **job}) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())


def serve(answers: dict[str, Answer]) -> None:
    """Answer jobs from standard input, one JSON object a line, until it is closed. What is there now
    stays: forks that look through it for garbage would copy it."""
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(answers[job.pop("kind")](job, Path(scratch))), flush=True)


def in_fork(run: Callable[[], int], job: dict[str, Any], scratch: Path) -> Forked:
    """Call `run` in a fork, in the folder `cwd` and with the environment `env` of a job; an alarm, far
    beyond what any takes, only ends what waits for ever. What fails has the code 99."""
    child = os.fork()
    if child == 0:
        try:
            _become(run, job, scratch)
        finally:
            os._exit(99)
    _, status, usage = os.wait4(child, 0)
    out, err = ((scratch / name).read_bytes().decode("utf-8", "replace") for name in ("out", "err"))
    return Forked(os.waitstatus_to_exitcode(status), out, err, usage)


def _become(run: Callable[[], int], job: dict[str, Any], scratch: Path) -> None:
    """Never returns."""
    redirect(scratch)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(PATIENCE)
    os.chdir(os.fsencode(job["cwd"]))
    os.environ.clear()
    os.environ.update(job["env"])
    code = run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def redirect(scratch: Path) -> None:
    """In a fork: what it prints goes to the files out and err there, and there is nothing to read."""
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(scratch / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


def warm_up() -> None:
    """Do once what commands do: what is imported, read and made on first use is there in every fork."""
    import torch
    from exporting import compress_to, export_to
    from interpreting import replace_once
    from pico import save_pico
    from syncing import never_wait

    import blr.compressor.base.errors
    import blr.compressor.cli
    import blr.compressor.commands.evaluate
    import blr.compressor.commands.generate
    import blr.compressor.loading.tokenizer
    import blr.compressor.recipe.architectures

    torch.set_num_threads(1)
    replace_once()
    never_wait()
    blr.compressor.recipe.architectures.families()
    blr.compressor.loading.tokenizer.check_tokenizer(TINY)
    with tempfile.TemporaryDirectory() as folder:
        dense = save_pico("llama-tied", Path(folder) / "dense")
        small = compress_to(dense, Path(folder) / "small", check=True)
        export_to(small, Path(folder) / "exported", check=True)
    for name, *options in NOTHING:
        try:
            blr.compressor.cli.command()([name, "/nowhere", *options], standalone_mode=False)
        except (blr.compressor.base.errors.InputError, blr.compressor.base.errors.OutputError):
            continue
        raise AssertionError(f"blr {name} /nowhere: done")


if __name__ == "__main__":
    import killer
    import limited

    warm_up()
    serve({"killer": killer.answer, "limited": limited.answer})
