"""Exports checkpoints and loads the copies where `blr` is not: on the CPU and, if there is one, a GPU.

    python scripts/export_check.py CHECKPOINT... [--quantize int4] [--tokens 64] [--processes 8]

For each checkpoint: `blr export`, the folder moved elsewhere, a fresh process that cannot import `blr`
generates greedily in float32 on each device. The tokens must be those of the checkpoint itself on the
CPU (a quantized export: those of the export on the CPU). Up to `--processes` of these at once, since
most of their time goes into importing. One PASS or FAIL row a check as it ends, the verdict last; exit
code 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

PROMPT = "Once upon a time, there was a little girl named Lily. She"
LIMIT = 600  # seconds of a process
EXPORT = "from blr.compressor.cli import main; main()"
# Runs in its own process: device, tokens and folder in, tokens out; whether the runtime was used.
GENERATE = """
import json, sys
if sys.argv[4] == "without":
    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "blr":
                raise ModuleNotFoundError(name)
    sys.meta_path.insert(0, Refuse())
else:
    import blr.compressor.modeling
import torch, transformers
folder, device, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
options = {"trust_remote_code": True, "dtype": torch.float32}
model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
model = model.to(device).eval()
inputs = tokenizer(sys.argv[5], return_tensors="pt").to(device)
ids = model.generate(**inputs, max_new_tokens=count, do_sample=False)
fused = any("decoder" in name.lower() and value is not None for name, value in vars(model).items())
print(json.dumps({"ids": ids[0].tolist(), "fused": fused}))
"""


class Runner:
    """Runs Python processes, so many at once."""

    def __init__(self, processes: int) -> None:
        self._free = threading.Semaphore(processes)
        self._threads = str(max((os.cpu_count() or 1) // processes, 1))

    def python(self, code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
        """What `code` prints; a checkpoint's own code is copied to a cache that no other run shares."""
        command = [sys.executable, "-c", code, *map(str, arguments)]
        environment = {"OMP_NUM_THREADS": self._threads, **os.environ, "HF_HUB_OFFLINE": "1"}
        with self._free, tempfile.TemporaryDirectory() as cache:
            environment["HF_MODULES_CACHE"] = cache
            options = {"capture_output": True, "text": True, "env": environment, "timeout": LIMIT}
            return subprocess.run(command, **options)

    def generated(self, folder: Path, device: str, tokens: int, package: str) -> dict[str, Any]:
        """`ids` and `fused` of one generation, `error` if it failed."""
        done = self.python(GENERATE, folder, device, tokens, package, PROMPT)
        if done.returncode:
            return {"ids": [], "fused": False, "error": last_line(done.stderr)}
        return json.loads(done.stdout.splitlines()[-1])


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing on standard error"])[-1][:300]


def check(
    source: Path, work: Path, quantize: str | None, tokens: int, devices: Sequence[str], runner: Runner
) -> Iterator[tuple[bool, str]]:
    """(passed, what) rows of one checkpoint, as they come."""
    made, moved = work / "made", work / "elsewhere" / source.name
    extra = ["--quantize", quantize] if quantize else []
    done = runner.python(EXPORT, "export", source, "-o", made, "--overwrite", "-q", *extra)
    if done.returncode:
        yield False, f"export {source.name}: {last_line(done.stderr)}"
        return
    moved.parent.mkdir(exist_ok=True)
    shutil.move(made, moved)
    yield True, f"export {source.name}"
    with ThreadPoolExecutor() as pool:
        given = (moved if quantize else source, "cpu", tokens, "with")
        expected = pool.submit(runner.generated, *given)
        runs = {d: pool.submit(runner.generated, moved, d, tokens, "without") for d in devices}
        for device, run in runs.items():
            yield compared(source.name, device, run.result(), expected.result(), tokens)


def compared(
    name: str, device: str, found: dict[str, Any], expected: dict[str, Any], tokens: int
) -> tuple[bool, str]:
    """A row for the tokens of a copy: those expected, and half of the `tokens` asked for at least."""
    same = found["ids"] == expected["ids"] and len(found["ids"]) > tokens // 2
    note = f"{len(found['ids'])} tokens, fused runtime: {found['fused']}"
    if "error" in expected:
        note = f"the checkpoint itself: {expected['error']}"
    return same, f"{name} without blr on {device}: {found.get('error', note)}"


def rows_of(source: Path, *given: Any) -> int:
    """Print the rows of one checkpoint as they come; returns how many failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as work:
        try:
            for passed, what in check(source, Path(work), *given):
                failed += not passed
                print("PASS" if passed else "FAIL", what, flush=True)
        except Exception as error:
            failed += 1
            print("FAIL", f"{source.name}: {type(error).__name__}: {error}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, nargs="+")
    parser.add_argument("--quantize")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16))
    arguments = parser.parse_args()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    most = len(arguments.checkpoint) * (1 + len(devices))
    runner = Runner(min(max(arguments.processes, 1), most))
    given = (arguments.quantize, arguments.tokens, devices, runner)
    with ThreadPoolExecutor(len(arguments.checkpoint)) as pool:
        runs = [pool.submit(rows_of, source.resolve(), *given) for source in arguments.checkpoint]
    failed = sum(run.result() for run in runs)
    print("FAIL" if failed else "PASS", "all rows" if not failed else f"{failed} rows")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
