"""Structured layers as transformers calls them, on one GPU: every variant, host time, whole prompts.

    python scripts/bench/layers.py variants [--tokens 4,16,64,256] [--warm 0/8] --json FILE
    python scripts/bench/layers.py rules --json FILE… --table configs/tuned/h200.yaml
    python scripts/bench/layers.py host
    python scripts/bench/layers.py prompts [--compiled] [--tokens 64,512,2048] [--arms dense,lowrank-fp8]
    python scripts/bench/layers.py pivots [--cf 2] [--tokens 1,8,256,2048]

`variants` times every form and every tile worth trying of a layer against the dense one, as `blr tune`
does; with --warm K/N it only compiles the Kth part of them, for N processes at
once. `rules` are those that follow from such runs, before the rules of the table that are of other
numbers of tokens. `host` is the time
of a call that the GPU does not fill, eager, without gradients. `prompts` are four layers of the
Llama-3.1-8B shape; compiled ones take the form of operators that BLR_COMPILED names; few tokens are
the host's time of a model. `pivots` times low
rank by pivot rows beside low rank of as many numbers and of the same rank (what --as plain makes of it).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from itertools import groupby, product
from math import inf, log
from operator import itemgetter
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.bench.float8 import float8_layer
from blr.compressor.bench.layers import LayerBench
from blr.compressor.bench.precision import PRECISIONS
from blr.compressor.bench.prefilled import to_float8
from blr.compressor.bench.runner import Runner
from blr.compressor.bench.shapes import Layer, specs_for
from blr.compressor.bench.timing import spread
from blr.compressor.modeling.layers import make_layer, prepare_layers
from blr.compressor.recipe.tuned_table import read_table, table_text
from blr.compressor.structures.specs import BlastSpec, DenseSpec, LowRankSpec, MonarchSpec, Spec
from blr.compressor.tune import run as tune
from blr.compressor.tune.rules import OURS, Candidate
from blr.compressor.tune.run import Tuning
from blr.kernels.common.tables import BUCKETS, PLAIN
from blr.kernels.fp8.op import fp8_device

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the latter tries the script itself
HALF = PRECISIONS["bfloat16" if DEVICE == "cuda" else "float32"]
SIZES = ((1, 4096), (1, 1 << 20))  # of layers that share rules, both sizes
BLOCKS = ((1, 1), (2, 8), (9, 64))
LAYERS = ((4096, 4096), (4096, 14336), (14336, 4096))
Config = dict[str, Any]


def tiles(rows: int, cols: int, stages: int = 4, warps: int = 4, **rest: Any) -> Config:
    """Of one product."""
    return {"BR": rows, "BK": cols, "STAGES": stages, "num_warps": warps, **rest}


def both(rows: int, cols: int, **rest: Any) -> Config:
    """The same tiles for both products."""
    return {"first": tiles(rows, cols, **rest), "second": tiles(rows, cols, **rest)}


def narrow_configs(structure: str, n: int) -> list[Config]:
    """Tiles worth trying for n tokens."""
    found: list[Config] = [{}, both(32, 128), both(64, 128)]
    if n <= 16:
        found += [both(16, 256), both(16, 256, stages=5, warps=1), both(32, 256, stages=1, warps=8)]
    if n > 16:
        found += [both(64, 64, stages=5), both(128, 64, warps=8)]
    if structure != "lowrank":
        return found
    cut = [dict(c, first=dict(c["first"], SPLIT=s)) for c in found[1:3] for s in (4, 8)]
    cut += [dict(c, first=dict(c["first"], SPLIT=8)) for c in found[4:5] if n <= 16]
    found += [{**c, "add": "between"} for c in cut]
    if n <= 16:
        found += [{**c, "add": "second", "second": {**c["second"], "BK": 64}} for c in cut]
    return found


class Wide(Tuning):
    """Tuning over the tiles above as well."""

    def _arms(self, *case: Any) -> Iterator[Any]:
        usual = tune.candidates

        def more(structure: str, tokens: int) -> list[Candidate]:
            name = tune.STRUCTURES[structure].folder
            found = [c for c in usual(structure, tokens) if c.variant != "narrow"]
            wanted = narrow_configs(name, tokens) if tokens <= 64 else []
            return found + [Candidate("narrow", config) for config in wanted]

        tune.candidates = more
        try:
            yield from super()._arms(*case)
        finally:
            tune.candidates = usual


def specs(layer: Layer) -> list[Spec]:
    """Low rank, BLAST with 4 and 16 blocks, Monarch with 16."""
    names = (("svd", 16), ("blast", 16), ("blast", 4), ("monarch", 16))
    return [specs_for(layer, [name], [blocks])[0] for name, blocks in names]


def variants(
    tokens: list[int], warm: str | None, rounds: int, seconds: float, kept: Path | None
) -> list[dict[str, Any]]:
    """Times of all candidates, printed best first, and `kept` as they are done."""
    bench = Wide(Runner(torch.device(DEVICE), rounds), [HALF], ("svd",), tokens)
    if warm:
        compile_all(bench, tokens, *map(int, warm.split("/")))
        return []
    begun, rows = perf_counter(), []
    for n in tokens:
        for i, o in LAYERS:
            layer = Layer("", f"{i}x{o}", i, o, 2.0, {})
            for spec in specs(layer):
                if perf_counter() - begun > seconds:
                    continue
                bench.run(bench._case(layer, spec, n, HALF), spec, n)
                rows.append(said(bench.points[-1], spec, n))
                if kept:
                    keep(rows, kept)
    for line in bench.refused:
        print("WRONG", line)
    return rows


def compile_all(bench: Wide, tokens: list[int], part: int, parts: int) -> None:
    """One call of every arm of this part, of the first layer: the others compile to the same."""
    i, o = LAYERS[0]
    layer = Layer("", f"{i}x{o}", i, o, 2.0, {})
    count = 0
    for n in tokens:
        for spec in specs(layer):
            for arm in bench._case(layer, spec, n, HALF).arms():
                count += 1
                if count % parts == part and arm.row.arm.startswith(
                    ("narrow", "gemv", "bmm_mix", "perm")
                ):
                    try:
                        call, rotation = arm.make()
                        call(*rotation.arguments)
                    except Exception as error:
                        print(f"{arm.row.arm}: {error}"[:200])
    settle()


def write_rules(rows: list[dict[str, Any]], path: Path) -> None:
    """The table at `path` with rules of what was measured before its own: for each structure, number of
    blocks, size of layers and number of tokens the candidate that loses least over the layers, of those
    that are slower than the plain form at none of them."""
    rules = []
    for structure, (some, most), sizes in product(PLAIN, BLOCKS, SIZES):
        same = [
            (row["n"], row["times"])
            for row in rows
            if row["structure"] == structure
            and some <= row["shape"]["blocks"] <= most
            and sizes == next(range_ for range_ in SIZES if widest(row["shape"]) <= range_[1])
        ]
        counts = sorted({n for n, _ in same})
        chosen = [least_loss(structure, [times for m, times in same if m == n]) for n in counts]
        for (low, high), label in joined(counts, chosen):
            name, _, config = label.partition(" ")
            where = {"structure": structure, "dtype": ["bfloat16", "float16"]}
            where |= {"blocks": [some, most], "features": list(sizes), "n": [low, high]}
            rules.append({**where, "variant": name} | ({"config": json.loads(config)} if config else {}))
    path.write_text(table_text("h200", f"{Path(__file__).name} rules", [*rules, *read_table(path)]))


def widest(shape: dict[str, int]) -> int:
    """The larger of a layer's sizes."""
    return max(shape["inputs"], shape["outputs"])


