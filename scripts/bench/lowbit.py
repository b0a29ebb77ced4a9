"""Stages of few bits at the shapes of an 8B model: every tile checked, then timed, on one GPU.

    python scripts/bench/lowbit.py -o lowbit.json [--seconds 110] [--only n1,corrected,n2,many,dense]

Each case is checked against the dequantized weights in a pool of processes, which compiles its kernel on
the way; then this process times those that are right: launches over copies of the weights that no cache
holds, in one CUDA graph with programmatic dependent launch, the least of rounds. `x floor` is time over
bytes at the speed of a large copy in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from graphs import captured
from torch import Tensor

from blr.kernels.decode.gemv.segments import Segment
from blr.kernels.decode.quantized.formats import form_of, packed_width
from blr.kernels.decode.quantized.segments import Correction, Narrow, QuantizedSegment

SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336))
NORMED = ((1024, 4096), (14336, 4096))  # rows, columns: after a norm, as q|k|v and gate|up
DEVICE, PDL = "cuda", True
ROTATED = 256 << 20  # bytes of weights that launches go through
LEAST = {8: 2e-2, 4: 2e-2, 3: 2e-2, 2: 2e-2, 16: 2e-2}  # largest relative error: bf16 numbers


@dataclass(frozen=True)
class Case:
    """kind: "rows", "ready" (the same of inputs in bf16 after their norm), "corrected" (one launch),
    "apart" (V in a launch before), "dual", "torch", "bytes" (products of bytes)."""

    kind: str
    rows: int
    K: int
    bits: int
    tokens: int = 1
    rank: int = 0
    group: int = 128
    config: tuple[tuple[str, int], ...] = ()

    @property
    def bytes(self) -> int:
        pairs = 2 if self.kind == "dual" else 1
        if self.bits == 16:
            return 2 * self.rows * self.K * pairs
        groups = -(-self.K // self.group)
        own = self.rows * (packed_width(self.K, self.bits, self.group) + 2 * groups)
        own += self.rank * (self.K // 2 + 2 * groups) + self.rows * (self.rank + 2)
        return own * pairs


def cases(only: set[str]) -> Iterator[Case]:
    for rows, K in SHAPES:
        if "dense" in only:
            for tokens in (1, 2, 4, 8, 16):
                yield Case("torch", rows, K, 16, tokens)
            for tokens in (4, 16):
                yield Case("rows", rows, K, 16, tokens)
                for BR, BK, warps in (
                    (16, 128, 4),
                    (16, 256, 4),
                    (32, 128, 4),
                    (32, 256, 4),
                    (64, 128, 4),
                ):
                    config = (("BR", BR), ("BK", BK), ("num_warps", warps))
                    yield Case("ready", rows, K, 16, tokens, config=config)
        for bits in (4, 2, 3, 8):
            for config in tiles(bits, K):
                if "n1" in only:
                    yield Case("rows", rows, K, bits, 1, config=config)
                if "n1" in only and bits != 3 and config[2][1] == 4:
                    yield Case("bytes", rows, K, bits, 1, config=(*config, ("BYTES", 1)))
                if "n2" in only and dict(config)["BR"] == 4:
                    yield Case("rows", rows, K, bits, 2, config=config)
            for tokens in (4, 16) if "many" in only else ():
                for BR, BQ, warps in ((32, 8, 8), (64, 8, 4), (32, 16, 4)):
                    config = (("BR", BR), ("BQ", BQ), ("num_warps", warps))
                    for kind in ("rows", "ready"):
                        yield Case(kind, rows, K, bits, tokens, config=config)
            for rank in (0, 16, 32, 64) if "corrected" in only and bits < 8 else ():
                for kind in ("corrected", "apart") if rank else ("rows",):
                    yield Case(kind, rows, K, bits, 1, rank)
                if rows > K:
                    yield Case("dual", rows, K, bits, 1, rank)


def tiles(bits: int, K: int) -> Iterator[tuple[tuple[str, int], ...]]:
    """Rows of a thread, quads of a chunk and warps."""
    quads = form_of(bits).quads(K)
    for warps, BQ in ((4, 64), (4, 128), (8, 128), (2, 64)):
        if 64 < BQ >= 2 * quads or (bits == 8 and BQ == 64):
            continue
        for deep in (4, 8) if warps > 2 else (4,):
            rows = deep * max(32 * warps // BQ, 1)
            yield ("BR", rows), ("BQ", BQ), ("num_warps", warps)


@cache
def weights(rows: int, K: int, bits: int, group: int, copies: int) -> list[tuple[Tensor, Tensor]]:
    """Random packed rows and scales that give them unit gain."""
    if bits == 16:
        like: dict[str, Any] = {"device": DEVICE, "dtype": torch.bfloat16}
        made = [torch.randn(rows, K, **like) / K**0.5 for _ in range(copies)]
        return [(w, w) for w in made]
    width = packed_width(K, bits, group)
    kind = torch.int8 if bits == 8 else torch.uint8
    packed = torch.randint(0, 256, (copies, 1, rows, width), device=DEVICE, dtype=torch.uint8).view(kind)
    unit = {8: 74.0, 4: 4.6, 3: 2.4, 2: 1.1}[bits] * K**0.5
    scale = (torch.rand(copies, 1, rows, -(-K // group), device=DEVICE) + 0.5) / unit
    return list(zip(packed, scale.to(torch.bfloat16), strict=True))


def segment(case: Case, x: Tensor, y: Tensor, copy: int, copies: int) -> Any:
    if case.bits == 16:
        return Segment(x, weights(case.rows, case.K, 16, 0, copies)[copy][0][None], y)
    packed, scale = weights(case.rows, case.K, case.bits, case.group, copies)[copy]
    corrected = None
    if case.rank:
        v, v_scale = weights(case.rank, case.K, 4, 128, copies)[copy]
        z = torch.zeros(len(x), case.rank, device=DEVICE)
        first = QuantizedSegment(x, v, v_scale, 4, case.K, z)
        levels = torch.randint(-8, 8, (1, case.rows, case.rank), device=DEVICE, dtype=torch.int8)
        u_scale = torch.full((1, case.rows, 1), 0.1 / case.rank**0.5, device=DEVICE)
        corrected = Correction(first, Narrow(levels, u_scale.to(torch.bfloat16), 128))
    return QuantizedSegment(
        x, packed, scale, case.bits, case.K, y, group=case.group, correction=corrected
    )


def runs(case: Case, copies: int) -> tuple[list[Callable[[], Any]], Tensor, Tensor]:
    """A launch for each copy, the result of the first, and what it should be."""
    from blr.kernels.decode.gemv.grouped import grouped as plain
    from blr.kernels.decode.quantized import segments
    from blr.kernels.decode.quantized.corrected import corrected, corrected_dual
    from blr.kernels.decode.quantized.grouped import dual, grouped

    x = torch.randn(case.tokens, case.K, device=DEVICE)
    y = torch.full((case.tokens, case.rows), float("nan"), device=DEVICE)
    if case.kind == "torch":
        low, held = x.to(torch.bfloat16), weights(case.rows, case.K, 16, 0, copies)
        made = [partial(torch.nn.functional.linear, low, w) for w, _ in held]
        return made, made[0]().float(), low.double() @ held[0][0].double().T
    normed = (case.rows, case.K) in NORMED and case.kind != "ready"
    x = x.to(torch.bfloat16) if case.kind == "ready" else x
    norm = {"gain": torch.rand(case.K, device=DEVICE).to(torch.bfloat16), "eps": 1e-5} if normed else {}
    both = [[segment(case, x, y, (c + half) % copies, copies) for half in (0, 1)] for c in range(copies)]
    counter = torch.zeros(copies, 2, device=DEVICE, dtype=torch.int32)
    config = dict(case.config)
    act = {"activation": "silu"}

    def launch(c: int) -> Callable[[], Any]:
        one, two = both[c]
        if case.kind == "corrected":
            return lambda: corrected([one], counter[c], pdl=PDL, **norm)
        if case.kind == "apart":
            return lambda: (
                grouped([one.correction.first], pdl=PDL, **norm),
                grouped([one], pdl=PDL, **norm),
            )
        if case.kind == "dual" and case.rank:
            return lambda: corrected_dual(one, two, counter[c], pdl=PDL, **act, **norm)
        if case.kind == "dual":
            return lambda: dual(one, two, pdl=PDL, **act, **norm)
        run: Callable[..., None] = plain if case.bits == 16 else grouped
        return lambda: run([one], pdl=PDL, config=[config] if config else None, **norm)

    made = [launch(c) for c in range(copies)]
    made[0]()
    found = y.clone()
    both[0] = [replace(s, x=s.x.float()) for s in both[0]]
    wide = {**norm, **({"gain": norm["gain"].float()} if norm else {})}
    if case.kind == "dual":
        segments.dual(*both[0], **act, **wide)
    else:
        segments.grouped([both[0][0]], **wide)
    return made, found, y.clone()


def check(case: Case) -> tuple[Case, float, str]:
    """Relative error against the reference; compiles the kernel."""
    try:
        _, found, expected = runs(case, 2)
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        weights.cache_clear()
        return case, error, ""
    except Exception as error:  # a case that cannot run is a line of the table
        return case, float("nan"), "".join(traceback.format_exception(error))[-3000:]


def graph_of(case: Case) -> tuple[torch.cuda.CUDAGraph, int]:
    copies = max(ROTATED // case.bytes, 2)
    made, _, _ = runs(case, copies)
    return captured(*made), copies


def timed(graph: torch.cuda.CUDAGraph, copies: int, rounds: int = 3) -> float:
    """Microseconds a launch, the least of rounds."""
    best = float("inf")
    graph.replay()
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / (2 * copies))
    return best


def copy_speed() -> float:
    """Bytes a microsecond of a large copy, read and written."""
    a = torch.empty(1 << 30, device=DEVICE, dtype=torch.uint8)
    b = torch.empty_like(a)
    best = 0.0
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        b.copy_(a)
        end.record()
        end.synchronize()
        best = max(best, 2 * a.nbytes / (begin.elapsed_time(end) * 1e3))
    return best


def table(rows: list[dict[str, Any]]) -> None:
    """The three best of every kind, shape, bits, tokens and rank."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = tuple(row[k] for k in ("tokens", "rows", "K", "bits", "rank", "kind"))
        groups.setdefault(key, []).append(row)
    print("  n  rows     K bits rank kind        us  x floor  config; next")
    for key, found in sorted(groups.items(), key=str):
        found.sort(key=lambda row: row["us"])
        told = [f"{told_config(row)} {row['us']:.2f}" for row in found[:4]]
        n, rows_, K, bits, rank, kind = key
        best = f"{found[0]['us']:6.2f} {found[0]['floors']:7.2f}"
        print(f"{n:3} {rows_:5} {K:5} {bits:4} {rank:4} {kind:9} {best}  {'; '.join(told)}")


