"""The choice between algorithms of Kronecker-sparse factors, held against times measured on an H200."""

from __future__ import annotations

import csv
from math import log
from pathlib import Path
from statistics import fmean

import pytest
import torch

from blr.kernels.layers.kronecker.variants import choose

pytestmark = pytest.mark.fast

ROWS = 25088
TABLE = Path(__file__).parents[1] / "data" / "ks_h200.csv"
HALF, FP32 = torch.bfloat16, torch.float32


def measured() -> list[tuple[tuple[int, ...], str, dict[str, float]]]:
    """Pattern, kind of arithmetic and milliseconds of each way, for each row."""
    found = []
    for row in csv.DictReader(TABLE.read_text().splitlines()[1:]):
        ways = {"permute": row["permute_ms"], "blocks": row["dense_ms"], "fused": row["fused_ms"]}
        times = {way: float(ms) for way, ms in ways.items() if ms}
        found.append((tuple(int(row[k]) for k in "abcd"), row["kind"], times))
    return found


@pytest.mark.parametrize(("kind", "most"), [("half", 1.02), ("tf32", 1.06), ("fp32", 1.02)])
def test_what_is_chosen_is_near_the_fastest_measured(kind: str, most: float) -> None:
    """Blocks were measured as they are made where there are up to four columns."""
    losses = []
    for pattern, arithmetic, times in measured():
        if arithmetic == kind:
            dtype = HALF if kind == "half" else FP32
            way = choose(pattern, ROWS, dtype, kind == "tf32")
            if way in times and (way != "blocks" or pattern[3] <= 4):
                losses.append(times[way] / min(times.values()))
    assert len(losses) >= 12
    assert fmean(map(log, losses)) < log(most)


@pytest.mark.parametrize(("dtype", "tf32"), [(HALF, False), (FP32, True)])
def test_short_runs_become_dense_blocks_where_there_are_tensor_cores(
    dtype: torch.dtype, tf32: bool
) -> None:
    assert choose((64, 64, 64, 4), ROWS, dtype, tf32) == "blocks"
    assert choose((64, 64, 64, 4), ROWS, FP32) == "permute"
    assert choose((1, 96, 384, 64), ROWS, dtype, tf32) == "permute"
    assert choose((1, 1024, 1024, 4), ROWS, dtype, tf32) == "permute"  # too much arithmetic
    assert choose((4096, 64, 64, 4), ROWS, dtype, tf32) == "permute"  # blocks of 512 MB at every call


def test_two_rows_of_whole_runs_go_to_the_library() -> None:
    assert choose((1, 4096, 1360, 1), 2, HALF) == "permute"
    assert choose((1, 4096, 1360, 1), 1, HALF) == "decode"
    assert choose((1, 64, 64, 64), 2, HALF) == "decode"
    assert choose((1, 64, 64, 64), 3, HALF) == "permute"
