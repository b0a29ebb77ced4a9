"""Exports checkpoints and loads the copies where `blr` is not: on the CPU and, if there is one, a GPU.

    python scripts/export_check.py CHECKPOINT... [--quantize int4] [--tokens 64]

For each checkpoint: `blr export`, the folder moved elsewhere, a fresh process that cannot import `blr`
generates greedily in float32 on each device. The tokens must be those of the checkpoint itself on the
CPU (a quantized export: those of the export on the CPU). One PASS or FAIL row a check, the verdict
last; exit code 1 if any failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

PROMPT = "Once upon a time, there was a little girl named Lily. She"
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


def python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {"OMP_NUM_THREADS": "2", **os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def generated(folder: Path, device: str, tokens: int, package: str) -> dict:
    done = python(GENERATE, folder, device, tokens, package, PROMPT)
    if done.returncode:
        return {"ids": [], "fused": False, "error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def check(source: Path, work: Path, quantize: str | None, tokens: int) -> Iterator[tuple[bool, str]]:
    """(passed, what) rows of one checkpoint, as they come."""
    made, moved = work / "made", work / "elsewhere" / source.name
    extra = ["--quantize", quantize] if quantize else []
    done = python(EXPORT, "export", source, "-o", made, "--overwrite", "-q", *extra)
    if done.returncode:
        yield False, f"export {source.name}: {done.stderr.strip()[-300:]}"
        return
    moved.parent.mkdir(exist_ok=True)
    shutil.move(made, moved)
    yield True, f"export {source.name}"
    expected = generated(moved if quantize else source, "cpu", tokens, "with")
    for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        found = generated(moved, device, tokens, "without")
        same = found["ids"] == expected["ids"] and len(found["ids"]) > tokens // 2
        note = found.get("error", f"{len(found['ids'])} tokens, fused runtime: {found['fused']}")
        yield same, f"{source.name} without blr on {device}: {note}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path, nargs="+")
    parser.add_argument("--quantize")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    failed = 0
    for source in arguments.checkpoint:
        with tempfile.TemporaryDirectory() as work:
            rows = check(source.resolve(), Path(work), arguments.quantize, arguments.tokens)
            for passed, what in rows:
                failed += not passed
                print("PASS" if passed else "FAIL", what, flush=True)
    print("FAIL" if failed else "PASS", "all rows" if not failed else f"{failed} rows")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
