"""Kronecker-sparse kernels against torch on a stratified part of the published grid, on one GPU.

    OUT=folder python scripts/bench/ks_probe.py [--seconds 100] [--rows 25088] [--kinds half tf32 fp32]

For each pattern (a, b, c, d) and arithmetic: every arm is checked against float64 on the first
and last rows, then all are timed in turn (CUDA events, median of 5 rounds). Baselines: bmm with
torch's permutations, einsum, dense where it can win, BSR on a few patterns. Kernels are compiled
before by parallel processes. One line a pattern; $OUT/ks_probe.json has every arm and the last
line of the output is a JSON summary. An arm whose check fails is named and gets no time.
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

from blr.kernels.kronecker import choose
from blr.kernels.kronecker.reference import kronecker_factor as reference
from blr.kernels.kronecker.variants import (
    bmm_factor,
    densify,
    kronecker_chain,
    kronecker_factor,
    relayout,
)

PATTERNS = [
    *[(1, 48, 48, 4), (64, 64, 64, 4), (4, 64, 64, 16), (2, 128, 128, 16), (8, 128, 128, 4)],
    *[(1, 256, 256, 16), (1, 96, 384, 64), (2, 64, 64, 64), (4, 256, 64, 16), (1, 1024, 1024, 4)],
    *[(16, 48, 192, 4), (4, 192, 192, 4), (1, 192, 48, 2), (1, 768, 768, 16), (2, 96, 96, 64)],
    *[(1, 512, 128, 24), (1, 128, 128, 96), (1, 256, 256, 3), (1, 512, 512, 6), (3, 384, 384, 4)],
    *[(32, 96, 96, 4), (1, 64, 256, 128), (2, 768, 768, 4), (1, 256, 1024, 12), (6, 64, 64, 1)],
]
CHAINS = {
    "ViT-S square": [(1, 192, 48, 2), (2, 48, 192, 1)],
    "ViT-S up": [(1, 768, 192, 2), (6, 64, 64, 1)],
    "ViT-S down": [(6, 64, 256, 1), (1, 128, 128, 3)],
    "GPT-2 medium down": [(1, 64, 256, 16), (64, 64, 64, 1)],
}
BSR = [(64, 64, 64, 4), (2, 128, 128, 16), (4, 64, 64, 16)]
DTYPES = {"half": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32}
# Relative Frobenius error: rounding of the operands (2^-8 bf16; TF32 truncates to 2^-10) with a
# margin of some units; sums in fp32 over up to 1024 terms.
LIMITS = {"half": 1e-2, "tf32": 3e-3, "fp32": 6e-6}
# (G, BN, BB, BC, warps, stages) of the grouped kernel to try beside the default.
TILES = {
    "half": [
        *[(8, 64, 64, 32, 8, 2), (8, 64, 32, 32, 8, 3), (4, 64, 64, 32, 8, 3), (4, 128, 64, 32, 8, 3)],
        *[(4, 64, 32, 32, 4, 3), (2, 128, 128, 32, 8, 3), (2, 64, 64, 32, 4, 4)],
    ],
    "tf32": [
        *[(4, 64, 64, 16, 8, 3), (4, 128, 64, 16, 8, 3), (8, 64, 32, 16, 8, 3), (4, 64, 32, 16, 4, 4)],
        *[(2, 128, 128, 16, 8, 3), (2, 64, 64, 32, 4, 3)],
    ],
    "fp32": [
        *[(4, 64, 64, 16, 8, 3), (4, 128, 64, 16, 8, 2), (4, 64, 32, 16, 4, 3), (8, 64, 32, 16, 8, 2)],
        *[(2, 128, 128, 16, 8, 3), (2, 64, 64, 16, 4, 3)],
    ],
    "tf32x3": [
        (4, 64, 64, 16, 8, 3),
        (4, 128, 32, 16, 8, 3),
        (4, 64, 32, 16, 4, 3),
        (2, 128, 64, 16, 8, 3),
    ],
}
Arm = Callable[[], Tensor]


def grouped_tiles(d: int, kind: str) -> list[dict[str, Any]]:
    """The configurations of TILES whose group is not wider than d needs."""
    widest = choose.power_of_two(d, 2, 8)
    names = ("G", "BN", "BB", "BC", "num_warps", "num_stages")
    tiles = [t for t in TILES[kind] if t[0] <= widest and (d == 2 or t[0] > 2)]
    return [{"path": "grouped", "GROUP_N": 1, **dict(zip(names, t, strict=True))} for t in tiles]


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
    """Torch's ways; dense only where its own arithmetic takes less than four times algorithm 1's."""
    a, b, c, d = w.shape
    n, size = x.shape[0], x.element_size()
    xv = x.view(n, a, c, d)
    arms: dict[str, Arm] = {
        "bmm": lambda: bmm_factor(x, w, tf32=kind == "tf32"),
        "einsum": lambda: torch.einsum("nakl,abkl->nabl", xv, w).reshape(n, a * b * d),
    }
    sparse = (
        2 * n * w.numel() / choose.H200.flops(kind) + 3 * n * a * d * (b + c) * size / choose.H200.copy
    )
    if 2 * n * w.numel() * a * d / choose.H200.flops(kind) < 4 * sparse and a * d <= 512:
        k = dense_matrix(w)
        arms["dense"] = lambda: torch.nn.functional.linear(x, k)
    if tuple(w.shape) in BSR:
        arms["bsr"] = bsr_arm(x, w)
    return arms


def ours(x: Tensor, w: Tensor, kind: str) -> dict[str, Arm]:
    """Every variant and configuration, by name; "chosen" is what a user gets."""
    a, b, c, d = w.shape
    tf32 = kind == "tf32"

    def fused(precision: str | None = None, **config: Any) -> Arm:
        return lambda: kronecker_factor(x, w, tf32=tf32, precision=precision, variant="fused", **config)

    arms = {
        "chosen": lambda: kronecker_factor(x, w, tf32=tf32),
        "fused": fused(),
        "permute": lambda: kronecker_factor(x, w, tf32=tf32, variant="permute"),
    }
    if d > 1:
        arms |= {label(t): fused(**t) for t in grouped_tiles(d, kind)}
    if d > 1 and kind == "fp32":
        arms |= {"3x " + label(t): fused("tf32x3", **t) for t in grouped_tiles(d, "tf32x3")}
    if d % 2 == 0 and kind != "fp32" and b * c <= 192 * 192:
        problem = choose.Problem(a, b, c, d, x.shape[0], kind, prepared=True)
        config = choose.dense_config(problem)
        arms[f"dense-run G{config['G']}"] = fused(prepared=densify(w, config["G"]), **config)
    return arms


def label(tile: dict[str, Any]) -> str:
    return "G{G} {BN}x{BB}x{BC} w{num_warps} s{num_stages}".format(**tile)


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


def timed(arms: dict[str, Arm], rounds: int = 5) -> dict[str, float]:
    """Median milliseconds of each arm, the arms taking turns; short arms repeat within a round."""
    samples: dict[str, list[float]] = {name: [] for name in arms}
    repeats = dict.fromkeys(arms, 1)
    for turn in range(rounds + 1):
        for name, arm in arms.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats[name]):
                arm()
            stop.record()
            stop.synchronize()
            elapsed = start.elapsed_time(stop) / repeats[name]
            if turn == 0:
                repeats[name] = max(1, min(20, int(1.0 / max(elapsed, 1e-3))))
            else:
                samples[name].append(elapsed)
    return {name: statistics.median(s) for name, s in samples.items()}


def measure(pattern: tuple[int, int, int, int], kind: str, rows: int) -> dict[str, Any]:
    """One pattern in one arithmetic: times of all arms, the choice, failures, the roofline."""
    torch.backends.cuda.matmul.allow_tf32 = kind == "tf32"
    x, w = inputs(pattern, kind, rows)
    errors: dict[str, str] = {}
    base = baselines(x, w, kind)
    ms = timed(checked({**base, **ours(x, w, kind)}, x, w, kind, errors))
    a, b, c, d = pattern
    traffic = (x.numel() + rows * a * b * d + w.numel()) * x.element_size()
    floor = max(traffic / choose.H200.copy, 2 * rows * w.numel() / choose.H200.flops(kind))
    variant, config = choose.choose(choose.Problem(a, b, c, d, rows, kind))
    del x, w, base
    torch.cuda.empty_cache()
    base_ms = {name: t for name, t in ms.items() if name in ("bmm", "einsum", "dense", "bsr")}
    own = {name: t for name, t in ms.items() if name not in base_ms}
    return {
        **{"pattern": pattern, "kind": kind, "floor_ms": floor * 1e3, "h": choose.h(b, c)},
        **{"baseline": base_ms, "ours": own, "variant": variant, "config": config, "errors": errors},
    }


def speedups(result: dict[str, Any]) -> dict[str, float]:
    """Best baseline over the chosen variant, over the best without and with emulated fp32."""
    if not result["baseline"] or "chosen" not in result["ours"]:
        return {}
    best = min(result["baseline"].values())
    exact = {name: t for name, t in result["ours"].items() if not name.startswith("3x")}
    return {
        "chosen": best / result["ours"]["chosen"],
        "best": best / min(exact.values()),
        "best3x": best / min(result["ours"].values()),
    }


def line(result: dict[str, Any]) -> str:
    """One line of the table: the best baseline, ours in order of time, speedups."""
    gain = speedups(result)
    name = " ".join(map(str, result["pattern"]))
    if not gain:
        return f"{name:>16} {result['kind']:5} FAILED {result['errors']}"
    base = min(result["baseline"], key=result["baseline"].get)
    tiles = {k: v for k, v in result["ours"].items() if k not in ("chosen", "fused", "permute")}
    order = sorted(tiles, key=tiles.get)[:3]
    cells = [f"{name:>16} {result['kind']:5} floor {result['floor_ms']:6.3f}"]
    cells += [f"{base} {result['baseline'][base]:7.3f} | {result['variant']:7} x{gain['chosen']:4.2f}"]
    cells += [f"best x{gain['best']:4.2f} 3x x{gain['best3x']:4.2f} |"]
    cells += [f"{k} {result['ours'][k]:6.3f}" for k in ("fused", "permute") if k in result["ours"]]
    cells += ["| " + ", ".join(f"{k} {tiles[k]:6.3f}" for k in order)]
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


def compile_arms(job: tuple[str, tuple[int, int, int, int]]) -> None:
    """Run every arm of one pattern once on a few rows, so that its kernels are in Triton's cache."""
    kind, pattern = job
    x, w = inputs(pattern, kind, 128)
    for arm in ours(x, w, kind).values():
        try:
            arm()
        except Exception:  # reported by `checked`, which meets it again
            torch.cuda.empty_cache()


def warm(kinds: list[str], workers: int) -> None:
    """`compile_arms` in parallel processes, the slowest to compile (fp32) first."""
    jobs = [(kind, pattern) for kind in sorted(kinds) for pattern in PATTERNS]
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for _ in pool.imap_unordered(compile_arms, jobs, chunksize=1):
            pass


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Per arithmetic: share of patterns won and median speedup where won."""
    table = {}
    for kind in DTYPES:
        gains = [g for r in results if r["kind"] == kind and (g := speedups(r))]
        for key in ("chosen", "best", "best3x"):
            won = [g[key] for g in gains if g[key] > 1]
            if gains:
                median = statistics.median(won) if won else None
                table[f"{kind} {key}"] = {
                    "won": len(won) / len(gains),
                    "median": median,
                    "of": len(gains),
                }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--rows", type=int, default=25088)
    parser.add_argument("--kinds", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--workers", type=int, default=15)
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    warm(options.kinds, options.workers)
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
