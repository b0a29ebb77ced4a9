"""Float8 on one GPU: every kernel against its reference, then times over dense bf16 and dense float8.

    python scripts/bench/fp8.py [--json FILE] [--tokens 512,2048,8192] [--tiles] [--seconds 150]

Shapes are outputs x inputs. All arms of a shape and a number of tokens are timed in turn, in CUDA
graphs, with inputs and weights rotated beyond the L2. Float8 arms include the quantization of
activations, but for those called "alone". With --tiles the tiles of every product are timed first, and
the best are used. Last come the prompts of a whole model (`blr bench prefill`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from fp8_checks import BF16, check_kernels, relative, weight
from torch import Tensor

from blr.compressor.base.progress import Progress
from blr.compressor.bench.prefill import PrefillOptions, run_prefill
from blr.compressor.bench.summary import prefill_text
from blr.compressor.bench.timing import CudaSampler, Rotation, interleave, spread
from blr.compressor.tune.float8 import TILES
from blr.kernels.fp8 import launch, layers, library
from blr.kernels.fp8.launch import Tile
from blr.kernels.fp8.reference import E4M3, Rows
from blr.kernels.layers.blast.op import blast_linear
from blr.kernels.layers.lowrank.op import lowrank_linear
from blr.kernels.layers.monarch.op import monarch_linear

WIDE = "128x256 s3 w8"
Arms = dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]


class Timer:
    """Times arms against each other, in graphs."""

    def __init__(self) -> None:
        self.l2 = torch.cuda.get_device_properties(0).L2_cache_size
        self.flush = torch.empty(2 * self.l2, dtype=torch.uint8, device="cuda")
        self.quartiles: dict[str, tuple[float, float]] = {}  # of the last call

    def __call__(self, arms: Arms, rounds: int) -> dict[str, float]:
        """Median milliseconds by arm; one that fails is said and left out."""
        pool, samplers = torch.cuda.graph_pool_handle(), {}
        shared: dict[tuple[int, ...], list[Any]] = {}
        for name, (call, arguments) in arms.items():
            try:
                call(*arguments)
                torch.cuda.synchronize()
                rotation = Rotation(arguments, self.l2)
                key = tuple(t.data_ptr() for t in arguments)
                rotation.copies = shared.setdefault(key, []) or rotation.all()
                shared[key] = rotation.copies
                samplers[name] = CudaSampler(call, rotation, self.flush, pool)
                samplers[name].output = None
            except Exception as error:
                print(f"  {name}: {type(error).__name__}: {str(error)[:300]}")
                torch.cuda.synchronize()
        times = interleave(samplers, rounds, lambda name, e: print(f"  {name}: {str(e)[:200]}"))
        spreads = {name: spread(found) for name, found in times.items()}
        self.quartiles = {name: (found.low, found.high) for name, found in spreads.items()}
        return {name: found.ms for name, found in spreads.items()}


def rank_of(o: int, i: int, more: int = 0, step: int = 128) -> int:
    """The largest multiple of `step` at compression factor 2."""
    return int(o * i / 2 / (o + i + more) // step) * step


Shape = tuple[int, int, int, int]  # of a product: tokens, outputs and inputs of a block, blocks


def products(o: int, i: int, n: int) -> dict[str, tuple[Shape, torch.dtype, int | None]]:
    """Both products of every structure: shape, dtype of the output, width of its permuted parts."""
    low, mon, bla = rank_of(o, i), rank_of(o, i, step=256), rank_of(o, i, 16)
    return {
        "low rank 1": ((n, low, i, 1), E4M3, None),
        "low rank 2": ((n, o, low, 1), BF16, None),
        "Monarch 1": ((n, mon, i // 16, 16), E4M3, mon // 16),
        "Monarch 2": ((n, o // 16, mon, 16), BF16, None),
        "BLAST 1": ((n, bla, i // 4, 4), BF16, None),
        "BLAST 2": ((n, o // 4, bla, 4), BF16, None),
    }


def product_arms(shape: Shape, out: torch.dtype, part: int | None) -> Arms:
    """One product of two, by every tile and, of no blocks, by the library."""
    n, N, K, blocks = shape
    a = torch.randn(n, blocks, K, device="cuda").to(E4M3).transpose(0, 1)
    a = a.contiguous() if K % 128 else a
    b = torch.randn(blocks, N, K, device="cuda").to(E4M3)
    by_row, by_col = torch.ones(n, device="cuda"), torch.full((blocks, N), 1e-2, device="cuda")

    def run(a: Tensor, b: Tensor, tile: Tile | None) -> Tensor:
        if part is None:
            y = torch.empty(n, blocks, N, dtype=out, device="cuda").transpose(0, 1)
        else:
            y = torch.empty(N // part, n, blocks, part, dtype=out, device="cuda").permute(2, 1, 0, 3)
        return launch.product(a, b, by_row, by_col, y, part=part, tile=tile)

    def by_library(a: Tensor, b: Tensor) -> Tensor:
        given = {"scale_a": by_row[:, None], "scale_b": by_col, "out_dtype": BF16}
        return torch._scaled_mm(a[0], b[0].t(), **given, use_fast_accum=True)

    arms: Arms = {name: (partial(run, tile=tile), (a, b)) for name, tile in TILES.items()}
    arms["chosen"] = (partial(run, tile=None), (a, b))
    return arms | ({"library": (by_library, (a, b))} if blocks == 1 else {})


def search(
    timer: Timer, shapes: list[tuple[int, int]], tokens: list[int], found: dict[str, Any], until: float
) -> None:
    """Times every tile for both products of every layer; the best ones go to `found`."""
    for (o, i), n in product(shapes, tokens):
        for label, (shape, out, part) in products(o, i, n).items():
            if time.perf_counter() > until:
                print("out of time for tiles")
                return
            times = timer(product_arms(shape, out, part), 3)
            ours = {name: ms for name, ms in times.items() if name in TILES}
            name, flops = min(ours, key=ours.__getitem__, default=WIDE), 2 * shape[0] * shape[1] / 1e9
            found[key_of(shape)] = {"best": name, "label": label, "ms": times}
            ranked = sorted(times, key=times.__getitem__)
            shown = ", ".join(
                f"{name} {flops * shape[2] * shape[3] / times[name]:.0f}" for name in ranked
            )
            print(f"{label} {key_of(shape)} TFLOP/s: {shown}", flush=True)
        torch.cuda.empty_cache()


def key_of(shape: Shape) -> str:
    return "x".join(map(str, shape))


def best(found: dict[str, Any], label: str, o: int, i: int, n: int) -> Tile | None:
    entry = found.get(key_of(products(o, i, n)[label][0]))
    return TILES[entry["best"]] if entry else None


def best_pair(found: dict[str, Any], label: str, o: int, i: int, n: int) -> Any:
    return tuple(best(found, f"{label} {number}", o, i, n) for number in (1, 2))


def overlapped(call: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same, its kernels starting while those before them end."""

    def run(*arguments: Tensor) -> Tensor:
        launch.OVERLAP = True
        try:
            return call(*arguments)
        finally:
            launch.OVERLAP = False

    return run


