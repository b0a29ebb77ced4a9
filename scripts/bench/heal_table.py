"""The table of healing: what compression loses and minutes of training bring back, a row a setting.

    python scripts/bench/heal_table.py --data FOLDER --mini FOLDER [--smol FOLDER] --out FOLDER
        [--rows 'mini-*'] [--seeds 0,1] [--gpus 0,0,1] [--fits]
        [--budget '--steps 1900'] [--blr 'python -m blr.compressor']

FOLDER of --data holds heldout.txt, calibration.txt, train-prose.txt(.xz) and wikitext2-test.txt. Rows
run concurrently, one on each GPU (--gpus: their numbers, one twice for two rows on it; by default all
that are visible). Everything a row runs is kept: what is done is not done again by another call of the
same options, also after a failure. OUT/logs/ROW.log has the commands and what they said, OUT/results
the figures of each. With several --seeds (of the fit and of the healing) every row is run for each, and
a line tells their mean and how far they are from it. --fits ends before healing, so that fits may share
a GPU, which trainings have to themselves. Minutes are those of training alone (`trained_seconds`: no
start, no own text, no compression, no evaluation).
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import lzma
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from threading import Lock
from typing import Any

Result = dict[str, Any]
TRAIN = "factors,norms,biases,embeddings"


@dataclass(frozen=True)
class Row:
    """A setting: how `model` is compressed (rows of the same `compress` share it) and healed, and what
    the perplexities of prose, and of WikiText-2, should be or, for SmolLM2, the nats over dense."""

    name: str
    model: str
    compress: str
    heal: str
    target: tuple[float, ...] = ()

    def asked(self, given: argparse.Namespace, seed: str) -> Row:
        """With the options of all rows and a seed ("" for the default), which its name has, too."""
        seeded = f" --seed {seed}" if seed else ""
        heal = re.sub(r"--minutes \S+", given.budget or r"\g<0>", f"{self.heal} {given.more}{seeded}")
        name = f"{self.name}@{seed}" if seed else self.name
        return Row(name, self.model, f"{self.compress} {given.fit}{seeded}", heal, self.target)


MINI = f"--minutes 3 --lr 0.01 --train {TRAIN} --data {{train}}"
SMOL = "--minutes 8 --lr 0.005 --data {train}"
MINI_FIT = "--calibration {data}/calibration.txt --samples 1600 --refit 3"
SMOL_FIT = "--calibration {train} --samples 512 --mix 0.67"
ROWS = (
    Row("mini-blast", "mini", f"--method blast --blocks 16 --cf 2 {MINI_FIT}", MINI, (12.55,)),
    Row("mini-svd", "mini", f"--method svd --cf 2 {MINI_FIT}", MINI, (13.2,)),
    Row("mini-monarch", "mini", f"--method monarch --cf 2 {MINI_FIT}", MINI, (13.5,)),
    Row("mini-ks", "mini", f"--method ks --cf 2 {MINI_FIT}", MINI, (13.5,)),
    Row("mini-svd-int4", "mini", f"--method svd --cf 2 --quantize int4 {MINI_FIT}", MINI, (13.6,)),
    Row(
        "mini-int2", "mini", "--base int2 --method blast --blocks 4 --rank 16"
        " --calibration {data}/calibration.txt --samples 1024", MINI, (12.22,)
    ),
    Row("smol-blast-1.5", "smol", f"--method blast --blocks 16 --cf 1.5 {SMOL_FIT}", SMOL, (0.05, 0.15)),
    Row("smol-blast-2", "smol", f"--method blast --blocks 16 --cf 2 {SMOL_FIT}", SMOL, (0.12, 0.3)),
    Row(
        "smol-int2", "smol", f"--base int2 --method svd --rank 16 --group 64 {SMOL_FIT}",
        SMOL, (0.12, 0.25)
    ),
    Row(
        "smol-int3", "smol", f"--base int3 --method svd --rank 16 --group 64 {SMOL_FIT}",
        SMOL, (0.03, 0.06)
    ),
    *(  # the line to beat, without a target
        Row(f"smol-{b}-plain", "smol", f"--method dense --quantize {b} --group 64 {SMOL_FIT}", SMOL)
        for b in ("int2", "int3")
    ),
    Row(
        "smol-blast-2-self", "smol", f"--method blast --blocks 16 --cf 2 {SMOL_FIT}",
        SMOL.replace("{train}", "self"), (0.12, 0.3)
    ),
    Row(
        "smol-blast-2-prose", "smol", f"--method blast --blocks 16 --cf 2 {SMOL_FIT}", f"{SMOL} --mix 0"
    )
)  # fmt: skip
EVALS = {"mini": "--batch 32", "smol": "--batch 32 --max-tokens 65536"}


class Table:
    """Runs rows and keeps what they give under `out`."""

    def __init__(self, given: argparse.Namespace, rows: list[Row]) -> None:
        self.given, self.out, self.rows = given, given.out, rows
        self.models = {"mini": given.mini, "smol": given.smol}
        self.texts = {"prose": given.data / "heldout.txt", "wiki": given.data / "wikitext2-test.txt"}
        for name in ("logs", "results", "models"):
            (self.out / name).mkdir(parents=True, exist_ok=True)
        self.words = {"data": str(given.data), "train": str(plain_text(given.data, self.out))}
        self.free: Queue[str] = Queue()
        for gpu in given.gpus:
            self.free.put(gpu)
        self.locks: dict[str, Lock] = {}
        self.guard = Lock()

    def command(self, key: str, log: str, *arguments: str) -> Result:
        """The JSON object that a command prints, from OUT/results/KEY.json if it is there.

        Raises RuntimeError with what it said last if it failed.
        """
        kept = self.out / "results" / f"{key}.json"
        with self._lock(key):
            found = json.loads(kept.read_text()) if kept.exists() else {}
            if found.get("arguments") == list(arguments):
                return found
            gpu = self.free.get()
            try:
                found = self._run(gpu, log, [*arguments, "--format", "json", "--offline"])
            finally:
                self.free.put(gpu)
            found["arguments"] = list(arguments)
            kept.with_suffix(".part").write_text(json.dumps(found))
            kept.with_suffix(".part").rename(kept)
            return found

    def _run(self, gpu: str, log: str, arguments: list[str]) -> Result:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if gpu else dict(os.environ)
        started = time.monotonic()
        with open(self.out / "logs" / f"{log}.log", "a", encoding="utf-8") as file:
            file.write(f"$ CUDA_VISIBLE_DEVICES={gpu} blr {shlex.join(arguments)}\n")
            file.flush()
            done = subprocess.run(
                [*shlex.split(self.given.blr), *arguments],
                **{"stdout": subprocess.PIPE, "stderr": file, "text": True, "env": environment},
                check=False,
            )
            file.write(done.stdout)
        lines = done.stdout.strip().splitlines()
        if done.returncode or not lines:
            said = json.loads(lines[-1]).get("error", "") if lines else "see its log"
            raise RuntimeError(f"{arguments[0]} ended with {done.returncode}: {said[:200]}")
        return {**json.loads(lines[-1]), "wall": round(time.monotonic() - started, 1)}

    def _lock(self, key: str) -> Lock:
        with self.guard:
            return self.locks.setdefault(key, Lock())

    def evaluated(self, key: str, log: str, folder: Path, model: str) -> dict[str, float]:
        """Perplexity by text."""
        found = {}
        for name, text in self.texts.items():
            options = ["--text", str(text), *shlex.split(EVALS[model])]
            result = self.command(f"{key}.{name}", log, "eval", str(folder), *options)
            found[name] = float(result["perplexity"])
        return found

    def compressed(self, row: Row) -> tuple[str, Path]:
        """Key and folder of the checkpoint that a row heals."""
        options = shlex.split(row.compress.format(**self.words))
        key = next(other.name for other in self.rows if other.compress == row.compress)
        folder = self.out / "models" / key
        place = ["-o", str(folder), "--overwrite", "--force"]
        self.command(key, key, "compress", str(self.models[row.model]), *options, *place)
        return key, folder

    def healed(self, row: Row, key: str, source: Path) -> tuple[Result, Path]:
        """What a training says and makes."""
        folder = self.out / "models" / key
        teacher = ["--teacher", str(self.models[row.model]), "-o", str(folder), "--overwrite"]
        given = shlex.split(row.heal.format(**self.words))
        return self.command(key, row.name, "heal", str(source), *teacher, *given), folder

    def run(self, row: Row) -> Result:
        """Every step of a row."""
        try:
            key, source = self.compressed(row)
            dense = self.evaluated(f"{row.model}.dense", row.model, self.models[row.model], row.model)
            before = self.evaluated(f"{key}.before", row.name, source, row.model)
            if self.given.fits:
                return {"row": row.name, "dense": dense, "before": before}
            healed, folder = self.healed(row, f"{row.name}.healed", source)
            after = self.evaluated(f"{row.name}.after", row.name, folder, row.model)
        except RuntimeError as error:
            return {"row": row.name, "error": str(error)}
        return {
            **{"row": row.name, "dense": dense, "before": before, "after": after},
            **{"minutes": healed["trained_seconds"] / 60, "tokens": healed["tokens"]},
            "speed": healed["tokens"] / max(healed["trained_seconds"], 1e-9),
            "verdict": verdict(row, dense, after),
            "command": f"blr compress {row.model} {row.compress.format(**self.words)} -o {key} && "
            f"blr heal {key} --teacher {row.model} {row.heal.format(**self.words)} -o {row.name}-healed",
        }


def verdict(row: Row, dense: dict[str, float], after: dict[str, float]) -> str:
    """Whether the figures are those asked for: perplexity of mini-llama, nats over dense of SmolLM2."""
    found = [math.log(after[name] / dense[name]) for name in ("prose", "wiki")]
    if row.model == "mini":
        found = [after["prose"]]
    if not row.target:
        return "no target"
    met = all(value <= wanted for value, wanted in zip(found, row.target, strict=True))
    return "met" if met else "MISSED"


def line(found: Result) -> str:
    """A row of the printed table."""
    if "error" in found:
        return f"{found['row']:18s} {found['error']}"
    if "after" not in found:
        told = ", ".join(f"{name} {nats:+.3f}" for name, nats in lost(found, "before").items())
        return f"{found['row']:18s} {told}"
    cells, was, now = [], lost(found, "before"), lost(found, "after")
    for name, dense in found["dense"].items():
        told = f"{found['before'][name]:.2f} -> {found['after'][name]:.3f} (dense {dense:.2f}"
        cells.append(f"{name} {told}; {was[name]:+.3f} -> {now[name]:+.3f})")
    said = f"{found['minutes']:.2f} min, {found['speed'] / 1e3:,.0f}k tokens/s"
    return (
        f"{found['row']:18s} {' | '.join(cells)} | {said} | {found['verdict']}\n    {found['command']}"
    )


def lost(found: Result, when: str) -> dict[str, float]:
    """Nats over dense by text, `when` "before" or "after"."""
    return {name: math.log(found[when][name] / dense) for name, dense in found["dense"].items()}


def spreads(found: list[Result]) -> list[str]:
    """A line for every row of several seeds: the mean of nats over dense, and the most that one is
    away from it."""
    groups: dict[str, list[Result]] = {}
    for one in found:
        if "error" not in one:
            groups.setdefault(one["row"].partition("@")[0], []).append(one)
    return [f"{name:18s} {spread(group)}" for name, group in groups.items() if len(group) > 1]


def spread(group: list[Result]) -> str:
    """What `spreads` says of one row."""
    cells = []
    for when in ("before", "after"):
        for text in group[0]["dense"]:
            values = [lost(one, when)[text] for one in group if when in one]
            if len(values) == len(group):
                mean = statistics.mean(values)
                off = max(abs(value - mean) for value in values)
                cells.append(f"{when} {text} {mean:+.3f} ({off:.3f})")
    return f"{len(group)} seeds: {', '.join(cells)}"


def plain_text(data: Path, out: Path) -> Path:
    """The training text, unpacked."""
    if (data / "train-prose.txt").exists():
        return data / "train-prose.txt"
    target = out / "train-prose.txt"
    if not target.exists():
        with lzma.open(data / "train-prose.txt.xz") as packed, open(f"{target}.part", "wb") as file:
            shutil.copyfileobj(packed, file)
        Path(f"{target}.part").rename(target)
    return target


def visible_gpus() -> list[str]:
    """Their numbers, [""] for none."""
    import torch

    return [str(n) for n in range(torch.cuda.device_count())] or [""]


def wanted(row: Row, patterns: str) -> bool:
    """Whether one of the globs, by comma, is the row's name."""
    name = row.name.partition("@")[0]
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("data", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("mini", "smol"):
        parser.add_argument(f"--{name}", type=Path, help="its folder; without, its rows are left out")
    parser.add_argument("--rows", default="*", help="their names or globs, by comma")
    parser.add_argument("--seeds", default="", help="of fits and healings, as 0,1")
    parser.add_argument("--more", default="", help="options of heal for every row, as '--minutes 0.1'")
    parser.add_argument("--fit", default="", help="the same of compress")
    parser.add_argument("--budget", help="of heal, in the place of --minutes, as '--steps 1900'")
    parser.add_argument("--fits", action="store_true", help="compress and evaluate, and end")
    parser.add_argument("--gpus", help="as 0,1")
    parser.add_argument("--blr", default=f"{sys.executable} -m blr.compressor")
    found = parser.parse_args()
    found.gpus = found.gpus.split(",") if found.gpus else visible_gpus()
    return found


def main() -> None:
    given = arguments()
    rows = [row.asked(given, seed) for row in ROWS for seed in given.seeds.split(",")]
    chosen = [row for row in rows if getattr(given, row.model) and wanted(row, given.rows)]
    table = Table(given, rows)
    with ThreadPoolExecutor(max(len(chosen), 1)) as pool:
        found = list(pool.map(table.run, chosen))
    text = "\n".join([*map(line, found), *spreads(found)])
    (given.out / "table.txt").write_text(text + "\n")
    print(text)
    sys.exit(any("error" in row for row in found))


if __name__ == "__main__":
    main()
