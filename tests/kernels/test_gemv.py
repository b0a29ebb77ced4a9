"""Decoding stages: the kernels, alone and grouped, against float64 for every block structure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from compiling import compile_for
from tolerances import TOLERANCES
from torch import Tensor

from blr.kernels.common.available import has_triton
from blr.kernels.decode.gemv import segments
from blr.kernels.decode.gemv.launch import Stage, Tile
from blr.kernels.decode.gemv.segments import Segment

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton")
# blocks, rows of each, columns of each, rows that stay together, mixed, shared input
STRUCTURES: dict[str, tuple[int, int, int, int | None, bool, bool]] = {
    "dense": (1, 37, 50, None, False, False),
    "wide": (1, 5, 1300, None, False, False),
    "blocks": (3, 7, 19, None, False, False),
    "monarch": (4, 12, 10, 3, False, False),
    "groups-of-outputs": (3, 6, 41, None, False, True),
    "blast": (4, 9, 21, None, True, False),
    "blast-of-six": (6, 5, 130, None, True, False),
}
TOKENS = [1, 2, 3, 8]
DTYPES = [torch.float32, torch.float16]


def segment(name: str, tokens: int, dtype: torch.dtype, generator: torch.Generator) -> Segment:
    """A random stage over float32 inputs, its result poisoned; weights with rows of stride 1 for
    half of the structures, views of wider buffers for inputs and results."""
    blocks, rows, width, part, mixed, shared = STRUCTURES[name]

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    w = (random(blocks, rows, width) / width**0.5).to(dtype)
    if blocks % 2:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    x = random(tokens, 7 + width * (1 if shared else blocks)).float()[:, 4:-3]
    y = torch.full((tokens, blocks * rows + 5), float("nan"))[:, 2:-3]
    mix = random(blocks, blocks, rows).to(dtype) if mixed else None
    bias = None if mixed else random(blocks * rows).to(dtype)
    return Segment(x, w, y, bias, mix, part)


def in_float64(s: Segment, gain: Tensor | None = None, eps: float = 0.0) -> Tensor:
    """The stage from its definition, one block at a time."""
    x, w = s.x.double(), s.w.double()
    blocks, rows, width = w.shape
    if gain is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain.double()
    inputs = [x if x.shape[1] == width else x[:, g * width : (g + 1) * width] for g in range(blocks)]
    results = [v @ w[g].T for g, v in enumerate(inputs)]  # of each block [n, R]
    if s.mix is not None:
        mix = s.mix.double()
        results = [sum(mix[k, g] * results[g] for g in range(blocks)) for k in range(blocks)]
    y, part = torch.empty(x.shape[0], blocks * rows, dtype=torch.float64), s.part or rows
    for g, result in enumerate(results):
        for row in range(rows):
            y[:, (row // part * blocks + g) * part + row % part] = result[:, row]
    return y if s.bias is None else y + s.bias.double()


def close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert (found - expected).norm() <= TOLERANCES[dtype] * expected.norm()


def grouped(stages: Any, **options: Any) -> None:
    from blr.kernels.decode.gemv.launch import grouped

    grouped(stages, segments.How(**options))


def dual(*pair: Segment, **options: Any) -> None:
    grouped(pair, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(
    "names", [(n,) for n in STRUCTURES] + [("blast", "wide", "monarch")], ids="-".join
)
def test_segments_of_one_launch(names: tuple[str, ...], tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    stages = [segment(name, tokens, dtype, generator) for name in names]
    expected = [in_float64(s) for s in stages]
    for run in (segments.grouped, grouped):
        for s in stages:
            s.y.fill_(float("nan"))
        run(stages)
        for s, truth in zip(stages, expected, strict=True):
            close(s.y, truth, dtype)
            assert s.y._base.isnan().sum() == 5 * tokens, "columns around a result are another's"


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", ["dense", "wide", "groups-of-outputs", "blast", "blast-of-six"])
def test_norm_of_the_input(name: str, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    s = segment(name, tokens, torch.float32, generator)
    gain = torch.randn(s.x.shape[1], generator=generator)
    truth = in_float64(s, gain, 0.1)
    for run in (segments.grouped, grouped):
        s.y.fill_(float("nan"))
        run([s], gain=gain, eps=0.1)
        close(s.y, truth, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "norm"])
def test_dual_stage(normed: bool, tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(tokens)
    gate, up = (segment("dense" if normed else "blocks", tokens, dtype, generator) for _ in range(2))
    if not normed:  # another rank than the gate's
        w = torch.randn(3, 7, 30, generator=generator).to(dtype)
        up = Segment(torch.randn(tokens, 90, generator=generator), w, up.y, up.bias)
    norm = {"gain": torch.randn(gate.x.shape[1], generator=generator), "eps": 0.1} if normed else {}
    truth = torch.nn.functional.silu(in_float64(gate, **norm)) * in_float64(up, **norm)
    for run in (segments.dual, dual):
        up.y.fill_(float("nan"))
        run(gate, up, activation="silu", **norm)
        close(up.y, truth, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 8])
@pytest.mark.parametrize("name", ["wide", "blocks", "monarch"])
def test_stage_added_to_its_result(name: str, tokens: int, dtype: torch.dtype) -> None:
    s = segment(name, tokens, dtype, torch.Generator().manual_seed(tokens))
    residual = torch.randn(s.y.shape)
    s.y.copy_(residual)  # in place, as the residual stream is
    grouped([s], add=True)
    close(s.y, in_float64(s) + residual.double(), dtype)


STAGE = Stage(
    *("*fp32", "i32", "i32", "*bf16", "i32", "i32", 1, "*bf16", "i32", "i32", "i32", "*bf16"),
    *("*fp32", "i32", "i32", "i32", "i32", "i32"),
)
SIGNATURE = {
    **dict.fromkeys(("s0", "s1", "s2"), STAGE),
    **{"programs0": "i32", "programs1": "i32", "gain": "*bf16", "eps": "fp32"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_token_has_the_same_sums_beside_others(name: str, dtype: torch.dtype) -> None:
    """Bit for bit, with a norm, added, or of a pair: a draft's tokens are checked in one launch."""
    generator = torch.Generator().manual_seed(1)
    s = segment(name, 11, dtype, generator)
    gain = torch.randn(s.x.shape[1], generator=generator)
    for norm in ({}, {"gain": gain, "eps": 0.1}):
        several, alone = (replace(s, y=torch.ones(s.y.shape)) for _ in range(2))
        add = s.mix is None
        grouped([several], add=add, **norm)
        for token in range(len(s.x)):
            grouped([alone.of_tokens(slice(token, token + 1))], add=add, **norm)
        assert torch.equal(several.y, alone.y)
        if s.mix is None:
            dual(several, several, activation="silu", **norm)
            for token in range(len(s.x)):
                dual(*[alone.of_tokens(slice(token, token + 1))] * 2, activation="silu", **norm)
            assert torch.equal(several.y, alone.y)