def dense_arms(o: int, i: int, x: Tensor, quick: bool) -> Arms:
    W, ws, wide = weight(o, i, terms=i)
    ws, rows = ws.view(-1), launch.quantize_rows(x)

    def library_arm(x: Tensor, W: Tensor, ws: Tensor) -> Tensor:
        return library.dense(launch.quantize_rows(x), W, ws, BF16)

    def dynamic(x: Tensor, W: Tensor, ws: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).float() / 448
        q = (x / scale).clamp(-448, 448).to(E4M3)
        return torch._scaled_mm(
            q, W.t(), scale_a=scale, scale_b=ws[None], out_dtype=BF16, use_fast_accum=True
        )

    arms: Arms = {
        "dense bf16": (torch.nn.functional.linear, (x, wide.to(BF16))),
        "dense fp8": (library_arm, (x, W, ws)),
        "dense fp8 ours": (
            lambda x, W, ws: layers.dense(launch.quantize_rows(x), W, ws, BF16),
            (x, W, ws),
        ),
        "dense fp8 alone": (
            lambda q, W, ws: library.dense(rows._replace(q=q), W, ws, BF16),
            (rows.q, W, ws),
        ),
        "quantize": (lambda x: launch.quantize_rows(x).q, (x,)),
    }
    if not quick:
        arms["dense fp8 compiled"] = (torch.compile(dynamic, dynamic=False), (x, W, ws))
    return arms


