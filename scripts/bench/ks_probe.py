"""Kronecker-sparse kernels against torch on a stratified part of the published grid, on one GPU.

    OUT=folder python scripts/bench/ks_probe.py [--seconds 70] [--rows 25088] [--kinds half tf32 fp32]

For each pattern (a, b, c, d) and arithmetic: every arm is checked against float64 on the first
and last rows, then all are timed in turn (median of 5 rounds), short ones as CUDA graphs where
they can be captured, so that launches do not hide kernels. Baselines: bmm with torch's
permutations, einsum, dense where it can win, BSR on a few patterns. Ours: "auto" (what a user
gets), each variant, and the fused kernel of the least estimate. Kernels are compiled before by
parallel processes. One line a pattern; $OUT/ks_probe.json has every arm and the last line of the
output is a JSON summary. An arm whose check fails is named and gets no time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blr.kernels.kronecker.choose import choose, estimates, h
from blr.kernels.kronecker.cost import H200, Problem
from blr.kernels.kronecker.products import bmm_factor
from blr.kernels.kronecker.reference import kronecker_factor as reference
from blr.kernels.kronecker.variants import densify, kronecker_chain, kronecker_factor, relayout

PATTERNS = [
    *[(1, 48, 48, 4), (64, 64, 64, 4), (4, 64, 64, 16), (2, 128, 128, 16), (8, 128, 128, 4)],
    *[(1, 256, 256, 16), (1, 96, 384, 64), (2, 64, 64, 64), (4, 256, 64, 16), (1, 1024, 1024, 4)],
    *[(16, 48, 192, 4), (4, 192, 192, 4), (1, 192, 48, 2), (1, 768, 768, 16)],
    *[(1, 512, 128, 24), (1, 128, 128, 96), (1, 256, 256, 3), (1, 512, 512, 6), (3, 384, 384, 4)],
    *[(32, 96, 96, 4), (1, 64, 256, 128), (2, 768, 768, 4), (1, 256, 1024, 12), (6, 64, 64, 1)],
]
CHAINS = {
    "ViT-S square": [(1, 192, 48, 2), (2, 48, 192, 1)],
    "ViT-S up": [(1, 768, 192, 2), (6, 64, 64, 1)],
    "ViT-S down": [(1, 128, 128, 3), (6, 64, 256, 1)],
    "GPT-2 medium down": [(1, 64, 256, 16), (64, 64, 64, 1)],
}
BSR = [(64, 64, 64, 4), (2, 128, 128, 16), (4, 64, 64, 16)]
DTYPES = {"half": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
# Relative Frobenius error: rounding of the operands (2^-8 bf16; TF32 truncates to 2^-10) with a
# margin of some units; sums in fp32 over up to 1024 terms.
LIMITS = {"half": 1e-2, "tf32": 3e-3, "fp32": 6e-6}
SHORT_MS = 5.0  # arms up to here are timed as graphs
UNCAPTURED = ("bsr",)  # torch reads the structure of sparse tensors on the host
Arm = Callable[[], Tensor]


def inputs(pattern: tuple[int, ...], kind: str, rows: int) -> tuple[Tensor, Tensor]:
    """x [rows, a·c·d] and w [a, b, c, d], stored [a, d, b, c], on the GPU."""
    a, _, c, d = pattern
    x = torch.randn(rows, a * c * d, device="cuda", dtype=DTYPES[kind])
    return x, relayout(torch.randn(pattern, device="cuda", dtype=DTYPES[kind]) / c**0.5)


def dense_matrix(w: Tensor) -> Tensor:
    """K [a·b·d, a·c·d]."""
    block = densify(w, w.shape[3])[..., 0]  # [a, b·d, c·d]
    return torch.block_diag(*block)


def bsr_arm(x: Tensor, w: Tensor) -> Arm:
    """Algorithm 1 with the block-diagonal matrix in BSR."""
    a, b, c, d = w.shape
    ids = torch.arange(a * d, device="cuda", dtype=torch.int32)
    rows = torch.arange(a * d + 1, device="cuda", dtype=torch.int32)
    values = w.permute(0, 3, 1, 2).reshape(a * d, b, c)
    k = torch.sparse_bsr_tensor(rows, ids, values, size=(a * d * b, a * d * c))

    def run() -> Tensor:
        xs = x.unflatten(1, (a, c, d)).transpose(2, 3).reshape(x.shape[0], -1)
        y = torch.nn.functional.linear(xs, k)
        return y.unflatten(1, (a, d, b)).transpose(2, 3).reshape(x.shape[0], -1)

    return run


def baselines(x: Tensor, w: Tensor, kind: str) -> dict[str, Arm]:
    """Torch's ways; dense only where its arithmetic takes less than four times "permute"."""
    a, b, c, d = w.shape
    n = x.shape[0]
    xv = x.view(n, a, c, d)
    arms: dict[str, Arm] = {
        "bmm": lambda: bmm_factor(x, w, tf32=kind == "tf32"),
        "einsum": lambda: torch.einsum("nakl,abkl->nabl", xv, w).reshape(n, a * b * d),
    }
    permuted = estimates(Problem(a, b, c, d, n, kind))["permute"][0]
    if 2 * n * w.numel() * a * d / H200.library[kind] < 4 * permuted and a * d <= 512:
        k = dense_matrix(w)
        arms["dense"] = lambda: torch.nn.functional.linear(x, k)
    if tuple(w.shape) in BSR:
        arms["bsr"] = bsr_arm(x, w)
    return arms


