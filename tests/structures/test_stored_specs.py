"""What a layer is stored as: names, shapes and bits that its spec says are those that packing makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from blr.compressor.fitting.rounding import is_latent, plain_fit, round_layer
from blr.compressor.structures.base import FitOptions
from blr.compressor.structures.packing import from_matrix, pack_factor, to_matrix, unpack_factor
from blr.compressor.structures.specs import (
    BlastSpec,
    CorrectedSpec,
    DenseSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
    spec_from_dict,
)
from blr.kernels.decode.quantized.formats import BITS, FP8_GROUPS, GROUPS
from blr.kernels.fp8.reference import dequantize_fp8, quantize_fp8

pytestmark = pytest.mark.fast

PLAIN: list[Spec] = [
    DenseSpec(150, 36),
    LowRankSpec(150, 200, 24),
    LowRankSpec(24, 40, 5, 4, "out"),
    LowRankSpec(24, 40, 3, 6, "in"),
    MonarchSpec(24, 36, 3, 2),
    BlastSpec(18, 27, 9, 4),
    BlastSpec(64, 48, 4, 16),
    KroneckerSpec(24, 36, ((1, 9, 4, 4), (4, 4, 6, 1))),
]
BASE = QuantizedSpec(DenseSpec(150, 200), 2)
CORRECTED: list[Spec] = [
    CorrectedSpec(BASE, LowRankSpec(150, 200, 4)),
    CorrectedSpec(QuantizedSpec(BASE.of, 3, curved=False), LowRankSpec(150, 200, 4)),
    CorrectedSpec(BASE, QuantizedSpec(LowRankSpec(150, 200, 5), 4, tiled=True)),
    CorrectedSpec(BASE, QuantizedSpec(MonarchSpec(150, 200, 5, 2), 4, 32, tiled=True)),
    CorrectedSpec(BASE, QuantizedSpec(BlastSpec(150, 200, 5, 7), 3, 64, kept_bits=8, tiled=True)),
]
FLOATS = [QuantizedSpec(s, 8, g, fp8=True) for s in PLAIN for g in FP8_GROUPS]
K_QUANTS = [QuantizedSpec(DenseSpec(512, 36), b, 32, superblocks=True, curved=False) for b in (2, 3)]
EVERY = K_QUANTS + [QuantizedSpec(s, b, g) for s in PLAIN for b in BITS for g in GROUPS]


@pytest.mark.parametrize("spec", [*PLAIN[1:], *EVERY[::5], *FLOATS, *CORRECTED], ids=repr)
def test_a_spec_is_what_its_entry_says(spec: Spec) -> None:
    assert spec_from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("spec", PLAIN, ids=repr)
def test_every_format_stores_what_it_says_and_gives_it_back(spec: Spec, tiled: bool, bits: int) -> None:
    torch.manual_seed(0)
    for group in GROUPS:
        packing = QuantizedSpec(spec, bits, group, kept_bits=8, tiled=tiled)
        found: dict[str, torch.Tensor] = {}
        for name, shape in spec.shapes().items():
            factor = torch.randn(shape)
            matrix = to_matrix(packing, name, factor)
            assert matrix.shape == packing.packed_shape(name)
            assert torch.equal(from_matrix(packing, name, matrix), factor)
            tensors = pack_factor(packing, name, factor, torch.bfloat16)
            found |= tensors
            back = unpack_factor(packing, name, tensors, torch.float32)
            error = float((back - factor).norm() / factor.norm())
            assert error < {8: 0.02, 4: 0.12, 3: 0.22, 2: 0.42}[8 if name == "S" else bits]
        stored = packing.stored()
        assert {n: tuple(t.shape) for n, t in found.items()} == {n: s.shape for n, s in stored.items()}
        assert sum(8 * tensor.nbytes for tensor in found.values()) == packing.stored_bits()
        kinds = {torch.int8: "I8", torch.uint8: "U8", torch.bfloat16: None}
        assert all(kinds[tensor.dtype] == stored[name].dtype for name, tensor in found.items())


@pytest.mark.parametrize("packing", FLOATS, ids=repr)
def test_float8_stores_what_it_says_to_within_half_a_step(packing: QuantizedSpec) -> None:
    """e4m3 has four bits of mantissa, one of them implied: 1/16 of a number, or of the least normal."""
    torch.manual_seed(0)
    stored = packing.stored()
    found: dict[str, torch.Tensor] = {}
    for name, shape in packing.shapes().items():
        factor = torch.randn(shape) * torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (len(shape) - 1))
        tensors = pack_factor(packing, name, factor, torch.float32)
        found |= tensors
        back = unpack_factor(packing, name, tensors, torch.float32)
        least = tensors.get(f"{name}_scale", torch.zeros(1)).max() * 2**-6
        assert bool(((back - factor).abs() <= factor.abs().clamp_min(least) / 16 * 1.001).all())
    assert {n: tuple(t.shape) for n, t in found.items()} == {n: s.shape for n, s in stored.items()}
    assert sum(8 * tensor.nbytes for tensor in found.values()) == packing.stored_bits(32)
    kinds = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: None}
    assert all(kinds[tensor.dtype] == stored[name].dtype for name, tensor in found.items())


def test_float8_of_zeros_and_of_what_a_scale_rounded_down_leaves_beyond_448() -> None:
    w = torch.tensor([[0.0, 0.0], [1e-30, 0.0], [448 * 1.0039, -3.0], [3e38, -3e38]])
    q, scale = quantize_fp8(w, scale_dtype=torch.bfloat16)
    back = dequantize_fp8(q, scale, torch.float32)
    assert bool(torch.isfinite(back).all())
    assert torch.allclose(back, w, rtol=0.04, atol=1e-32)


@pytest.mark.parametrize("spec", CORRECTED, ids=repr)
def test_corrected_layers_store_what_they_say(spec: Spec) -> None:
    torch.manual_seed(0)
    made = round_layer(
        torch.randn(200, 150), spec, None, torch.bfloat16, plain_fit(FitOptions(rounds=3))
    )
    found = {name: tensor for name, tensor in made.items() if not is_latent(name)}
    assert {n: tuple(t.shape) for n, t in found.items()} == {
        n: s.shape for n, s in spec.stored().items()
    }
    assert sum(8 * tensor.nbytes for tensor in found.values()) == spec.stored_bits()


def test_bits_of_a_small_correction_are_its_numbers_and_scales_alone() -> None:
    """Short rows of U share their groups: 16 ranks at int4 take 4 1/8 bits a number."""
    spec = QuantizedSpec(LowRankSpec(384, 1024, 16), 4, tiled=True)
    assert spec.stored_bits() == 16 * (384 + 1024) * 4.125
    assert QuantizedSpec(DenseSpec(384, 1024), 2).stored_bits() == 384 * 1024 * 2.125


DENSE = {"structure": "dense", "in_features": 64, "out_features": 64}
SVD = {"structure": "svd", "in_features": 64, "out_features": 64, "rank": 4}


@pytest.mark.parametrize(
    "fields",
    [
        DENSE,
        {**DENSE, "bits": 5},
        {**DENSE, "bits": 4.0},
        {**DENSE, "bits": True},
        {**DENSE, "bits": "4"},
        {**DENSE, "bits": 4, "group": 96},
        {**DENSE, "bits": 4, "group": None},
        {**SVD, "bits": 4, "kept_bits": 4},
        {**SVD, "bits": 4, "tiled": 1},
        {**SVD, "bits": 3, "curved": "no"},
        {**SVD, "group": 64},
        {**SVD, "fp8": True},
        {**SVD, "bits": 8, "fp8": True, "group": 64},
        {**SVD, "bits": 4, "fp8": True},
        {**SVD, "bits": 8, "fp8": 1},
        {**SVD, "bits": 8, "group": 0},
        {"structure": "corrected"},
        {"structure": "corrected", "base": SVD, "correction": SVD},
        {"structure": "corrected", "base": {**SVD, "bits": 2}, "correction": SVD},
        {"structure": "corrected", "base": {**DENSE, "bits": 2}, "correction": {**DENSE, "bits": 2}},
        {
            "structure": "corrected",
            "base": {**DENSE, "bits": 2},
            "correction": {**SVD, "in_features": 32},
        },
        {"structure": "corrected", "base": {**DENSE, "bits": 2}, "correction": SVD, "bits": 4},
    ],
    ids=str,
)
def test_entries_that_are_none_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        spec_from_dict(fields)
    nested = {"structure": "corrected", "base": {**DENSE, "bits": 2}, "correction": fields}
    with pytest.raises((ValueError, TypeError, AttributeError)):
        spec_from_dict({"structure": "corrected", "base": nested, "correction": SVD})
