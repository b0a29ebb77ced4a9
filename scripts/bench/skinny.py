"""Skinny products at the shapes of an 8B model: every tile checked, then timed, on one GPU.

    python scripts/bench/skinny.py -o skinny.json [--seconds 100] [--of 4:1,16:8] [--wide]

of: bits of weights and tokens, in the order of importance.

Cases are checked against the dequantized weights in a pool of processes, which compiles their kernels,
then timed as by lowbit.py beside this file: launches over copies of the weights that no cache holds, in
one CUDA graph with programmatic dependent launch, the least of rounds, without what prepares the inputs
(the case "prepare" is that alone). `copy` is bytes over time in parts of the speed of a large copy.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from graphs import captured
from lowbit import DEVICE, ROTATED, copy_speed, timed, weights
from torch import Tensor

from blr.kernels.decode.gemv.segments import Segment
from blr.kernels.decode.quantized.formats import PLANES, packed_width
from blr.kernels.decode.quantized.reference import dequantize
from blr.kernels.decode.quantized.segments import Correction, Narrow, QuantizedSegment

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (4096, 1024))
HEAD = (128256, 4096)
Config = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Case:
    """kind: "skinny", "dual" (gate and up of that shape), "corrected" (with U of rank 16), "prepare",
    "torch" (cuBLAS in bf16), "rows" (the kernels for one and two tokens)."""

    kind: str
    rows: int
    K: int
    bits: int
    tokens: int
    config: Config = ()

    @property
    def bytes(self) -> int:
        pairs = 2 if self.kind == "dual" else 1
        if self.bits == 16:
            return 2 * self.rows * self.K * pairs
        return self.rows * (packed_width(self.K, self.bits, 128) + 2 * -(-self.K // 128)) * pairs


def configs(case: Case, wide: bool) -> Iterator[Config]:
    """None for the default, then others, the likeliest first."""
    yield ()
    if case.kind != "skinny" and not wide:
        return
    if case.bits == 16:
        tiles = [(64, 128, 4, 4), (64, 256, 3, 4), (32, 256, 4, 2), (16, 256, 5, 1)]
    else:
        tiles = [(64, 1, 5, 2), (64, 1, 5, 4), (32, 1, 5, 1), (64, 1, 8, 2)]
    for (BR, STEP, STAGES, warps), programs in product(tiles, (264, 528, 1056)):
        split = min(max(programs * BR // case.rows, 1), 16)
        split = 1 << (split.bit_length() - 1)
        steps = case.K // (STEP if case.bits == 16 else 128)
        for AHEAD in (0, 4):
            if split <= steps and (programs == 528 or AHEAD == 0):
                names = ("BR", "STEP", "STAGES", "num_warps", "SPLIT", "AHEAD")
                yield tuple(zip(names, (BR, STEP, STAGES, warps, split, AHEAD), strict=True))


def cases(wanted: list[tuple[int, int]], wide: bool) -> Iterator[Case]:
    for b, n in wanted:
        yield Case("prepare", 1, 4096, b, n)
        for shape in (*SHAPES, HEAD):
            if b == 16:
                yield Case("torch", *shape, 16, n)
            if b == 2 and shape == HEAD:
                continue
            if n <= 2:
                yield Case("rows", *shape, b, n)
            found = dict.fromkeys(configs(Case("skinny", *shape, b, n), wide))
            few = (shape == HEAD or (b, n) == (16, 1)) and not wide
            for config in [*found][:1] if few else found:
                yield Case("skinny", *shape, b, n, config)
            if shape == SHAPES[1]:
                yield Case("dual", *shape, b, n)
            if b == 2 and shape in SHAPES[:3]:
                yield Case("corrected", *shape, b, n)


def runs(case: Case, copies: int) -> tuple[list[Callable[[], Any]], Tensor, Tensor]:
    """A launch for each copy, the result of the first, and what it should be."""
    from blr.kernels.decode.gemv.grouped import grouped as plain_rows
    from blr.kernels.decode.quantized.grouped import grouped as packed_rows
    from blr.kernels.decode.skinny.launch import Workspace, dual, grouped
    from blr.kernels.decode.skinny.prepare import prepare, prepared

    wide = torch.randn(case.tokens, case.K, device=DEVICE)
    y = torch.full((case.tokens, case.rows), float("nan"), device=DEVICE)
    low = 16 if case.bits == 16 else PLANES[case.bits][0]
    x = prepared(wide, case.K, low, 128, torch.bfloat16)
    gain = torch.rand(case.K, device=DEVICE).to(torch.bfloat16)
    if case.kind == "prepare":
        run = partial(prepare, wide, x, case.K, low=low, group=128, gain=gain, eps=1e-5, pdl=True)
        run()
        return [run] * copies, torch.ones(1), torch.ones(1)
    prepare(wide, x, case.K, low=low, group=128)
    held = weights(case.rows, case.K, case.bits, 128, copies)
    rounded = wide.to(torch.bfloat16)
    if case.kind == "torch":
        made = [partial(torch.nn.functional.linear, rounded, w) for w, _ in held]
        return made, made[0]().float(), rounded.double() @ held[0][0].double().T
    corrected = case.kind == "corrected"
    segments = [segment(case, wide if case.kind == "rows" else x, w, y, corrected) for w in held]
    dense = [_dense(case, held[i]) for i in (0, 1)]
    expected = rounded.double() @ dense[0].T
    config, space = dict(case.config) or None, Workspace()
    if corrected:
        z, u = segments[0].correction.first.y, segments[0].correction.u.levels[0]
        expected += z.double() @ u.double().T
    if case.kind == "rows":
        expected = wide.double() @ dense[0].T
        launch = plain_rows if case.bits == 16 else packed_rows
        made = [partial(launch, [s], pdl=True) for s in segments]
    elif case.kind == "dual":
        up = rounded.double() @ dense[1].T
        expected = torch.nn.functional.silu(expected) * up
        both = zip(segments, segments[1:] + segments[:1], strict=True)
        made = [partial(dual, a, b, space, activation="silu", pdl=True) for a, b in both]
    else:
        made = [partial(grouped, [s], space, pdl=True, config=config) for s in segments]
    made[0]()
    return made, y.clone(), expected


def segment(case: Case, x: Tensor, held: tuple[Tensor, Tensor], y: Tensor, corrected: bool) -> Any:
    w, scale = held
    if case.bits == 16:
        return Segment(x, w[None], y)
    correction = None
    if corrected:
        z = torch.randn(case.tokens, 16, device=DEVICE)
        u = torch.randn(1, case.rows, 16, device=DEVICE).to(torch.bfloat16) / 16
        correction = Correction(Segment(x, w, z), Narrow(u))
    return QuantizedSegment(x, w, scale, case.bits, case.K, y, correction=correction)


def _dense(case: Case, held: tuple[Tensor, Tensor]) -> Tensor:
    w, scale = held
    if case.bits == 16:
        return w.double()
    return dequantize(w, scale, case.bits, case.K, torch.float64)[0]


def check(case: Case) -> tuple[Case, float, str]:
    """Relative error against the reference; compiles the kernel."""
    try:
        _, found, expected = runs(case, 2)
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        weights.cache_clear()
        return case, error, ""
    except Exception as error:  # a case that cannot run is a line of the table
        return case, float("nan"), "".join(traceback.format_exception(error))[-3000:]


def microseconds(case: Case) -> float:
    copies = 200 if case.kind == "prepare" else max(ROTATED // case.bytes, 2)
    made, _, _ = runs(case, copies)
    return timed(captured(*made), copies)


def table(rows: list[dict[str, Any]]) -> None:
    """The best configurations of every kind, shape, bits and tokens."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[k] for k in ("tokens", "bits", "rows", "K", "kind")), []).append(row)
    print("  n bits   rows     K kind         us  copy  BRxSTEPxSTAGESxWARPSxSPLITxAHEAD; next")
    for key, found in sorted(groups.items(), key=str):
        found.sort(key=lambda row: row["us"])
        told = ["x".join(str(v) for _, v in r["config"]) or "default" for r in found]
        told = [f"{name} {r['us']:.2f}" for name, r in zip(told, found, strict=True)]
        kept = told[:4] + [t for t in told[4:] if t.startswith("default")]
        n, bits, rows_, K, kind = key
        best = f"{found[0]['us']:7.2f} {found[0]['copy']:5.2f}"
        print(f"{n:3} {bits:4} {rows_:6} {K:5} {kind:9} {best}  {'; '.join(kept)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--of", default="4:1,16:8,4:8,2:1,16:4,16:1")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--processes", type=int, default=min(os.cpu_count() or 1, 15))
    given = parser.parse_args()
    pairs = [tuple(map(int, pair.split(":"))) for pair in given.of.split(",")]
    begun, wanted = monotonic(), [*cases([(b, n) for b, n in pairs], given.wide)]
    right: list[tuple[Case, float]] = []
    wrong: list[tuple[Case, float, str]] = []
    with get_context("spawn").Pool(given.processes) as pool:
        for case, error, said in pool.imap_unordered(check, wanted, chunksize=1):
            right.append((case, error)) if error < 1e-2 else wrong.append((case, error, said))
            if monotonic() - begun > 0.55 * given.seconds:
                print(f"checks stopped by time: {len(right)} of {len(wanted)}", file=sys.stderr)
                break
        pool.terminate()
    for number, (case, error, said) in enumerate(wrong[:40]):
        last = said.strip().splitlines()[-1:] if number else [said]
        print(f"WRONG {case} error {error:.2e} {' '.join(last)}")
    print(f"{len(right)} right, {len(wrong)} wrong of {len(wanted)}, {monotonic() - begun:.0f} s")
    speed, found = copy_speed(), []
    order = {case: number for number, case in enumerate(wanted)}
    right.sort(key=lambda item: (item[0].rows, item[0].K, item[0].bits, order[item[0]]))
    for case, error in right:
        if monotonic() - begun > given.seconds:
            print("timing stopped by time")
            break
        if found and [found[-1][k] for k in ("rows", "K", "bits")] != [case.rows, case.K, case.bits]:
            weights.cache_clear()
        us = microseconds(case)
        found.append({**asdict(case), "us": us, "copy": case.bytes / speed / us, "error": error})
    facts = {"device": torch.cuda.get_device_name(), "bytes_a_us": speed, "cases": found}
    given.output.write_text(json.dumps(facts, indent=1))
    table(found)
    print(f"copy {speed / 1e6:.2f} TB/s; {len(found)} timed, {monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
