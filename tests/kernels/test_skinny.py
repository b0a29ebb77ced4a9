"""Products of 1 to 64 tokens on the tensor cores, and what prepares their inputs. Interpreter only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from skinny import EPS, close, drawn, made, ready

from blr.kernels.common.available import has_triton
from blr.kernels.decode.gemv.segments import Correction, Narrow, Segment, dual
from blr.kernels.decode.quantized.formats import PLANES

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton")
CASES = {
    "plain": ("16", 3, 70, 40, {}),
    "prime": ("16", 5, 33, 149, {"BR": 16, "STEP": 64, "SPLIT": 2}),
    "one": ("16", 1, 64, 256, {"SPLIT": 2}),
    "wide": ("16", 33, 48, 64, {"BR": 16}),
    "many": ("16", 64, 16, 64, {"BR": 16}),
    "int4": ("4/128", 1, 70, 384, {"SPLIT": 2}),
    "int4-ragged": ("4/128", 8, 40, 300, {"BR": 16, "SPLIT": 2}),
    "int4-narrow": ("4/32", 16, 16, 96, {"BR": 16}),
    "int4-64": ("4/64", 2, 33, 200, {"BR": 32, "SPLIT": 4}),
    "int3": ("3/128", 4, 40, 384, {"BR": 16, "SPLIT": 2}),
    "int3-ragged": ("3/64", 2, 33, 200, {"BR": 32}),
    "int3-narrow": ("3/32", 3, 16, 96, {"BR": 16}),
    "uniform": ("3/128/uniform", 4, 40, 384, {"BR": 16, "SPLIT": 2}),
    "uniform-ragged": ("3/64/uniform", 2, 33, 200, {"BR": 32}),
    "uniform-narrow": ("3/32/uniform", 3, 16, 96, {"BR": 16}),
    "int8": ("8/128", 4, 40, 300, {"BR": 16, "SPLIT": 2}),
    "int8-narrow": ("8/32", 3, 16, 96, {"BR": 16}),
    "int2": ("2/128", 4, 40, 384, {"BR": 16, "SPLIT": 2}),
    "int2-ragged": ("2/64", 2, 33, 200, {"BR": 32}),
    "int2-narrow": ("2/32", 3, 16, 96, {"BR": 16}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("norm", [False, True], ids=["", "normed"])
@pytest.mark.parametrize("case", CASES)
def test_stages_are_those_of_the_reference(case: str, norm: bool) -> None:
    from blr.kernels.decode.skinny.launch import OnCores, PartialSums, grouped

    torch.manual_seed(0)
    kind, tokens, rows, K, config = CASES[case]
    x, gain = torch.randn(tokens, K), torch.rand(K) if norm else None
    segments = [made(kind, x, rows, K, bias=drawn(rows)), made(kind, x, 20, K)]
    workspace = PartialSums()
    for _ in range(2):  # counters are zeros again
        grouped(ready(segments, gain), OnCores(workspace=workspace), config)
        for s in segments:
            close(s.y, s.product(gain, EPS))
    before = [s.y.clone() for s in segments]
    grouped(ready(segments, gain), OnCores(workspace=workspace, add=True), config)
    for s, y in zip(segments, before, strict=True):
        close(s.y, y + s.product(gain, EPS))


@pytest.mark.parametrize("kind", ["16", "4/128"])
def test_blocks_and_parts(kind: str) -> None:
    """Monarch's first stage: blocks of their own inputs, rows that are dealt out."""
    from blr.kernels.decode.skinny.launch import OnCores, grouped

    torch.manual_seed(0)
    x = torch.randn(3, 4 * 72)
    s = made(kind, x, 24, 72, blocks=4, part=6)
    grouped(ready([s]), OnCores(), {"BR": 16, "SPLIT": 1 if kind != "16" else 2, "STEP": 16})
    close(s.y, s.product(None, 0.0))


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("kind", ["16", "2/64", "3/64/uniform"])
def test_pairs(kind: str, split: int) -> None:
    from blr.kernels.decode.skinny.launch import OnCores, grouped

    torch.manual_seed(0)
    x = torch.randn(5, 256)
    gate, up = made(kind, x, 40, 256, bias=drawn(40)), made(kind, x, 40, 256)
    config = {"BR": 16, "SPLIT": split, **({"STEP": 64} if kind == "16" else {})}
    grouped(ready([gate, up]), OnCores(activation="silu"), config)
    found = up.y.clone()
    dual(gate, up, activation="silu")
    close(found, up.y)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("rank", [5, 16])