def joined(counts: list[int], chosen: list[str | None]) -> Iterator[tuple[tuple[int, int], str]]:
    """Ranges of numbers of tokens with one choice: a count speaks for those above the one before it, the
    last one for all that follow."""
    lows = [counts[0], *(n + 1 for n in counts)] if counts else []
    highs = [*counts[:-1], BUCKETS[-1]]
    for label, same in groupby(zip(lows, highs, chosen, strict=False), key=itemgetter(2)):
        found = [*same]
        if label is not None:
            yield (found[0][0], found[-1][1]), label


def least_loss(structure: str, times: list[dict[str, float]]) -> str | None:
    """The label that loses least to the best, by the geometric mean."""
    best = [min(ms for name, ms in t.items() if name != "dense") for t in times]
    plain = [min((t.get(name, inf) for name in PLAIN[structure]), default=inf) for t in times]
    losses = {}
    for label in set.intersection(*map(set, times)) - {"dense"}:
        ours = label not in PLAIN[structure]
        if ours and any(t[label] * OURS > p for t, p in zip(times, plain, strict=True)):
            continue
        losses[label] = sum(log(t[label] / ms) for t, ms in zip(times, best, strict=True))
    return min(losses, key=losses.__getitem__) if losses else None


def said(point: Any, spec: Spec, n: int) -> dict[str, Any]:
    """A line with the dense time and the speed of every candidate over it."""
    times = dict(point.times)
    dense = times.pop("dense", float("nan"))
    order = sorted(times, key=times.__getitem__)
    listed = "  ".join(f"{short(name)} {dense / times[name]:.2f}" for name in order[:7])
    plain = [name for name in times if name in PLAIN[point.structure]]
    base = f"plain {dense / min(times[p] for p in plain):.2f}" if plain else ""
    head = f"{point.structure} b={point.shape.blocks} {spec.in_features}->{spec.out_features} n={n}"
    print(f"{head}: dense {dense * 1e3:.1f} us, {base} | {listed}", flush=True)
    return {"structure": point.structure, "shape": point.shape._asdict(), "n": n, "times": point.times}