def ours(x: Tensor, w: Tensor, kind: str, rows: int) -> dict[str, Arm]:
    """What a user gets ("auto"), each variant that can come near it at `rows`, one fused kernel."""
    p = Problem(*w.shape, rows, kind)
    ways = estimates(p)
    limit = 3 * min(seconds for seconds, _ in ways.values())

    def arm(variant: str | None, **config: Any) -> Arm:
        return lambda: kronecker_factor(x, w, tf32=kind == "tf32", variant=variant, **config)

    arms = {"auto": arm(None), "permute": arm("permute")}
    arms |= {v: arm(v) for v in ("blocks", "split") if v in ways and ways[v][0] < limit}
    fused = {name: way for name, way in ways.items() if "path" in way[1]}
    name = min(fused, key=lambda name: fused[name][0])
    if fused[name][0] < 10 * limit and kind != "fp32":
        arms[f"fused {name}"] = arm("fused", **fused[name][1])
    return arms


def checked(
    arms: dict[str, Arm], x: Tensor, w: Tensor, kind: str, errors: dict[str, str]
) -> dict[str, Arm]:
    """The arms that run and agree with float64 on the first and last 64 rows."""
    ends = torch.cat([x[:64], x[-64:]]).double()
    expected = reference(ends, w.double())
    good = {}
    for name, arm in arms.items():
        try:
            y = arm()
            got = torch.cat([y[:64], y[-64:]]).double()
            error = ((got - expected).norm() / expected.norm()).item()
            if error <= LIMITS[kind]:
                good[name] = arm
            else:
                errors[name] = f"error {error:.1e}"
        except Exception as failure:  # an arm that cannot run is a result of the probe
            errors[name] = f"{type(failure).__name__}: {str(failure).splitlines()[0][:100]}"
        y = got = None
    return good


def captured(arm: Arm, repeats: int) -> Arm | None:
    """`repeats` calls of an arm as one CUDA graph, or None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                arm()
    except RuntimeError:
        return None
    return graph.replay


def elapsed_ms(call: Callable[[], object], repeats: int) -> float:
    """Milliseconds of one of `repeats` calls, by events."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / repeats


def timed(arms: dict[str, Arm], rounds: int = 5) -> dict[str, float]:
    """Median milliseconds of each arm, the arms taking turns; short arms repeat within a round."""
    calls: dict[str, tuple[Callable[[], object], int, int]] = {}  # (call, repeats, arms in a call)
    for name, arm in arms.items():
        once = max(1e-3, min(elapsed_ms(arm, 1) for _ in range(2)))
        repeats = max(1, min(20, int(1.0 / once)))
        graph = captured(arm, repeats) if once < SHORT_MS and name not in UNCAPTURED else None
        calls[name] = (graph, 1, repeats) if graph else (arm, repeats, 1)
        if graph:
            graph()
    samples: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, (call, repeats, inside) in calls.items():
            samples[name].append(elapsed_ms(call, repeats) / inside)
    return {name: statistics.median(s) for name, s in samples.items()}


def measure(pattern: tuple[int, int, int, int], kind: str, rows: int) -> dict[str, Any]:
    """One pattern in one arithmetic: times of all arms, the choice, failures, the roofline."""
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    x, w = inputs(pattern, kind, rows)
    errors: dict[str, str] = {}
    base = baselines(x, w, kind)
    ms = timed(checked({**base, **ours(x, w, kind, rows)}, x, w, kind, errors))
    a, b, c, d = pattern
    traffic = (x.numel() + rows * a * b * d + w.numel()) * x.element_size()
    floor = max(traffic / H200.copy, 2 * rows * w.numel() / H200.library[kind])
    variant, config = choose(Problem(a, b, c, d, rows, kind))
    del x, w, base
    torch.cuda.empty_cache()
    base_ms = {name: t for name, t in ms.items() if name in ("bmm", "einsum", "dense", "bsr")}
    own = {name: t for name, t in ms.items() if name not in base_ms}
    return {
        **{"pattern": pattern, "kind": kind, "floor_ms": floor * 1e3, "h": h(b, c)},
        **{"baseline": base_ms, "ours": own, "variant": variant, "config": config, "errors": errors},
    }