def test_first_factors_ride_with_the_inputs(rank: int, tokens: int) -> None:
    from blr.kernels.decode.skinny.launch import OnCores, grouped
    from blr.kernels.decode.skinny.prepare import prepare, prepared

    torch.manual_seed(0)
    x, gain, v = torch.randn(tokens, 256), torch.rand(256), drawn(rank, 256) / 16
    z, u = torch.full((tokens, rank), float("nan")), drawn(1, 40, rank)
    first = Segment(x, v[None], z)
    s = made("2/128", x, 40, 256, correction=Correction(first, Narrow(u)))
    out = prepared(x, 256, 2, 128, torch.float16)
    prepare(x, out, 256, low=2, group=128, gain=gain, eps=EPS, v=v, z=z)
    grouped([replace(s, x=out)], OnCores(), {"BR": 16, "SPLIT": 2})
    found = s.y.clone()
    close(found, s.product(gain, EPS))


def field_order(bits: int, group: int) -> torch.Tensor:
    """[group] int64: the column of each place of a group, as `prepare.source_of` has it."""
    low = PLANES[bits][0]
    halves, words = group * low // 16, group * low // 32
    place = torch.arange(group)
    field, half = place // halves, place % halves
    return ((half % 2) * (16 // low) + field) * words + half // 2


@pytest.mark.parametrize("tokens", [2, 9])
@pytest.mark.parametrize("kind", ["16", "4/32"])
@pytest.mark.parametrize("order", [None, (4, 32)], ids=["", "ordered"])
def test_blocks_are_mixed(order: tuple[int, int] | None, kind: str, tokens: int) -> None:
    """BLAST's first factors, of one layer and of three; also as packed second factors read them."""
    from blr.kernels.decode.skinny.bound import OnCores, stages

    torch.manual_seed(0)
    blocks, dtype, gain = 3, torch.float16, torch.rand(3 * 64)
    x = torch.randn(tokens, blocks * 64)
    segments = [
        made(kind, x, rows, 64, blocks=blocks, mix=drawn(blocks, blocks, rows) / 2)
        for rows in (32, 64, 96)
    ]
    for several in (segments[:1], segments):
        run = stages(several, OnCores(gain, EPS, dtype=dtype, order=order))
        assert run is not None
        run()
        for s in several:
            found = s.y
            if order is not None:
                places = field_order(*order)
                groups = found.unflatten(1, (-1, order[1]))
                found = torch.empty_like(groups).index_copy_(2, places, groups).flatten(1)
            close(found, s.product(gain, EPS))


def test_what_is_not_mixed_here() -> None:
    """Layers that add, that differ in blocks, or of which one has none."""
    from blr.kernels.decode.skinny.bound import OnCores, stages

    x = torch.randn(3, 64)
    two, four = (
        made("16", x, 8, 64 // blocks, blocks=blocks, mix=drawn(blocks, blocks, 8)) for blocks in (2, 4)
    )
    for several, add in (([two], True), ([two, four], False), ([two, made("16", x, 8, 64)], False)):
        assert stages(several, OnCores(add=add)) is None


@pytest.mark.parametrize("tokens", [2, 9])
def test_corrections_of_blocks_are_added_behind(tokens: int) -> None:
    """And stages of two formats in two launches, each with inputs of its own."""
    from blr.kernels.decode.skinny.bound import OnCores, stages

    torch.manual_seed(0)
    x, gain, blocks = torch.randn(tokens, 128), torch.rand(128), 2
    z = torch.full((tokens, blocks * 5), float("nan"))
    first = Segment(x, drawn(blocks, 5, 64) / 8, z)
    correction = Correction(first, Narrow(drawn(blocks, 20, 5)))
    segments = [made("3/64", x, 40, 128, correction=correction), made("8/32", x, 16, 128)]
    how = OnCores(gain, EPS)
    run = stages(segments, how)
    assert run is not None
    run()
    for s in segments:
        close(s.y.clone(), s.product(gain, EPS))
    pair = [segments[0], made("3/64", x, 40, 128)]
    run = stages(pair, replace(how, activation="silu"))
    assert run is not None
    run()
    found = pair[1].y.clone()
    dual(*pair, activation="silu", gain=gain, eps=EPS)
    close(found, pair[1].y)


@pytest.mark.parametrize("kind", ["16", "3/64", "8/32"])
def test_each_stage_may_have_inputs_of_its_own(kind: str) -> None:
    from blr.kernels.decode.skinny.bound import OnCores, stages

    torch.manual_seed(0)
    segments = [made(kind, torch.randn(3, K), 24, K) for K in (128, 72)]
    run = stages(segments, OnCores())
    assert run is not None
    run()
    for s in segments:
        close(s.y.clone(), s.product(None, 0.0))