def short(label: str) -> str:
    """A candidate without what all have in common."""
    for long, brief in (("num_warps", "w"), ("STAGES", "s"), ("first", "1"), ("second", "2"), ('"', "")):
        label = label.replace(long, brief)
    return label.replace(" ", "")


def pivots(tokens: list[int], cf: float, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of layers: dense, low rank and pivots of `cf`, low rank of the pivots' rank."""
    bench, rows = LayerBench(HALF, Runner(torch.device(DEVICE), rounds)), []
    for i, o in LAYERS:
        layer = Layer("", f"{i}x{o}", i, o, cf, {})
        low, held = specs_for(layer, ["svd", "pivoted"])
        kinds = {"low rank": low, "pivots": held, "same rank": held.low_rank()}
        for n in tokens:
            arms = bench.case(layer, list(kinds.values()), n).arms()
            bench.runner.run(arms, HALF)
            found = {(arm.row.structure, arm.row.spec): arm.row for arm in arms if arm.row.arm == "ours"}
            times = {name: found[spec.structure, spec.describe()].ms for name, spec in kinds.items()}
            times["dense"] = next(arm.row.ms for arm in arms if arm.row.arm == "dense")
            listed = "  ".join(f"{name} {1e3 * (ms or float('nan')):.1f}" for name, ms in times.items())
            print(f"{i}->{o} n={n} r={low.rank}, {held.rank}: us {listed}", flush=True)
            rows.append({"in": i, "out": o, "n": n, "ranks": [low.rank, held.rank], "ms": times})
    return rows


def host() -> list[dict[str, Any]]:
    """Microseconds a call of small layers, by structure and number of tokens."""
    kinds: dict[str, nn.Module] = {"linear": nn.Linear(512, 512, bias=False)}
    for name, spec in {
        "lowrank": LowRankSpec(512, 512, 128),
        "monarch": MonarchSpec(512, 512, 16, 8),
        "blast": BlastSpec(512, 512, 16, 128),
    }.items():
        kinds[name] = make_layer(spec.to_dict(), False)
    rounded = {"dense": DenseSpec(512, 512), "lowrank": LowRankSpec(512, 512, 128)}
    for name, spec in rounded.items() if fp8_device(torch.device(DEVICE)) else ():
        shapes = spec.shapes().items()
        factors = {factor: torch.randn(shape, dtype=HALF.dtype) for factor, shape in shapes}
        kinds[f"{name}-fp8"] = float8_layer(spec, factors)
    rows = []
    for n in (1, 2, 4, 16, 64, 128, 512):
        x = torch.randn(1, n, 512, device=DEVICE, dtype=HALF.dtype)
        found: dict[str, float] = {}
        with torch.no_grad():
            for name, layer in kinds.items():
                layer.to(DEVICE, HALF.dtype).requires_grad_(False)
                found[name] = best_time(layer, x)
        ratio = "  ".join(f"{k} {v:.1f} ({v / found['linear']:.2f}x)" for k, v in found.items())
        print(f"host n={n}: {ratio}", flush=True)
        rows.append({"n": n, **found})
    return rows


def settle() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def best_time(layer: nn.Module, x: Tensor, calls: int = 500) -> float:
    """Microseconds a call, the best of five loops, between which the GPU catches up."""
    for _ in range(20):
        layer(x)
    found = []
    for _ in range(5):
        settle()
        begun = perf_counter()
        for _ in range(calls):
            layer(x)
        found.append((perf_counter() - begun) / calls * 1e6)
    return min(found)


def prompts(tokens: list[int], arms: list[str], compiled: bool, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of a forward pass over four layers, eager or compiled."""
    from blr.compressor.bench.decode.models import Models, find_subject, prompt

    whole = find_subject("8b")
    subject = dataclasses.replace(whole, settings={**whole.settings, "num_hidden_layers": 4})
    made, rows = {}, []
    with torch.no_grad():
        for arm in arms:
            structure, _, blocks = arm.removesuffix("-fp8").partition("-b")
            models = Models(
                subject, torch.device(DEVICE), HALF.dtype, max(tokens) + 1, 2.0, int(blocks or 16)
            )
            if arm.endswith("-fp8"):
                made[arm] = to_float8(models.fresh(structure))
                continue
            made[arm] = models.get(structure)
            prepare_layers(made[arm])  # as when a checkpoint is loaded
        for n in tokens:
            ids = prompt(subject, made[arms[0]], 1, n)
            rows.append(timed_prompts(made, ids, "compiled" if compiled else "", rounds))
            torch.compiler.reset()
    return rows


def first_logits(model: Any, ids: Tensor, way: str) -> Tensor:
    """[B, vocab] of the token after `ids`; `way`: eager, or layers compiled."""
    for layer in model.get_decoder().layers:
        if way and not hasattr(layer, "blr_compiled"):
            layer.compile(dynamic=False)
            layer.blr_compiled = layer._compiled_call_impl
        layer._compiled_call_impl = layer.blr_compiled if way else None
    found: Tensor = model(ids, use_cache=False, logits_to_keep=1).logits[:, -1]
    return found


def timed_prompts(made: dict[str, Any], ids: Tensor, way: str, rounds: int) -> dict[str, Any]:
    """All models in turn."""
    samples: dict[str, list[float]] = {}
    for name, model in list(made.items()):
        try:
            first_logits(model, ids, way)
            first_logits(model, ids, way)
            samples[name] = []
        except Exception as error:
            print(f"{name} n={ids.shape[1]} {way}: {type(error).__name__} {error}"[:300])
    for _ in range(rounds):
        for name, found in samples.items():
            settle()
            begun = perf_counter()
            first_logits(made[name], ids, way).argmax(-1).cpu()
            found.append((perf_counter() - begun) * 1e3)
    times = {name: spread(found).ms for name, found in samples.items()}
    dense = times.get("dense", float("nan"))
    listed = "  ".join(f"{name} {ms:.2f} ({dense / ms:.2f}x)" for name, ms in times.items())
    print(f"prompt n={ids.shape[1]} {way or 'eager'}: {listed}", flush=True)
    return {"n": ids.shape[1], "way": way, **times}


def main() -> None:
    """Run one part and keep its figures."""
    given = argparse.ArgumentParser()
    given.add_argument("part", choices=("variants", "rules", "host", "prompts", "pivots"))
    given.add_argument("--tokens", default="")
    given.add_argument("--warm")
    given.add_argument("--arms", default="dense,lowrank,blast-b4,blast-b16,monarch-b16")
    given.add_argument("--compiled", action="store_true")
    given.add_argument("--rounds", type=int, default=5)
    given.add_argument("--cf", type=float, default=2.0)
    given.add_argument("--seconds", type=float, default=1e9)
    given.add_argument("--json", type=Path, nargs="+", default=[])
    given.add_argument("--table", type=Path)
    args = given.parse_args()
    tokens = [int(n) for n in args.tokens.split(",") if n]
    kept = args.json[0] if args.json else None
    if args.part == "rules":
        return write_rules(
            [row for path in args.json for row in json.loads(path.read_text())["rows"]], args.table
        )
    if args.part == "variants":
        rows = variants(tokens or [4, 16, 64, 256], args.warm, args.rounds, args.seconds, kept)
    elif args.part == "host":
        rows = host()
    elif args.part == "pivots":
        rows = pivots(tokens or [1, 8, 256, 2048], args.cf, args.rounds)
    else:
        rows = prompts(tokens or [512, 2048, 8192], args.arms.split(","), args.compiled, args.rounds)
    if kept:
        keep(rows, kept)


def keep(rows: list[dict[str, Any]], path: Path) -> None:
    """Figures with the machine's name."""
    machine = torch.cuda.get_device_name() if DEVICE == "cuda" else DEVICE
    path.write_text(json.dumps({"machine": machine, "rows": rows}))


if __name__ == "__main__":
    sys.exit(main())
