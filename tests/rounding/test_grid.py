"""Grids: nearest points, scales, and rounding that makes its errors good."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blr.compressor.rounding.correction import corrected
from blr.compressor.rounding.gptq import compensation, gptq
from blr.compressor.rounding.grid import best_scale, levels, nearest
from blr.compressor.structures import lowrank
from blr.compressor.structures.specs import LowRankSpec

BITS = (2, 3, 4, 8)


@given(bits=st.sampled_from(BITS), seed=st.integers(0, 1000), negative=st.booleans())
@settings(max_examples=40, deadline=None)
def test_the_nearest_level_is_the_nearest(bits: int, seed: int, negative: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    scale = torch.rand(5, 1, generator=generator, dtype=torch.float64) + 0.01
    scale = -scale if negative and bits == 4 else scale
    table = levels(bits).double()
    found = (nearest(w, scale, bits) * scale - w).abs()
    expected = (table * scale[..., None] - w[..., None]).abs().amin(-1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("bits", BITS)
def test_a_scale_of_zero_gives_zeros(bits: int) -> None:
    w = torch.zeros(3, 16)
    assert not (nearest(w, best_scale(w, bits), bits) * best_scale(w, bits)).any()


@pytest.mark.parametrize("bits", BITS)
def test_more_bits_and_a_searched_scale_lose_less(bits: int) -> None:
    torch.manual_seed(0)
    w = torch.randn(64, 128, dtype=torch.float64)

    def error(scale: torch.Tensor, n: int) -> float:
        return float((nearest(w, scale, n) * scale - w).square().mean())

    whole = w.abs().amax(-1, keepdim=True) / levels(bits).abs().max()
    assert error(best_scale(w, bits), bits) <= error(whole, bits) * 1.0001
    if bits < 8:
        more = BITS[BITS.index(bits) + 1]
        assert error(best_scale(w, more), more) < error(best_scale(w, bits), bits) / 3


def _problem() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    x = torch.randn(400, 96, dtype=torch.float64) @ torch.randn(96, 96, dtype=torch.float64) / 8
    return torch.randn(40, 96, dtype=torch.float64), x.mT @ x / 400


def _error(missed: torch.Tensor, gram: torch.Tensor) -> float:
    return float(((missed @ gram) * missed).sum())


@pytest.mark.parametrize("bits", BITS[:3])
def test_compensated_rounding_loses_less_of_the_output(bits: int) -> None:
    weight, gram = _problem()
    found = gptq(weight, compensation(gram), bits, 32)
    scale = best_scale(weight.unflatten(1, (-1, 32)), bits)
    plain = (nearest(weight.unflatten(1, (-1, 32)), scale, bits) * scale).flatten(1)
    assert _error(weight - found.value, gram) < 0.8 * _error(weight - plain, gram)
    again = nearest(found.latent.unflatten(1, (-1, 32)), found.scale[..., None], bits)
    torch.testing.assert_close((again * found.scale[..., None]).flatten(1), found.value)


def test_a_last_group_may_be_shorter_and_inputs_dead() -> None:
    weight, gram = _problem()
    gram[:, 5] = gram[5] = 0
    found = gptq(weight, compensation(gram), 3, 40)
    assert found.scale.shape == (40, 3) and bool(found.value.isfinite().all())


def test_a_correction_beats_rounding_alone() -> None:
    weight, gram = _problem()
    spec = LowRankSpec(96, 40, 4)

    def fit(missed: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors = lowrank.fit(missed, spec, gram).tensors
        return tensors, lowrank.reconstruct(tensors, spec)

    base, tensors = corrected(weight, gram, 2, 32, fit)
    alone = gptq(weight, compensation(gram), 2, 32)
    missed = weight - base.value - lowrank.reconstruct(tensors, spec)
    assert _error(missed, gram) < 0.8 * _error(weight - alone.value, gram)
