"""What compression loses and healing brings back, in nats a token over the dense model, by domain.

    python scripts/bench/heal_table.py MODEL --eval prose=FILE --eval wiki=FILE --train FILE --out FOLDER
        [--settings 'blast-*'] [--minutes 3] [--gpus 0,0] [--blr 'python -m blr.compressor']

Every setting compresses MODEL (calibrated on --train and the model's own text), evaluates, heals on each
of --heal-on, evaluates. A line of JSON a setting goes to FOLDER/table.jsonl as it is done: `nats` by
domain over `dense` (perplexities), before (`of` empty) or after healing; what was done before is not
done again. --gpus names one for every job at a time, the same one twice for two jobs on it. Texts
may be .xz. --list prints the settings.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import lzma
import math
import shlex
import shutil
import sys
from pathlib import Path
from threading import Lock

from healing import Bench, Row

# Options of `blr compress` by name; CALIBRATED are added to each.
SETTINGS = {
    "blast-cf2": ["--method", "blast", "--blocks", "16", "--cf", "2"],
    "blast-cf1.5": ["--method", "blast", "--blocks", "16", "--cf", "1.5"],
    "svd-cf2": ["--method", "svd", "--cf", "2"],
    "svd-cf1.5": ["--method", "svd", "--cf", "1.5"],
    "monarch-cf2": ["--method", "monarch", "--cf", "2"],
    "ks-cf2": ["--method", "ks", "--cf", "2"],
}
HEAL_ON = {"text": ["--mix", "0"], "mixed": [], "self": []}  # beside --data


class Table(Bench):
    """The bench, whose lines are losses over the dense model's."""

    lock = Lock()
    dense: Row

    def measure_dense(self) -> None:
        gpu = self.free.get()
        self.dense = self.evaluate(gpu, Path(self.config["teacher"]))
        self.free.put(gpu)
        if wrong := [value for value in self.dense.values() if not isinstance(value, float)]:
            sys.exit(f"the dense model: {wrong[0]}")

    def nats(self, found: Row) -> Row:
        """Loss a token over the dense model's, by domain."""
        return {
            name: round(math.log(value / self.dense[name]), 4) if isinstance(value, float) else value
            for name, value in found.items()
        }

    def tell(self, row: Row) -> None:
        kept = ("name", "of", "error", "cf", "factor", "steps", "best_step", "parameters")
        line = {key: row[key] for key in kept if key in row}
        line |= {"nats": self.nats(row.get("eval", {})), "perplexity": row.get("eval", {})}
        line |= {"dense": self.dense, "seconds": round(row.get("wall", 0.0), 1)}
        line |= {k: round(row[k], 1) for k in ("trained_seconds",) if k in row}
        line |= {k: {n: m["kl"] for n, m in row[k].items()} for k in ("before", "after") if k in row}
        line |= {"notes": row.get("notes", []), "options": row.get("heal", [])}
        with self.lock, open(self.out / "table.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def plain_text(path: Path, out: Path) -> Path:
    """`path`, or what it is unpacked to."""
    if path.suffix != ".xz":
        return path
    target = out / path.stem
    if not target.exists():
        with lzma.open(path) as packed, open(target, "wb") as file:
            shutil.copyfileobj(packed, file)
    return target


def settings(given: argparse.Namespace, train: Path) -> Row:
    """What `Bench` is told."""
    calibrated = ["--calibration", str(train), *shlex.split(given.calibrate)]
    chosen = [n for n in SETTINGS if any(fnmatch.fnmatch(n, p) for p in given.settings.split(","))]
    compressed: Row = {name: [*SETTINGS[name], *calibrated, "--offline"] for name in chosen}
    for name in chosen:
        if (given.out / name / "blr_manifest.json").exists():
            compressed[name] = str(given.out / name)
    evals = dict(pair.split("=", 1) for pair in given.eval)
    budget = ["--minutes", f"{given.minutes:g}", *shlex.split(given.heal), "--offline"]
    runs = []
    for name in chosen:
        for kind in given.heal_on.split(","):
            data = ["--data", "self"] if kind == "self" else ["--data", str(train), *HEAL_ON[kind]]
            runs.append({"name": f"{name}-healed-{kind}", "of": name, "heal": [*data, *budget]})
    options = ["--max-tokens", str(given.eval_tokens), "--offline"]
    done = {run["name"] for run in runs if (given.out / run["name"]).exists()}
    return {
        "teacher": str(given.model),
        "eval": {name: ["--text", file, *options] for name, file in evals.items()},
        "compressed": compressed,
        "runs": [run for run in runs if run["name"] not in done],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--eval", action="append", default=[], help="NAME=FILE, repeatable")
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", default="*", help="their names or globs, by comma")
    parser.add_argument("--also", action="append", default=[], help="NAME=OPTIONS of blr compress")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--heal-on", default="mixed,self", help="of text, mixed, self")
    parser.add_argument("--calibrate", default="--samples 512 --mix 0.67", help="more for compress")
    parser.add_argument("--heal", default="", help="more options of heal")
    parser.add_argument("--eval-tokens", type=int, default=65536)
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--blr", default="blr")
    parser.add_argument("--until", type=float, default=1e9, help="seconds after which nothing starts")
    parser.add_argument("--list", action="store_true")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    for name, _, said in (also.partition("=") for also in given.also):
        SETTINGS[name] = shlex.split(said)
    if given.list:
        print("\n".join(f"{name}: {shlex.join(options)}" for name, options in SETTINGS.items()))
        return
    given.out.mkdir(parents=True, exist_ok=True)
    config = settings(given, plain_text(given.train, given.out))
    gpus = [int(gpu) for gpu in given.gpus.split(",")]
    bench = Table(config, given.out, gpus, shlex.split(given.blr), given.until)
    bench.measure_dense()
    found = bench.run()
    sys.exit(any("error" in row for row in [*found["compressed"], *found["runs"]]))


if __name__ == "__main__":
    main()
