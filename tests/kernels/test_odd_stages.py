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


@pytest.mark.filterwarnings("ignore:invalid value")
@CASE
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite(bad: float, way: str, bits: int) -> None:
    """Inputs spoil what they spoil by plain weights, and no other token. An infinity is NaN on the CUDA
    cores, which take the levels' offset off a sum."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS[way], K)
    x[0, 5] = bad
    s = stage(x, 33, bits)
    expected, y = s.product(None, 0.0), found(way, s)
    assert torch.equal(y.isfinite(), expected.isfinite())
    assert way != CORES or torch.equal(y.isnan(), expected.isnan())