def lowrank_arms(o: int, i: int, x: Tensor, found: dict[str, Any]) -> Arms:
    n, r = len(x), rank_of(o, i)
    (U, us, Ud), (V, vs, Vd) = weight(o, r, terms=r), weight(r, i, terms=i)
    scales = layers.scales_of(us[None], V[None], vs[None])
    tiles = best_pair(found, "low rank", o, i, n)

    def chosen(rows: Rows, U: Tensor, V: Tensor) -> Tensor:  # as layers do, or by the best tiles
        if tiles[1] is None and library.takes(n, U, BF16):
            assert scales.first is not None
            z = layers.inner(rows, V[None], scales.first, tiles[0])
            return library.second(z, rows, U, scales.second, BF16)
        return layers.lowrank(rows, U[None], V[None], scales, BF16, tiles=tiles)

    def ours(x: Tensor, U: Tensor, V: Tensor) -> Tensor:
        return chosen(launch.quantize_rows(x), U, V)

    def alone(q: Tensor, U: Tensor, V: Tensor) -> Tensor:
        return chosen(rows_given._replace(q=q), U, V)

    def mixed(x: Tensor, U: Tensor, V: Tensor) -> Tensor:  # ours first, the library's second
        rows = launch.quantize_rows(x)
        assert scales.first is not None
        z = layers.inner(rows, V[None], scales.first, tiles[0])
        return library.second(z, rows, U, scales.second, BF16)

    rows_given = launch.quantize_rows(x)
    plain = Ud.to(BF16), Vd.to(BF16)  # V stored [r, i]
    return {
        "low-rank bf16": (lambda x, U, V: lowrank_linear(x, U, V.mT), (x, *plain)),
        "low-rank fp8": (ours, (x, U, V)),
        "low-rank fp8 overlapped": (overlapped(ours), (x, U, V)),
        "low-rank fp8 ours+library": (mixed, (x, U, V)),
        "low-rank fp8 ours+library overlapped": (overlapped(mixed), (x, U, V)),
        "low-rank fp8 alone": (alone, (rows_given.q, U, V)),
    }


