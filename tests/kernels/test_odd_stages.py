"""Stages of few bits at odd sizes and of odd numbers, by each of the kernels that run them: what their
weights give when they are plain. Interpreter only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from skinny import distance
from tolerances import TOLERANCES

from blr.kernels.common.available import has_triton
from blr.kernels.decode.gemv.segments import Correction, How, Narrow, QuantizedSegment
from blr.kernels.decode.quantized.formats import BITS
from blr.kernels.decode.quantized.reference import quantize, unpack

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton")
ROWS, CORES, BYTES = "rows", "tensor cores", "bytes"
TOKENS = {ROWS: 1, CORES: 3, BYTES: 1}
CASES = [(way, bits) for way in TOKENS for bits in BITS if way != BYTES or bits < 8]
CASE = pytest.mark.parametrize("way, bits", CASES)
K = 200  # ends inside a group
GROUP = 64


def stage(x: torch.Tensor, rows: int, bits: int) -> QuantizedSegment:
    """A stage of random weights [rows, K] with scales of zero and of the other sign."""
    packed, scale = quantize(torch.randn(1, rows, K), bits, torch.float16, GROUP, curved=False)
    scale[:, 1::3, 0] = 0
    scale[:, ::2, 1] *= -1
    y = torch.full((len(x), rows), float("nan"))
    return QuantizedSegment(x, packed, scale, bits, K, y, group=GROUP, curved=False)


def corrected(s: QuantizedSegment, ranks: int) -> QuantizedSegment:
    """The stage with a correction whose factors are in int4."""
    packed, scale = quantize(torch.randn(1, s.shape[1], ranks) / ranks**0.5, 4, group=32)
    u = Narrow(unpack(packed, 4, 32)[..., :ranks].contiguous(), scale, 32)
    return replace(s, correction=Correction(stage(s.x, ranks, 4), u))


def found(way: str, s: QuantizedSegment) -> torch.Tensor:
    """What the kernels of `way` make of a stage."""
    from blr.kernels.decode import choice
    from blr.kernels.decode.skinny.bound import OnCores, stages

    run = {
        ROWS: lambda: choice.stages([s], How()),
        CORES: lambda: stages([s], OnCores(dtype=torch.float16)),
        BYTES: lambda: choice.bytewise([s], How()),
    }[way]()
    assert run is not None
    run()
    return s.y.clone()


@CASE
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_few_rows(rows: int, way: str, bits: int) -> None:
    torch.manual_seed(rows)
    s = stage(torch.randn(TOKENS[way], K), rows, bits)
    expected = s.product(None, 0.0)
    assert distance(found(way, s), expected) < TOLERANCES[torch.float16]


@pytest.mark.parametrize("way, bits", [case for case in CASES if case != (BYTES, 4)])
@pytest.mark.parametrize("ranks", [1, 5, 33, 40])
def test_any_rank(ranks: int, way: str, bits: int) -> None:
    torch.manual_seed(ranks)
    s = corrected(stage(torch.randn(TOKENS[way], K), 33, bits), ranks)
    expected = s.product(None, 0.0)
    assert distance(found(way, s), expected) < TOLERANCES[torch.float16]


# Values at places of the first token: of one quad, of several, with what is NaN anyway.
BAD = {
    "nan": {5: torch.nan},
    "infinity": {5: torch.inf},
    "negative": {70: -torch.inf},
    "two": {5: torch.inf, 6: -torch.inf},
    "apart": {5: torch.inf, 199: torch.inf},
    "both": {5: torch.inf, 130: torch.nan},
}


def spoiled(tokens: int, columns: int, bad: str) -> torch.Tensor:
    """Inputs whose first token is not finite."""
    x = torch.randn(tokens, columns)
    for place, value in BAD[bad].items():
        x[0, place] = value
    return x


def same(y: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether NaN and infinities, with their signs, are as expected, and all else is near."""
    finite = expected.isfinite()
    there = torch.equal(y.isnan(), expected.isnan()) and torch.equal(y.isfinite(), finite)
    signs = torch.equal(y[expected.isinf()], expected[expected.isinf()])
    near = not finite.any() or distance(y[finite], expected[finite]) < TOLERANCES[torch.float16]
    return there and signs and near


@pytest.mark.filterwarnings("ignore:invalid value")
@CASE
@pytest.mark.parametrize("bad", BAD)
def test_what_is_not_finite(bad: str, way: str, bits: int) -> None:
    """Inputs spoil what they spoil by plain weights, with the same sign, and no other token."""
    torch.manual_seed(0)
    s = stage(spoiled(TOKENS[way], K, bad), 33, bits)
    expected, y = s.product(None, 0.0), found(way, s)
    assert same(y, expected)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", ["infinity", "two"])
@pytest.mark.parametrize(
    "way, bits, curved",
    [
        (ROWS, 4, False),
        (ROWS, 8, False),
        *[(BYTES, bits, False) for bits in (4, 3, 2)],
        (BYTES, 3, True),
    ],
)
def test_infinities_of_other_stages(way: str, bits: int, curved: bool, bad: str) -> None:
    """Added to what results hold with a bias, and of a pair; with a correction where one can be."""
    from blr.kernels.decode import choice

    torch.manual_seed(1)
    bias, x = torch.randn(33), spoiled(1, K, bad)
    s = replace(stage(x, 33, bits), bias=bias, curved=curved)
    if way != BYTES or bits < 4:
        s = corrected(s, 5)
    run = choice.stages if way == ROWS else choice.bytewise
    expected = s.product(None, 0.0) + 1
    s.y.fill_(1)
    run([s], How(add=True))()
    assert same(s.y, expected)
    gate, up = (stage(x, 33, bits) for _ in range(2))
    expected = gate.product(None, 0.0).relu() * up.product(None, 0.0)
    run([gate, up], How(activation="relu"))()
    assert same(up.y, expected)


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("way, bits", [(ROWS, 4), (BYTES, 4), (BYTES, 2)])
def test_infinities_before_a_norm(way: str, bits: int) -> None:
    """A norm makes NaN of all results."""
    from blr.kernels.decode import choice

    torch.manual_seed(0)
    s = stage(spoiled(1, K, "infinity"), 33, bits)
    run = choice.stages if way == ROWS else choice.bytewise
    run([s], How(torch.rand(K), 1e-5))()
    assert s.y.isnan().all() and s.product(torch.rand(K), 1e-5).isnan().all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("blocks", [1, 3])
def test_infinities_of_blocks(blocks: int, bits: int) -> None:
    """Of blocks, mixed (BLAST) and not (Monarch), the same outputs are infinite or NaN."""
    from blr.kernels.decode.quantized.launch import grouped

    torch.manual_seed(0)
    packed, scale = quantize(torch.randn(blocks, 7, K), bits, torch.float16, GROUP, curved=False)
    x, y = spoiled(1, blocks * K, "infinity"), torch.empty(1, blocks * 7)
    for mix in (None, torch.randn(blocks, blocks, 7)):
        s = QuantizedSegment(x, packed, scale, bits, K, y, mix=mix, group=GROUP, curved=False)
        grouped([s])
        assert same(y, s.product(None, 0.0))
