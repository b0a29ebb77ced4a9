"""Checks what the other scripts do not: other families, exports without `blr`, fallbacks, refusals.

    python scripts/feature_check.py [--device cuda|cpu] [--only NAME,...] [--processes 16]

One line a row as it ends, PASS, FAIL or SKIP (this machine lacks what it needs), the verdict last;
exit code 1 if any failed. `--only` takes names and patterns of tasks (`--list` prints them): exports,
encoders and commands work on copies of the bundled checkpoint and on random models, all made here.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from features.report import FAIL, PASS, SKIP, Row
from features.work import use_support
from processes import run_tasks

TASK_LIMIT = 300  # seconds, then the process that hangs is ended
FAMILIES, METHODS = ("qwen2", "qwen3", "mistral"), ("dense", "svd", "grouped", "monarch", "blast", "ks")
ENCODERS = ("bert", "bert-svd", "bert-monarch", "vit-blast", "vit-ks", "gpt2-base", "gpt2-svd")
ALONE = ("generate-profile",)  # after the others: it compares times
# hidden modules, environment, message
FALLBACKS: dict[str, tuple[tuple[str, ...], dict[str, str], str]] = {
    "no-triton": (("triton",), {}, "triton is not installed"),
    "no-kernels": ((), {"BLR_KERNELS": "torch"}, "BLR_KERNELS not torch"),
    "no-gpu": ((), {"CUDA_VISIBLE_DEVICES": ""}, "the model is not on a GPU"),
}


def all_tasks() -> dict[str, tuple[str, str, tuple[Any, ...]]]:
    """Name to module, function and arguments; what takes longest first."""
    tasks: dict[str, tuple[str, str, tuple[Any, ...]]] = {
        f"pt2-{name}": ("encoders", "check_compiled", (name,)) for name in ("bert", "vit-blast")
    }
    for method in ("blast", "svd", "monarch", "ks"):
        tasks[f"export-{method}"] = ("exports", "check_batches", (method,))
    for name, given in FALLBACKS.items():
        tasks[f"export-{name}"] = ("exports", "check_fallback", (name, *given))
    tasks["export-other-gpu"] = ("exports", "check_other_gpu", ())
    tasks["export-limits"] = ("exports", "check_limits", ("svd",))
    tasks["export-positions"] = ("exports", "check_positions", ())
    for name in ("stream", "profile", "refusals"):
        tasks[f"generate-{name}"] = ("commands", f"check_{name}", ())
    for family in FAMILIES:
        tasks |= {f"{family}-{method}": ("families", "check", (family, method)) for method in METHODS}
    return tasks | {f"captured-{name}": ("encoders", "check", (name,)) for name in ENCODERS}


def rows_of(name: str, work: Path, device: str) -> Iterator[Row]:
    """The rows of the task `name`, printed as they come."""
    from importlib import import_module

    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(TASK_LIMIT)
    module, function, arguments = all_tasks()[name]
    for row in getattr(import_module(f"features.{module}"), function)(work, device, *arguments):
        print(row, flush=True)
        yield row
    signal.alarm(0)


def prepare() -> None:
    """Processes share the cores: one thread each, and no progress bars."""
    use_support()
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def counted(outcomes: Iterator[tuple[Any, list[Row], str]]) -> dict[str, int]:
    """Verdict to number of rows; a task that broke is a failed row, printed here."""
    counts = dict.fromkeys((PASS, FAIL, SKIP), 0)
    for task, rows, broken in outcomes:
        if broken:
            rows = [*rows, Row(FAIL, task.args[0], f"after {len(rows)} rows: {broken}")]
            print(rows[-1], flush=True)
        for row in rows:
            counts[row.verdict] += 1
    return counts


def chosen(only: str) -> list[str]:
    """Names of tasks that any of the comma-separated `only` names or begins. Raises SystemExit."""
    patterns = [word.strip() for word in only.split(",") if word.strip()]
    names = [n for n in all_tasks() if any(n.startswith(p) or fnmatch(n, p) for p in patterns or ["*"])]
    if not names:
        sys.exit(f"--only {only}: no such task; there are {', '.join(all_tasks())}")
    return names


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--only", default="", help="Comma-separated names, beginnings or patterns.")
    parser.add_argument("--list", action="store_true", help="Print the names of all tasks.")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 16))
    return parser.parse_args()


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> int:
    given = arguments()
    if given.list:
        print("\n".join(all_tasks()))
        return 0
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not has_gpu():
        print("FAIL: --device cuda, and torch finds no GPU; take --device cpu for the rows without")
        return 1
    names, started = chosen(given.only), time.perf_counter()
    groups = [n for n in names if n not in ALONE], [n for n in names if n in ALONE]
    with tempfile.TemporaryDirectory() as work:
        tasks = [[partial(rows_of, name, Path(work), given.device) for name in g] for g in groups]
        counts = counted(chain(*(run_tasks(group, given.processes, prepare) for group in tasks)))
    seconds, failed = time.perf_counter() - started, counts[FAIL] or not counts[PASS]
    told = ", ".join(f"{number} {verdict}" for verdict, number in counts.items())
    print(f"{FAIL if failed else PASS}: {told} in {seconds:.0f} s, {given.processes} processes")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