@pytest.mark.parametrize("tokens", [1, 4, 8])
@pytest.mark.parametrize("rows, columns", [(4096, 4096), (4096, 14336), (512, 512)])
def test_registers_hold_tokens_in_the_order_of_one(rows: int, columns: int, tokens: int) -> None:
    """Lanes share a row alike, and nothing spills to memory."""
    from blr.kernels.decode.gemv.launch import rows_of, tile_shape

    shape = tile_shape(rows, columns, norm=1 if rows == columns else 0)
    tile = Tile(rows_of(shape, tokens), shape["BK"], NORM=int(rows == columns), TOKENS=tokens)
    constants = {"COUNT": 1, "ADD": False, "PDL": True, "T0": tile, "T1": tile, "T2": tile}
    module = "blr.kernels.decode.gemv.triton"
    made = compile_for(module, "grouped_kernel", SIGNATURE, constants, 90, num_warps=shape["num_warps"])
    across = shape["BK"] // 256  # warps of a row, of 32 lanes with 8 columns each
    layout = f"sizePerThread = [1, 8], threadsPerWarp = [1, 32], warpsPerCTA = [{{}}, {across}]"
    assert layout.format(shape["num_warps"] // across) in made["asm"]["ttgir"]
    assert made["spills"] == 0


@pytest.mark.sampled(3)
@pytest.mark.parametrize("mix", [0, 4, 16])
def test_registers_hold_grouped_stages(mix: int) -> None:
    """The sizes of models in use compile without spilling to memory."""
    from blr.kernels.decode.gemv.launch import segment_shape

    w = torch.empty(max(mix, 1), 1024, 4096 // max(mix, 1), dtype=torch.bfloat16)
    s = Segment(w.float(), w, w, mix=torch.empty(mix, mix, 1024) if mix else None)
    shape = segment_shape(s, w)
    tile = Tile(shape["BR"], shape["BK"], NORM=1, MIX=mix)
    constants = {"COUNT": 3, "ADD": False, "PDL": True, "T0": tile, "T1": tile, "T2": tile}
    module = "blr.kernels.decode.gemv.triton"
    made = compile_for(module, "grouped_kernel", SIGNATURE, constants, 90, num_warps=shape["num_warps"])
    assert made["spills"] == 0
