"""What several GPUs of one host gain: wall time, GPU-seconds, peak memory, and whether bytes are equal.

    python scripts/bench/scaling.py --out FOLDER [--gpus 1 2] [--cases 8b 1b heal heal-8b]
        [--layers-8b 2] [--layers-1b 4] [--samples 256] [--steps 40] [--batch N] [--device auto]
        [--blr 'python -m blr.compressor']

Checkpoints are random, of published shapes, those to compress with fewer decoder layers, and made here
(a minute; an 8B two). The cases: calibrated BLAST b=16 CF 2 of the 8B and of the 1B shape (with the
seconds of each phase in the first process), and healing of the 1B and of the 8B shape (compressed by
Monarch without calibration; tokens a second are the median of the logged lines). One
warm-up of a small model comes first. A line of the table, and one of JSON in FOLDER/scaling.jsonl, for
every case and number of GPUs as it is done; a case that is there already is not measured again. What a
run says meanwhile is in FOLDER/CASE-on-N.log.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TINY, SAMPLE = ROOT / "tests/data/tiny-llama", ROOT / "tests/data/sample.txt"
SHAPES = {"8b": "llama-3.1-8b", "1b": "llama-3.2-1b", "heal": "llama-3.2-1b", "heal-8b": "llama-3.1-8b"}
HEALED = {"heal": 16, "heal-8b": 32}  # layers
HEAD = "| case | GPUs | wall s | × | GPU s | GiB a GPU | host GiB | tokens/s | same bytes |"


class Memory:
    """Context: the most memory that any GPU and the processes of this host used meanwhile, in GiB."""

    def __enter__(self) -> Memory:
        self.gpu = self.host = 0.0
        self.idle = _available_bytes()
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self) -> None:
        while not self.over.wait(0.5):
            self.gpu = max(self.gpu, _gpu_gib())
            self.host = max(self.host, (self.idle - _available_bytes()) / 2**30)

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def _gpu_gib() -> float:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0.0
    return max(float(line) for line in done.stdout.split()) / 1024


def write_text(path: Path, megabytes: int = 3) -> Path:
    """The lines of the sample again and again, in random order: random models do not mind."""
    if not path.exists():
        lines = [line for line in SAMPLE.read_text().splitlines(keepends=True) if line.strip()]
        draw = random.Random(0)
        path.write_text("".join(draw.choices(lines, k=megabytes * 1_000_000 // 60)))
    return path


def checkpoint(folder: Path, shape: str, layers: int) -> Path:
    """A random checkpoint, made if it is not there."""
    target = folder / f"{shape}-{layers}"
    if not target.exists():
        options = [shape, str(target), "--layers", str(layers), "--tokenizer", str(TINY)]
        command = [sys.executable, str(ROOT / "scripts/make_checkpoint.py"), *options]
        subprocess.run(command, check=True)
    return target


def digest(folder: Path) -> str:
    """SHA-256 over all weights of an output."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def run(command: list[str], log: Path) -> dict[str, Any]:
    """What a command of blr prints as JSON, with its wall time and the most memory used; `log` takes
    what it says meanwhile."""
    started = time.monotonic()
    with Memory() as memory, open(log, "w") as told:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=told, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)}\n{log.read_text()[-4000:]}")
    wall = time.monotonic() - started
    return {**json.loads(done.stdout), "wall": wall, "gpu_gib": memory.gpu, "host_gib": memory.host}