def speedups(result: dict[str, Any]) -> dict[str, float]:
    """Best baseline over what a user gets and over the best of ours; {} if either is missing."""
    if not result["baseline"] or "auto" not in result["ours"]:
        return {}
    best = min(result["baseline"].values())
    return {"auto": best / result["ours"]["auto"], "best": best / min(result["ours"].values())}


def line(result: dict[str, Any]) -> str:
    """One line of the table: the best baseline, the choice, all of ours."""
    gain = speedups(result)
    name = " ".join(map(str, result["pattern"]))
    if not gain:
        return f"{name:>16} {result['kind']:5} FAILED {result['errors']}"
    base = min(result["baseline"], key=result["baseline"].get)
    cells = [f"{name:>16} {result['kind']:5} floor {result['floor_ms']:6.3f}"]
    cells += [f"{base} {result['baseline'][base]:7.3f} | {result['variant']:7} x{gain['auto']:5.2f}"]
    cells += [f"best x{gain['best']:5.2f} |"]
    cells += [f"{k} {v:6.3f}" for k, v in result["ours"].items()]
    cells += [f"! {k}: {v}" for k, v in result["errors"].items()]
    return " ".join(cells)


def chain_times(kind: str, rows: int) -> dict[str, dict[str, float]]:
    """The published chains: torch, ours with either layout in between."""
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    results = {}
    for name, patterns in CHAINS.items():
        factors = [inputs(p, kind, 1)[1] for p in patterns]
        last = patterns[-1]
        x = torch.randn(rows, last[0] * last[2] * last[3], device="cuda", dtype=DTYPES[kind])
        arms: dict[str, Arm] = {
            "bmm": lambda x=x, f=factors: kronecker_chain(x, f, variant="bmm"),
            "batch_first": lambda x=x, f=factors: kronecker_chain(x, f),
            "batch_last": lambda x=x, f=factors: kronecker_chain(x, f, intermediate="batch_last"),
        }
        results[name] = timed(arms)
    return results


def decode_times() -> dict[str, float]:
    """One factor with few rows in bf16: milliseconds of bmm and ours."""
    results = {}
    for pattern in ((16, 256, 256, 4), (1, 256, 256, 16), (16, 256, 256, 1)):
        for rows in (1, 2, 8):
            x, w = inputs(pattern, "half", rows)
            arms = {
                "bmm": lambda x=x, w=w: bmm_factor(x, w),
                "ours": lambda x=x, w=w: kronecker_factor(x, w),
            }
            for name, ms in timed(arms).items():
                results[f"{pattern} n={rows} {name}"] = ms
    return results


def compile_arms(job: tuple[str, tuple[int, int, int, int], int]) -> None:
    """Run every arm of one pattern once on a few rows, so that its kernels are in Triton's cache."""
    kind, pattern, rows = job
    x, w = inputs(pattern, kind, 128)
    for name, arm in ours(x, w, kind, rows).items():
        if name == "auto":  # chooses by the rows it gets
            continue
        try:
            arm()
        except Exception:  # reported by `checked`, which meets it again
            torch.cuda.empty_cache()


def warm(kinds: list[str], workers: int, rows: int) -> None:
    """`compile_arms` in parallel processes."""
    jobs = [(kind, pattern, rows) for kind in kinds for pattern in PATTERNS]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for _ in pool.imap_unordered(compile_arms, jobs, chunksize=1):
            pass


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Per arithmetic: share of patterns faster than the best baseline, median speedup where so, and
    the share where what a user gets is within a quarter of the best of ours."""
    table = {}
    for kind in DTYPES:
        gains = [g for r in results if r["kind"] == kind and (g := speedups(r))]
        for key in ("auto", "best") if gains else ():
            won = [g[key] for g in gains if g[key] > 1]
            table[f"{kind} {key}"] = {
                "won": len(won) / len(gains),
                "median": statistics.median(won) if won else None,
                "of": len(gains),
            }
        if gains:
            right = sum(g["best"] <= 1.25 * g["auto"] for g in gains)
            table[f"{kind} auto"]["near_best"] = right / len(gains)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=70.0)
    parser.add_argument("--rows", type=int, default=25088)
    parser.add_argument("--kinds", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--workers", type=int, default=15)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    warm(options.kinds, options.workers, options.rows)
    print(f"compiled, {end - time.monotonic():.0f} s left", flush=True)
    results = []
    for pattern in PATTERNS:
        for kind in options.kinds:
            if time.monotonic() > end - 8:
                break
            results.append(measure(pattern, kind, options.rows))
            print(line(results[-1]), flush=True)
    report: dict[str, Any] = {"results": results, "summary": summary(results)}
    if time.monotonic() < end - 4:
        report["chains"] = {kind: chain_times(kind, options.rows) for kind in options.kinds}
        report["decode"] = decode_times()
        print(json.dumps({"chains": report["chains"], "decode": report["decode"]}))
    (Path(os.environ["OUT"]) / "ks_probe.json").write_text(json.dumps(report))
    print(json.dumps(report["summary"]))


if __name__ == "__main__":
    main()
