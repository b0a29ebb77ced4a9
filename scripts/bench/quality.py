"""Compresses and evaluates many configurations by the real command line, several at a time.

    python scripts/bench/quality.py CONFIGS.json --out FOLDER [--jobs 4] [--blr "blr"]

CONFIGS.json is a list of {"name", "model", "compress": [options], "eval": [[options], …]}. Prints a
line a configuration as it is done: its CF, seconds and what each evaluation gave; the last line is
all of them as JSON.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any


def run(command: list[str]) -> dict[str, Any]:
    """The JSON object that a command prints, or its error."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    return json.loads(lines[-1])


def measure(config: dict[str, Any], blr: list[str], out: Path) -> dict[str, Any]:
    """One row: what compressing and evaluating gave."""
    folder = out / config["name"]
    row: dict[str, Any] = {"name": config["name"]}
    target, made = config["model"], False
    if config.get("compress") is not None:
        options = [
            *config["compress"],
            "-o",
            str(folder),
            "--overwrite",
            "-q",
            "--format",
            "json",
            "--force",
        ]
        done = run([*blr, "compress", config["model"], *options])
        row |= {key: done[key] for key in ("cf", "seconds", "error") if key in done}
        target, made = str(folder), "error" not in done
    for options in config["eval"]:
        if "error" not in row:
            found = run([*blr, "eval", target, *options, "-q", "--format", "json"])
            row.setdefault("eval", []).append(found.get("perplexity", found.get("spearman", found)))
    if made and not config.get("keep"):  # what blr refused to replace is somebody's
        shutil.rmtree(folder)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("configs", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--blr", default="blr", help="the command to run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    configs = json.loads(arguments.configs.read_text())
    blr, rows = shlex.split(arguments.blr), []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for done in as_completed([pool.submit(measure, c, blr, arguments.out) for c in configs]):
            rows.append(done.result())
            print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(sorted(rows, key=lambda row: str(row["name"]))))


if __name__ == "__main__":
    main()