def order(case: Case) -> tuple[Any, ...]:
    """One token first, of the largest shapes first, weights of one kind together."""
    return case.tokens > 1, -case.rows * case.K, case.rows, case.bits, case.tokens


def told_config(row: dict[str, Any]) -> str:
    return "x".join(str(value) for _, value in row["config"]) or "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--only", default="n1,corrected,n2,many,dense")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 14))
    given = parser.parse_args()
    begun, wanted = monotonic(), list(cases(set(given.only.split(","))))
    wanted.sort(key=order)
    right: list[tuple[Case, float, str]] = []
    wrong: list[tuple[Case, float, str]] = []
    with get_context("spawn").Pool(given.processes) as pool:
        for case, error, said in pool.imap_unordered(check, wanted, chunksize=2):
            (right if error < LEAST[case.bits] else wrong).append((case, error, said))
            if monotonic() - begun > 0.62 * given.seconds:
                print(f"checks stopped by time: {len(right)} of {len(wanted)}", file=sys.stderr)
                break
        pool.terminate()
    for number, (case, error, said) in enumerate(wrong):
        last = said.strip().splitlines()[-1:] if number else [said]
        print(f"WRONG {case} error {error:.2e} {' '.join(last)}")
    print(f"{len(right)} right, {len(wrong)} wrong, {monotonic() - begun:.0f} s")
    speed, found = copy_speed(), []
    right.sort(key=lambda item: order(item[0]))
    for case, error, _ in right:
        if monotonic() - begun > given.seconds:
            print("timing stopped by time")
            break
        held = case.rows, case.K, case.bits
        if found and tuple(found[-1][k] for k in ("rows", "K", "bits")) != held:
            weights.cache_clear()
        us = timed(*graph_of(case))
        floors = us / (case.bytes / speed)
        found.append({**asdict(case), "us": us, "floors": floors, "error": error})
    device = torch.cuda.get_device_name()
    facts = {"device": device, "bytes_a_us": speed, "cases": found}
    given.output.write_text(json.dumps(facts, indent=1))
    table(found)
    print(f"{device}: copy {speed / 1e6:.2f} TB/s; {len(found)} timed, {monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
