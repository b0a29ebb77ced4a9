"""Compresses, heals and evaluates by the real command line, one run a GPU at a time.

    python scripts/bench/healing.py RUNS.json --out FOLDER [--gpus 0,1] [--blr blr] [--until SECONDS]

RUNS.json: {"teacher": folder, "eval": {name: [options of blr eval]}, "compressed": {name: [options of
blr compress] or a folder}, "runs": [{"name", "of": name in compressed, "heal": [options]}]}. A run
starts as soon as what it is of is there and a GPU is free; none starts after --until seconds. Prints a
line a run, then a table; everything is in FOLDER/results.json. Seconds are those of whole commands.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

Row = dict[str, Any]


class Bench:
    """The runs of one file and where they go."""

    def __init__(self, config: Row, out: Path, gpus: list[int], blr: list[str], until: float) -> None:
        self.config, self.out, self.blr = config, out, blr
        self.deadline = time.monotonic() + until
        self.free: Queue[int] = Queue()
        for gpu in gpus:
            self.free.put(gpu)
        self.pool = ThreadPoolExecutor(len(config["compressed"]) + len(config["runs"]))

    def command(self, gpu: int, *arguments: str) -> Row:
        """The JSON object that a command prints, or its error."""
        started = time.monotonic()
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(gpu)}
        command = [*self.blr, *arguments, "-q", "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        lines = done.stdout.strip().splitlines()
        notes = [line for line in done.stderr.splitlines() if "note:" in line]
        if done.returncode != 0 or not lines:
            said = done.stderr.strip().splitlines() or ["no output"]
            return {"error": f"exit {done.returncode}: {said[-1][:300]}", "notes": notes}
        return {**json.loads(lines[-1]), "wall": time.monotonic() - started, "notes": notes}

    def evaluate(self, gpu: int, folder: Path) -> Row:
        """Perplexity of `folder` by the name of what it is evaluated on."""
        found = {}
        for name, options in self.config["eval"].items():
            row = self.command(gpu, "eval", str(folder), *options)
            found[name] = row.get("perplexity", row.get("error"))
        return found

    def compressed(self, name: str) -> Row:
        """Compress, unless it is a folder already, and evaluate."""
        given = self.config["compressed"][name]
        gpu = self.free.get()
        try:
            folder = Path(given) if isinstance(given, str) else self.out / name
            row: Row = {"name": name}
            if folder == self.out / name:
                teacher = self.config["teacher"]
                row |= self.command(
                    gpu, "compress", teacher, *given, "-o", str(folder), "--overwrite", "--force"
                )
            row |= {"folder": str(folder), "eval": self.evaluate(gpu, folder)}
        finally:
            self.free.put(gpu)
        self.tell(row)
        return row

    def healed(self, run: Row, before: Future[Row]) -> Row:
        """Heal and evaluate."""
        source = before.result()
        gpu = self.free.get()
        try:
            if time.monotonic() > self.deadline or "error" in source:
                return {**run, "error": "not started"}
            folder = self.out / run["name"]
            options = ["--teacher", self.config["teacher"], "-o", str(folder), "--overwrite"]
            row = {**run, **self.command(gpu, "heal", source["folder"], *options, *run["heal"])}
            if "error" not in row:
                row["eval"] = self.evaluate(gpu, folder)
        finally:
            self.free.put(gpu)
        self.tell(row)
        return row

    def tell(self, row: Row) -> None:
        kept = {k: v for k, v in row.items() if k not in ("heal", "errors", "output", "folder")}
        print(json.dumps(kept), flush=True)

    def run(self) -> Row:
        """Everything, in the order of the file as far as GPUs are free."""
        before = {name: self.pool.submit(self.compressed, name) for name in self.config["compressed"]}
        rows = [self.pool.submit(self.healed, run, before[run["of"]]) for run in self.config["runs"]]
        found = {"compressed": [f.result() for f in before.values()], "runs": [f.result() for f in rows]}
        (self.out / "results.json").write_text(json.dumps(found, indent=1))
        return found


def table(found: Row) -> str:
    """A line a run: perplexities, held-back divergence, speed and times."""
    lines = []
    for row in [*found["compressed"], *found["runs"]]:
        if "error" in row:
            lines.append(f"{row['name']:24s} {row['error'][:150]}")
            continue
        said = " ".join(
            f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row["eval"].items()
        )
        if "after" in row:
            kl = ", ".join(
                f"{k} {row['before'][k]['kl']:.4f}>{v['kl']:.4f}" for k, v in row["after"].items()
            )
            speed = row["tokens"] / max(row["trained_seconds"], 1e-9)
            said += f" | KL {kl} | {row['steps']} steps {speed:,.0f} tok/s best {row['best_step']}"
        lines.append(f"{row['name']:24s} {said} | wall {row.get('wall', 0):.0f} s")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="0", help="their numbers, as 0,1")
    parser.add_argument("--blr", default="blr", help="the command to run")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which no run is started")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    config = json.loads(given.runs.read_text())
    gpus = [int(gpu) for gpu in given.gpus.split(",")]
    bench = Bench(config, given.out, gpus, shlex.split(given.blr), given.until)
    found = bench.run()
    print(table(found))
    sys.exit(any("error" in row for row in [*found["compressed"], *found["runs"]]))


if __name__ == "__main__":
    main()
