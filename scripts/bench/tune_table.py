"""The table of kernels that ships: every form and tile of a layer timed, and rules made of the times.

    python -m blr.bench.tune_table variants -o FILE [--tokens 4,16,64,256]
    python -m blr.bench.tune_table rules FILE… --table configs/tuned/h200.yaml

`variants` times what `blr tune` does, and more tiles of the kernels for few tokens. `rules` are put
before those of the table: unlike `blr tune`'s they are for ranges of sizes and blocks, and take for
each the candidate that loses least over the layers, of those slower than the plain form at none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from math import inf, log
from pathlib import Path
from typing import Any

from blr.bench import tuning as tune
from blr.bench.checks import find_precision
from blr.bench.harness import Harness
from blr.bench.layer_problem import KernelTimer
from blr.bench.results import BenchReport
from blr.bench.shapes import LayerShape, specs_for
from blr.bench.timing import ARM_SECONDS
from blr.bench.tuning_rules import OURS, Candidate, ranges
from blr.compressor.base.device import pick_device
from blr.compressor.base.progress import Progress
from blr.compressor.recipe.tuned_table import read_table, table_text
from blr.kernels.common.tables import PLAIN

SIZES = ((1, 4096), (1, 1 << 20))  # of layers that share rules, both sizes
BLOCKS = ((1, 1), (2, 8), (9, 64))
LAYERS = ((4096, 4096), (4096, 14336), (14336, 4096))
STRUCTURES = (("svd", 16), ("blast", 16), ("blast", 4), ("monarch", 16))  # with their blocks
Config = dict[str, Any]
Times = dict[str, float]


def tiles(rows: int, cols: int, stages: int = 4, warps: int = 4) -> Config:
    """The same tiles for both products."""
    one = {"BR": rows, "BK": cols, "STAGES": stages, "num_warps": warps}
    return {"first": one, "second": dict(one)}


def narrow_configs(structure: str, n: int) -> list[Config]:
    """Tiles worth trying for n tokens."""
    found: list[Config] = [{}, tiles(32, 128), tiles(64, 128)]
    if n <= 16:
        found += [tiles(16, 256), tiles(16, 256, 5, 1), tiles(32, 256, 1, 8)]
    else:
        found += [tiles(64, 64, 5), tiles(128, 64, warps=8)]
    if structure != "svd":
        return found
    cut = [dict(c, first=dict(c["first"], SPLIT=s)) for c in found[1:3] for s in (4, 8)]
    cut += [dict(c, first=dict(c["first"], SPLIT=8)) for c in found[4:5] if n <= 16]
    found += [{**c, "add": "between"} for c in cut]
    if n <= 16:
        found += [{**c, "add": "second", "second": {**c["second"], "BK": 64}} for c in cut]
    return found


def candidates(structure: str, n: int) -> list[Candidate]:
    """Those of `blr tune`, with the tiles above."""
    found = [c for c in USUAL(structure, n) if c.variant != "narrow"]
    wanted = narrow_configs(structure, n) if n <= 64 else []
    return found + [Candidate("narrow", config) for config in wanted]


USUAL = tune.candidates


def variants(given: argparse.Namespace) -> int:
    """Time all candidates, and write what came out."""
    tune.candidates = candidates
    timer = KernelTimer(pick_device(given.device), find_precision(given.dtype))
    report = BenchReport("tune_table variants", {})
    harness = Harness(report, Progress(), timer.device, given.rounds, given.seconds, ARM_SECONDS)
    layers = [LayerShape("", f"{i}x{o}", i, o, 2.0, {}) for i, o in LAYERS]
    tuning, tokens = tune.Tuning([timer]), map(int, given.tokens.split(","))
    code = harness.run(
        [
            tuning.kept(*tuning.case(timer, layer, spec, n))
            for n, layer, (name, blocks) in product(tokens, layers, STRUCTURES)
            for spec in specs_for(layer, [name], [blocks])
        ]
    )
    for line in tuning.refused:
        print("WRONG", line)
    rows = [{**vars(point), "shape": point.shape._asdict()} for point in tuning.points]
    given.output.write_text(json.dumps({"machine": report.machine, "rows": rows}))
    return code


def rules_of(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """For each structure, number of blocks, size of layers and number of tokens."""
    for structure, (some, most), (least, size) in product(PLAIN, BLOCKS, SIZES):
        by_count: dict[int, list[Times]] = {}
        for row in rows:
            shape = row["shape"]
            at = next(sizes for sizes in SIZES if max(shape["inputs"], shape["outputs"]) <= sizes[1])
            if row["structure"] == structure and some <= shape["blocks"] <= most and at[1] == size:
                by_count.setdefault(row["n"], []).append(row["times"])
        counts = sorted(by_count)
        chosen = [least_loss(structure, by_count[n]) for n in counts]
        for tokens, label in ranges(counts, chosen, min(counts, default=1)):
            name, _, config = label.partition(" ")
            where: dict[str, Any] = {"structure": structure, "dtype": ["bfloat16", "float16"]}
            where |= {"blocks": [some, most], "features": [least, size], "n": tokens}
            yield {**where, "variant": name} | ({"config": json.loads(config)} if config else {})


def least_loss(structure: str, times: list[Times]) -> str | None:
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


def main() -> int:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    parser.add_argument("part", choices=("variants", "rules"))
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--tokens", default="4,16,64,256")
    parser.add_argument("--table", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="file for the times as JSON")
    parser.add_argument("--seconds", type=float, help="after which no case is started")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    if given.part == "variants":
        return variants(given)
    rows = [row for path in given.files for row in json.loads(path.read_text())["rows"]]
    rules = [*rules_of(rows), *read_table(given.table)]
    given.table.write_text(table_text("h200", f"{Path(__file__).name} rules", rules))
    return 0


if __name__ == "__main__":
    sys.exit(main())
