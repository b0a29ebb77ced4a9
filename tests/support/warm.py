"""One process that has imported what most commands import, and forks for each command: most of what each
would cost in a process of its own. Tests say what a job is through `Limited` or `Killer`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from patience import PATIENCE

DEFAULTS = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Warm:
    """The warm process, from the side of the tests; a context manager."""

    def __enter__(self) -> Warm:
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True},
            env={**os.environ, **DEFAULTS},
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.server.communicate(timeout=PATIENCE)

    def ask(self, kind: str, **job: Any) -> dict[str, Any]:
        """What `answer` of the module `kind` says of a job, once it has ended."""
        self.server.stdin.write(json.dumps({"kind": kind, **job}) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())


def serve() -> None:
    """Answer jobs from standard input, one JSON object a line, until it is closed."""
    import killer
    import limited

    answers = {"killer": killer.answer, "limited": limited.answer}
    warm_up()
    for line in sys.stdin:
        job = json.loads(line)
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(answers[job.pop("kind")](job, Path(scratch))), flush=True)


def warm_up() -> None:
    """Import all that a command imports, one that fails included, and make the files that travel."""
    import torch
    import transformers.generation.utils
    import transformers.models.llama.modeling_llama  # noqa: F401

    import blr.compressor.cli
    import blr.compressor.cli.compress
    import blr.compressor.compress
    import blr.compressor.errors
    import blr.compressor.evaluate
    import blr.compressor.export.export
    import blr.compressor.fitting.factorize
    import blr.compressor.generate
    import blr.compressor.loading.load
    import blr.compressor.loading.vendor
    import blr.compressor.modeling.exported
    import blr.compressor.output.check
    import blr.compressor.output.produce
    import blr.compressor.planning.plan

    torch.set_num_threads(1)
    blr.compressor.cli.command()
    blr.compressor.loading.vendor.vendored_files()
    try:
        blr.compressor.cli.compress.compress("/nowhere", output=Path("/tmp/nowhere"))
    except blr.compressor.errors.InputError:
        return
    raise AssertionError("compressed nothing")


if __name__ == "__main__":
    serve()