def monarch_arms(o: int, i: int, x: Tensor, found: dict[str, Any], b: int = 16) -> Arms:
    r = rank_of(o, i, step=b * 16)
    (U, us, Ud), (V, vs, Vd) = weight(b, o // b, r, terms=r), weight(b, r, i // b, terms=i // b)
    scales = layers.scales_of(us, V, vs)

    pair = best_pair(found, "Monarch", o, i, len(x))

    def ours(x: Tensor, U: Tensor, V: Tensor, tiles: Any = (None, None)) -> Tensor:
        return layers.monarch(launch.quantize_rows(x), U, V, scales, BF16, tiles=tiles)

    arms: Arms = {
        "Monarch bf16": (lambda x, U, V: monarch_linear(x, U, V.mT), (x, Ud.to(BF16), Vd.to(BF16))),
        "Monarch fp8": (ours, (x, U, V)),
    }
    arms["Monarch fp8 best tiles"] = (partial(ours, tiles=pair), (x, U, V))
    arms["Monarch fp8 best tiles overlapped"] = (overlapped(partial(ours, tiles=pair)), (x, U, V))
    return arms


def blast_arms(o: int, i: int, x: Tensor, found: dict[str, Any], b: int = 4) -> Arms:
    r = rank_of(o, i, b * b)
    (U, us, Ud), (V, vs, Vd) = weight(b, o // b, r, terms=r), weight(b, r, i // b, terms=i // b)
    S = torch.randn(b, b, r, device="cuda") / b**0.5
    scales = layers.scales_of(us, V, vs, S)

    pair = best_pair(found, "BLAST", o, i, len(x))

    def ours(x: Tensor, U: Tensor, V: Tensor, tiles: Any = (None, None)) -> Tensor:
        return layers.blast(launch.quantize_rows(x), U, V, scales, BF16, tiles=tiles)

    s = S.to(BF16)
    arms: Arms = {
        "BLAST bf16": (lambda x, U, V: blast_linear(x, U, s, V.mT), (x, Ud.to(BF16), Vd.to(BF16))),
        "BLAST fp8": (ours, (x, U, V)),
    }
    arms["BLAST fp8 best tiles"] = (partial(ours, tiles=pair), (x, U, V))
    arms["BLAST fp8 best tiles overlapped"] = (overlapped(partial(ours, tiles=pair)), (x, U, V))
    return arms


def missed(arms: Arms) -> dict[str, float]:
    """Relative distance of every arm from bf16 with the weights that float8 stands for."""
    found, plain = {}, torch.empty(0)
    for name, (call, arguments) in arms.items():
        if "bf16" in name:
            plain = call(*arguments)
        try:
            y = call(*arguments)
            found[name] = relative(y, plain) if y.shape == plain.shape else 0.0
        except Exception:
            found[name] = float("nan")
    return found


def prefill(asked: argparse.Namespace, started: float) -> list[dict[str, Any]]:
    """Whole models, in what is left of the seconds."""
    options = PrefillOptions(
        models=asked.models.split(","),
        arms=asked.arms.split(","),
        tokens=[int(n) for n in asked.prefill.split(",")],
        rounds=5,
        seconds=asked.seconds - (time.perf_counter() - started),
    )
    report, _ = run_prefill(options, Progress(quiet=True))
    print(prefill_text(report), flush=True)
    return [asdict(row) for row in report.rows]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tokens", default="512,2048,8192")
    parser.add_argument("--shapes", default="4096x4096,14336x4096,4096x14336")
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--quick", action="store_true", help="nothing compiled by torch")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--unchecked", action="store_true", help="checked before")
    parser.add_argument("--models", default="8b", help="of bench prefill, or none")
    parser.add_argument("--prefill", default="2048,8192", help="tokens of its prompts")
    parser.add_argument("--arms", default="dense,dense-fp8,lowrank,lowrank-fp8")
    asked = parser.parse_args()
    started, tokens = time.perf_counter(), [int(n) for n in asked.tokens.split(",")]
    shapes = [(int(o), int(i)) for o, i in (text.split("x") for text in asked.shapes.split(","))]
    print(torch.cuda.get_device_name(), torch.__version__)
    torch.set_grad_enabled(False)
    torch._dynamo.config.recompile_limit = 64
    fine = asked.unchecked or check_kernels()
    timer, tiles, rows = Timer(), dict[str, Any](), list[dict[str, Any]]()
    print(f"checked after {time.perf_counter() - started:.0f} s", flush=True)
    if not fine:
        print("kernels miss their references: timed all the same, to be read with that in mind")
    torch.manual_seed(1)
    if asked.tiles:
        search(timer, shapes, tokens, tiles, started + asked.seconds / 2)
    print(f"tiles after {time.perf_counter() - started:.0f} s", flush=True)
    for o, i in shapes:
        for n in reversed(tokens):
            if time.perf_counter() - started > asked.seconds:
                print("out of time")
                break
            x = torch.randn(n, i, device="cuda", dtype=BF16)
            arms: Arms = dense_arms(o, i, x, asked.quick)
            for make in (lowrank_arms, monarch_arms, blast_arms):
                arms |= make(o, i, x, tiles)
            times, errors = timer(arms, 7), missed(arms)
            torch.cuda.empty_cache()
            dense, eight = times["dense bf16"], times.get("dense fp8", float("nan"))
            compiled = times.get("dense fp8 compiled", eight)
            eight = min(eight, compiled)
            print(
                f"\n{o} x {i}, {n} tokens: dense bf16 {dense * 1e3:.0f} us; "
                "x dense bf16, x best dense fp8, relative error"
            )
            for name, ms in times.items():
                ratios = f"{dense / ms:5.2f}  {eight / ms:5.2f}"
                between = " to ".join(f"{end * 1e3:.1f}" for end in timer.quartiles[name])
                print(f"  {name:32} {ms * 1e3:8.1f} us ({between})  {ratios}  {errors[name]:.3f}")
                rows.append({"o": o, "i": i, "n": n, "arm": name, "ms": ms, "dense": dense / ms})
            sys.stdout.flush()
    del timer, arms, x
    torch.cuda.empty_cache()
    print(f"layers after {time.perf_counter() - started:.0f} s", flush=True)
    if asked.models != "none":
        rows += prefill(asked, started)
    print(f"done after {time.perf_counter() - started:.0f} s")
    if asked.json:
        asked.json.write_text(json.dumps({"tiles": tiles, "rows": rows}, indent=1))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
