"""What a bound of intermediates costs on this GPU, and from which one on it is worth a rule.

    python scripts/bench/bound.py [--json FILE]

Of every case and bound: memory and time over the same low-rank model without one; beside them the
time of the host alone (until all is queued) and of the GPU alone (the forward pass as a CUDA graph),
which say who limits. The last lines are rules for configs/tuned/: the least bound that costs at most
5%, where it saves at least 10%.
"""

from __future__ import annotations

import argparse
import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from graphs import captured

from blr.compressor.bench.memory.models import find_subject
from blr.compressor.bench.memory.run import Arms, bounded, inputs_of, milliseconds
from blr.compressor.bench.memory.track import transient_bytes
from blr.kernels.common.available import gpu_key
from blr.kernels.common.tables import bucket

CASES = {
    "bert-base": ((64, 512), (64, 256), (64, 128), (16, 512)),
    "llama-7b": ((4, 1024), (4, 4096), (1, 16384)),
}
BOUNDS = (32, 48, 64, 96, 128, 160, 192, 256, 384, 512)
COST, SAVED = 1.05, 0.90
ROUNDS = 5
NAIVE = "naive"


def measured(models: Arms, arm: str, inputs: dict[str, Any], device: torch.device) -> dict[str, float]:
    """MiB and milliseconds of one arm: as called, the host's and the GPU's."""
    model = models.get(arm)
    with bounded(arm):
        run = partial(model, **inputs)
        run()
        mib = transient_bytes(run, device) / 2**20
        times, host = [], []
        for _ in range(ROUNDS):
            times.append(milliseconds(run, device))
            torch.cuda.synchronize()
            begun = perf_counter()
            run()
            host.append((perf_counter() - begun) * 1e3)
            torch.cuda.synchronize()
        found = {"mib": mib, "ms": median(times), "host": median(host)}
        with suppress(RuntimeError):  # what cannot be captured has no time of its own
            graph = captured(run)
            found["gpu"] = median(milliseconds(graph.replay, device) for _ in range(ROUNDS))
    torch.cuda.empty_cache()
    return found


def rows_of(models: Arms, batch: int, length: int, device: torch.device) -> list[dict[str, Any]]:
    """All bounds of one case; the unbounded arm first and last, the smaller of its times counts."""
    inputs = inputs_of(models.subject, batch, length, 0.0, device)
    arms = [NAIVE, *(f"ours-{bound}" for bound in BOUNDS), NAIVE]
    found = [measured(models, arm, inputs, device) for arm in arms]
    base = {key: min(found[0][key], found[-1][key]) for key in ("mib", "ms")}
    rows = []
    for arm, one in zip(arms[:-1], found, strict=False):
        ratios = {"memory": one["mib"] / base["mib"], "time": one["ms"] / base["ms"]}
        case = {"model": models.subject.name, "batch": batch, "length": length, "arm": arm}
        rows.append({**case, **one, **ratios})
        words = (f"{k}={v:.3g}" if isinstance(v, float) else str(v) for k, v in rows[-1].items())
        print(" ".join(words), flush=True)
    return rows


def rule(rows: list[dict[str, Any]], width: int) -> dict[str, Any] | None:
    """What a table would say of the case."""
    good = [r for r in rows if r["arm"] != NAIVE and r["time"] <= COST and r["memory"] <= SAVED]
    if not good:
        return None
    best = min(good, key=lambda r: r["memory"])
    n = bucket(best["batch"] * best["length"])
    mib = int(best["arm"].rpartition("-")[2])
    sizes = {"features": [width, width], "n": [n, n]}
    return {"structure": "forward", **sizes, "variant": "bounded", "config": {"mib": mib}}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device, found, rules = torch.device("cuda", 0), [], []
    for name, cases in CASES.items():
        subject = find_subject(name)
        models = Arms(subject, 0.5, False, device, torch.bfloat16)
        for batch, length in cases:
            rows = rows_of(models, batch, length, device)
            found += rows
            rules.append(rule(rows, subject.width))
        del models
        torch.cuda.empty_cache()
    print(f"rules of {gpu_key(device)}:")
    for made in rules:
        print(f"  - {json.dumps(made)}")
    if options.json:
        options.json.write_text(json.dumps({"rows": found, "rules": rules}))


if __name__ == "__main__":
    main()