class Bench:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.a, self.blr = arguments, shlex.split(arguments.blr)
        self.out: Path = arguments.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.text = write_text(self.out / "text.txt")
        self.lines = self.out / "scaling.jsonl"
        known = self.lines.read_text().splitlines() if self.lines.exists() else []
        self.rows = [json.loads(line) for line in known]

    def measure(self, case: str, gpus: int) -> dict[str, Any]:
        """One line, from the file if it is there."""
        for row in self.rows:
            if (row["case"], row["gpus"]) == (case, gpus):
                return row
        target = self.out / f"{case}-on-{gpus}"
        command = [*self.blr, *self._command(case), *self._options(target, gpus)]
        found = run(command, self.out / f"{case}-on-{gpus}.log")
        row = {"case": case, "gpus": gpus, **{k: found[k] for k in ("wall", "gpu_gib", "host_gib")}}
        row |= {"seconds": found["seconds"], "tokens": None, "sha256": digest(target)}
        row["spent"] = found.get("spent", {})
        if case in HEALED:
            row["tokens"] = found["tokens_per_second"]
        shutil.rmtree(target)
        self.rows.append(row)
        with open(self.lines, "a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    def _options(self, target: Path, gpus: int) -> list[str]:
        given = ["-o", str(target), "--gpus", str(gpus), "--device", self.a.device]
        return [*given, "--format", "json"]

    def _command(self, case: str) -> list[str]:
        if case in HEALED:
            return self._heal(case)
        layers = self.a.layers_8b if case == "8b" else self.a.layers_1b
        model = checkpoint(self.out, SHAPES[case], layers)
        chosen = ["--method", "blast", "--blocks", "16", "--cf", "2"]
        calibrated = ["--calibration", str(self.text), "--samples", str(self.a.samples)]
        return ["compress", str(model), *chosen, *calibrated]

    def _heal(self, case: str) -> list[str]:
        teacher = checkpoint(self.out, SHAPES[case], HEALED[case])
        student = self.out / f"student-{case}"
        if not student.exists():
            options = self._options(student, max(self.a.gpus))
            command = [*self.blr, "compress", str(teacher), "--method", "monarch", *options]
            run(command, self.out / f"student-{case}.log")
        data = ["--data", str(self.text), "--mix", "0", "--steps", str(self.a.steps)]
        data += ["--batch", str(self.a.batch)] if self.a.batch else []
        return ["heal", str(student), "--teacher", str(teacher), *data, "--save-minutes", "60"]

    def warm_up(self) -> None:
        """What the first run on a machine pays for: libraries read from disk, kernels compiled."""
        target = self.out / "warm"
        options = ["--calibration", str(SAMPLE), "--samples", "8"]
        options += self._options(target, max(self.a.gpus))
        command = [*self.blr, "compress", str(TINY), "--method", "blast", "--blocks", "4", *options]
        run(command, self.out / "warm.log")
        shutil.rmtree(target)


def text_of(row: dict[str, Any], base: dict[str, Any]) -> str:
    """A line of the table; `base` is the same case on the fewest GPUs."""
    healing = row["tokens"]
    speed = healing / base["tokens"] if healing else base["wall"] / row["wall"]
    unknown = row is base or healing
    equal = "–" if unknown else ("yes" if row["sha256"] == base["sha256"] else "NO")
    cells = (
        *(row["case"], row["gpus"], f"{row['wall']:.1f}", f"{speed:.2f}"),
        *(f"{row['wall'] * row['gpus']:.0f}", f"{row['gpu_gib']:.1f}", f"{row['host_gib']:.1f}"),
        *(f"{row['tokens']:,.0f}" if row["tokens"] else "–", equal),
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=SHAPES, default=["8b", "1b", "heal"])
    parser.add_argument("--layers-8b", type=int, default=2)
    parser.add_argument("--layers-1b", type=int, default=4)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, help="tokens a step of healing")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--blr", default=f"{sys.executable} -m blr.compressor")
    bench = Bench(parser.parse_args())
    bench.warm_up()
    print(HEAD + "\n" + "|---" * (HEAD.count("|") - 1) + "|", flush=True)
    for case in bench.a.cases:
        rows = [bench.measure(case, gpus) for gpus in sorted(bench.a.gpus)]
        for row in rows:
            print(text_of(row, rows[0]), flush=True)
        for row in rows:
            if spent := row.get("spent"):
                told = ", ".join(f"{what} {seconds:.1f}" for what, seconds in spent.items())
                print(f"  on {row['gpus']}: {told}", flush=True)


if __name__ == "__main__":
    main()
