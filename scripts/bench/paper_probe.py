"""Checks and times the paper's kernels ❶–❺ on one GPU, in bf16.

    python scripts/bench/paper_probe.py [--seconds 10] [--only NAME]

Every arm is compared with float64 before it is timed (an arm that is wrong is not timed). Then the
arms of a shape take turns, L2 flushed before each, and the median CUDA-event time is reported: of a
CUDA graph of the arm (the GPU's time), and eager, where the host may be the slower one.
Compact table on standard output, the last line is JSON; the same JSON in $OUT/paper_probe.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from blr.kernels.blast.fused_mix import fused_mix
from blr.kernels.blast.reference import blast_linear
from blr.kernels.blast.transposed import transposed
from blr.kernels.monarch.reference import monarch_linear
from blr.kernels.monarch.staged import staged

BLOCKS = 16
SHAPES = [  # n, in, out, BLAST rank (CF 2), Monarch rank
    (1024, 4096, 4096, 992, 1024),
    (4096, 4096, 4096, 992, 1024),
    (1024, 4096, 11008, 1488, 1536),
    (4096, 4096, 11008, 1488, 1536),
]
TOLERANCE = 2.4e-2  # bf16, as in tests/support/tolerances.py
SAMPLE = 48  # tokens at either end that are compared with float64
Arm = Callable[[], Tensor]


def tile(m: int, n: int, k: int, warps: int, stages: int) -> dict[str, int]:
    return {"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": k, "num_warps": warps, "num_stages": stages}


def mixing(b: int, n: int, r: int, p: int, warps: int, stages: int) -> dict[str, int]:
    names = ("BLOCK_B", "BLOCK_N", "BLOCK_R", "BLOCK_P", "num_warps", "num_stages")
    return dict(zip(names, (b, n, r, p, warps, stages), strict=True))


WIDE, SQUARE, DEEP = tile(128, 256, 64, 8, 3), tile(128, 128, 64, 4, 3), tile(128, 128, 64, 8, 4)
CONFIGS: dict[str, dict[str, Any]] = {
    "staged": {
        "default": {},
        "wide": {"first": WIDE, "second": WIDE},
        "deep": {"first": DEEP, "second": DEEP},
        "chunk1024": {"chunk": 1024, "second": SQUARE},
    },
    "transposed": {
        "default": {},
        "wide r4n128": {"first": WIDE, "middle": {"BLOCK_R": 4, "BLOCK_N": 128}, "last": WIDE},
        "deep r4n64": {"first": DEEP, "middle": {"BLOCK_R": 4, "BLOCK_N": 64}, "last": DEEP},
        "chunk1024": {"chunk": 1024, "last": SQUARE},
    },
    "fused_mix": {
        "default": {},
        "p128": {"first": mixing(16, 64, 32, 128, 8, 4)},
        "half": {"first": mixing(8, 64, 64, 128, 8, 4)},
        "small": {"first": mixing(8, 64, 32, 128, 4, 3)},
    },
}


def random(*size: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(size, device="cuda") * scale).bfloat16()


def ends(tokens: Tensor) -> Tensor:
    """The first and the last SAMPLE rows, in float64."""
    return torch.cat([tokens[:SAMPLE], tokens[-SAMPLE:]]).double()


def linear_arms(n: int, i: int, o: int, rank: int, monarch_rank: int) -> dict[str, tuple[Arm, Tensor]]:
    """name: (call, float64 result for the tokens of `ends`) of all variants at one shape."""
    p, q = i // BLOCKS, o // BLOCKS
    x, bias, dense = random(n, i), random(o), random(o, i, scale=i**-0.5)
    U, S = random(BLOCKS, q, rank, scale=rank**-0.5), random(BLOCKS, BLOCKS, rank, scale=0.25)
    V = random(BLOCKS, rank, p, scale=p**-0.5).transpose(1, 2)  # stored [b, r, p]
    mU = random(BLOCKS, q, monarch_rank, scale=monarch_rank**-0.5)
    mV = random(BLOCKS, monarch_rank, p, scale=p**-0.5).transpose(1, 2)

    def exact(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return function(ends(x), *(t.double() for t in tensors))

    blast, monarch = exact(blast_linear, U, S, V, bias), exact(monarch_linear, mU, mV, bias)
    arms = {
        "dense": (partial(F.linear, x, dense, bias), exact(F.linear, dense, bias)),
        "blast torch": (partial(blast_linear, x, U, S, V, bias), blast),
        "monarch torch": (partial(monarch_linear, x, mU, mV, bias), monarch),
    }
    for name, config in CONFIGS["staged"].items():
        arms[f"staged {name}"] = (partial(staged, x, mU, mV, bias, **config), monarch)
    for variant in (transposed, fused_mix):
        for name, config in CONFIGS[variant.__name__].items():
            arms[f"{variant.__name__} {name}"] = (partial(variant, x, U, S, V, bias, **config), blast)
    return arms


def error_of(call: Arm, exact: Tensor) -> float | str:
    """Relative error of the tokens of `ends`, or why the arm cannot run here."""
    try:
        found = ends(call())
    except Exception as error:  # a configuration too large for this card is a result, not a crash
        return f"{type(error).__name__}: {str(error)[:80]}"
    return float((found - exact).norm() / exact.norm())


def graph_of(call: Arm) -> Callable[[], object]:
    """Replays one call, captured after the warm-up that the check was."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def times(calls: dict[str, Callable[[], object]], seconds: float, most: int) -> dict[str, list[float]]:
    """Sorted milliseconds a call, arms taking turns, for about `seconds`: 5 to `most` rounds."""
    flush = torch.empty(64 << 20, dtype=torch.int32, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    started, rounds = time.monotonic(), 0
    while rounds < 5 or (time.monotonic() - started < seconds and rounds < most):
        for name, call in calls.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            events[name].append((begin, end))
        torch.cuda.synchronize()
        rounds += 1
    return {name: sorted(b.elapsed_time(e) for b, e in pairs) for name, pairs in events.items()}


def measure(
    title: str, arms: dict[str, tuple[Arm, Tensor]], seconds: float, only: str
) -> dict[str, Any]:
    """Checks and times the arms of one shape; prints a row for each."""
    first = next(iter(arms))
    arms = {name: arm for name, arm in arms.items() if only in name or name == first}
    errors = {name: error_of(*arm) for name, arm in arms.items()}
    good = {n: arms[n][0] for n, e in errors.items() if isinstance(e, float) and e < TOLERANCE}
    replayed = times({name: graph_of(call) for name, call in good.items()}, seconds, 40)
    eager = times(dict(good), seconds / 4, 10)
    rows: dict[str, Any] = {}
    print(
        f"{title}\n  {'arm':23} {'graph ms':>8} {'p10':>7} {'p90':>7} {'× first':>7} {'eager':>7}  error"
    )
    for name, error in errors.items():
        if name not in good:
            print(f"  {name:23} FAILED {error}")
            rows[name] = {"failed": error}
            continue
        low, mid, high = (replayed[name][int(len(replayed[name]) * part)] for part in (0.1, 0.5, 0.9))
        row = {"ms": mid, "p10": low, "p90": high, "error": error}
        row["eager_ms"] = eager[name][len(eager[name]) // 2]
        ratio = rows[first]["ms"] / mid if rows and "ms" in rows[first] else 1.0
        figures = f"{mid:8.4f} {low:7.4f} {high:7.4f} {ratio:7.2f} {row['eager_ms']:7.4f}"
        print(f"  {name:23} {figures}  {error:.1e}")
        rows[name] = row
    return rows


def compile_all() -> None:
    """Fills Triton's cache on all cores: one process an arm, each of which checks its arm and ends."""
    names = [f"{variant} {name}" for variant, configs in CONFIGS.items() for name in configs]
    command = [sys.executable, __file__, "--check-only", "--only"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for child in [subprocess.Popen([*command, name], **quiet) for name in names]:
        child.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="of timing; compilation comes on top"
    )
    parser.add_argument("--only", default="", help="arms whose name contains this (and the first)")
    parser.add_argument("--check-only", action="store_true", help="compile and run each arm once")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("paper_probe: no CUDA device; run it on a machine with a GPU")
    torch.manual_seed(0)
    started = time.monotonic()
    jobs: dict[str, Callable[[], dict[str, tuple[Arm, Tensor]]]] = {
        f"n={s[0]} {s[1]}→{s[2]} b={BLOCKS} r={s[3]} (Monarch {s[4]})": partial(linear_arms, *s)
        for s in SHAPES
    }
    if options.check_only:
        for arms in jobs.values():
            print({name: error_of(*arm) for name, arm in arms().items() if options.only in name})
        return
    if not options.only:
        compile_all()
    results: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for title, arms in jobs.items():
        results[title] = measure(title, arms(), options.seconds / len(jobs), options.only)
    results["seconds"] = round(time.monotonic() - started, 1)
    text = json.dumps(results)
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "paper_probe.json").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
