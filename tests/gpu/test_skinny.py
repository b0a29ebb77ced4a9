"""Skinny products on a GPU: formats, numbers of tokens, shapes that fill no tile, what readers get."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from rows import Row, bounded
from skinny import EPS, distance, made, ready

from blr.kernels.decode.gemv.segments import How, Segment

pytestmark = pytest.mark.gpu
Judge = Callable[[Iterable[Row]], None]
# Rows of a block, columns, blocks.
SHAPES = (
    (4096, 4096, 1),
    (1501, 1493, 1),
    (1488, 4096, 1),
    (4096, 1024, 1),
    (1, 128, 1),
    (248, 344, 16),
)
TOKENS = (1, 2, 3, 5, 8, 16, 33, 64)
FORMATS = ("16", "4/128", "4/64", "4/32", "2/128", "2/64", "2/32", "3/128", "3/64", "3/32", "8/128")


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products(kind: str, dtype: torch.dtype, device: str, judge: Judge) -> None:
    if device == "cpu":
        pytest.skip("tests/kernels/test_skinny.py interprets small ones")
    judge(compared(kind, dtype, device))


def compared(kind: str, dtype: torch.dtype, device: str) -> Iterator[Row]:
    from blr.kernels.decode.skinny.launch import OnCores, PartialSums, grouped

    workspace = PartialSums()
    for rows, K, blocks in SHAPES:
        for tokens in TOKENS:
            torch.manual_seed(tokens)
            x = torch.randn(tokens, blocks * K, device=device)
            s = made(kind, x, rows, K, blocks=blocks, dtype=dtype)
            grouped(ready([s], dtype=dtype), OnCores(workspace=workspace))
            expected = replace(s, x=x.to(dtype).double()).product(None, 0.0)
            yield bounded(
                f"skinny {kind}", f"{dtype} {rows}x{K}x{blocks} {tokens}", distance(s.y, expected), 3e-3
            )
            if rows % 64:
                continue
            gain = torch.rand(K, device=device)
            grouped(ready([s], gain, dtype), OnCores(workspace=workspace, add=True))
            expected = expected + replace(s, x=x.double()).product(gain.double(), EPS)
            yield bounded(
                f"skinny {kind}", f"normed, added {rows} {tokens}", distance(s.y, expected), 6e-3
            )


def test_one_token_of_long_packed_rows(device: str) -> None:
    """int4 four bytes an instruction; gate and up as rows of one launch, their product by another."""
    from blr.kernels.decode import choice
    from blr.kernels.decode.quantized.launch import tile_shape

    rows, K = (14336, 4096) if device == "cuda" else (40, 4096)
    dtype = torch.bfloat16 if device == "cuda" else torch.float16
    assert tile_shape(rows, K, 4)["BYTES"]
    torch.manual_seed(0)
    x, gain = torch.randn(1, K, device=device), torch.rand(K, device=device)
    gate, up = (made("4/128", x, rows, K, dtype=dtype) for _ in range(2))
    wide = [replace(s, x=x.double()).product(gain.double(), EPS) for s in (gate, up)]
    choice.stages([gate, up], How(gain, EPS))()
    for s, expected in zip((gate, up), wide, strict=True):
        assert distance(s.y, expected) < 1e-3
    choice.stages([gate, up], How(gain, EPS, activation="silu"))()
    assert distance(up.y, torch.nn.functional.silu(wide[0]) * wide[1]) < 1e-3


def test_results_do_not_depend_on_time(device: str) -> None:
    """Parts of a row are added in their order, whichever came last."""
    from blr.kernels.decode.skinny.launch import OnCores, PartialSums, grouped

    if device == "cpu":
        pytest.skip("programs are interpreted one after the other")
    torch.manual_seed(0)
    x, workspace = torch.randn(8, 4096, device=device), PartialSums()
    s = made("16", x, 1024, 4096, dtype=torch.bfloat16)
    assert isinstance(s, Segment)
    given = ready([s], dtype=torch.bfloat16)
    found = []
    for _ in range(50):
        grouped(given, OnCores(workspace=workspace), {"SPLIT": 8})
        found.append(s.y.clone())
    assert all(torch.equal(y, found[0]) for y in found)
