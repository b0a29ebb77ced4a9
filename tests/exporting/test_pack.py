"""Quantized layers: forward passes are those of their dequantized factors, for every structure; what
is stored loads through transformers; errors that are reported are those that are there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pico import save_pico
from quantized import (
    quantizable,
    quantize_head,
    quantize_layer,
    quantize_model,
    quantized_spec,
)
from safetensors.torch import load_file
from tolerances import TOLERANCES
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from blr.compressor.base.errors import NumericsError, UsageError
from blr.compressor.fitting.rounding import quantize_dense, quantize_factors
from blr.compressor.modeling.layers import (
    QuantizedLinear,
    StructuredLinear,
    make_layer,
)
from blr.compressor.modeling.modeling_blr import replace_layers
from blr.compressor.modeling.stages import stages_of
from blr.compressor.structures.packing import pack_factor, to_matrix, unpack_factor
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import (
    BlastSpec,
    DenseSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
)
from blr.kernels.decode.gemv.segments import QuantizedSegment, grouped

pytestmark = pytest.mark.fast

SPECS: list[Spec] = [
    LowRankSpec(150, 200, 130),
    LowRankSpec(24, 40, 5, 4, "out"),
    LowRankSpec(24, 40, 3, 6, "in"),
    MonarchSpec(24, 36, 3, 2),
    BlastSpec(18, 27, 9, 4),
    KroneckerSpec(24, 36, ((1, 9, 4, 4), (4, 4, 6, 1))),
]
SPEC = pytest.mark.parametrize(
    "spec", SPECS, ids=lambda s: f"{s.structure}-{s.describe()}".replace(" ", "-")
)
BITS = pytest.mark.parametrize("bits", [8, 4], ids=["int8", "int4"])


def _layer(spec: Spec, bias: bool = True) -> nn.Module:
    torch.manual_seed(0)
    layer = make_layer(spec.to_dict(), bias)
    if bias:
        nn.init.normal_(layer.bias)
    return layer


@SPEC
@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_forward_is_that_of_the_dequantized_factors(spec: Spec, bits: int, dtype: torch.dtype) -> None:
    new, _ = quantize_layer(_layer(spec).to(dtype), bits)
    factors = {name: new.factor(name) for name in spec.shapes() if name != "S"}
    if spec.structure == "blast":
        factors["S"] = new.S
    assert {name: f.shape for name, f in factors.items()} == dict(spec.shapes())
    weight = (
        STRUCTURES[spec.structure]
        .factorizer()
        .reconstruct({n: f.double() for n, f in factors.items()}, spec)
    )
    x = torch.randn(2, 3, spec.in_features).to(dtype)
    expected = torch.nn.functional.linear(x.double(), weight, new.bias.double())
    found = new(x)
    assert found.dtype == dtype
    assert float((found.double() - expected).norm() / expected.norm()) < TOLERANCES[dtype]


@SPEC
@BITS
def test_reported_errors_are_those_of_the_layer(spec: Spec, bits: int) -> None:
    layer = _layer(spec, bias=False)
    new, error = quantize_layer(layer, bits)
    eye = torch.eye(spec.in_features)
    exact, rounded = layer(eye).detach(), new(eye)
    measured = float((exact - rounded).norm() / exact.norm())
    assert error == pytest.approx(measured, rel=1e-3)
    assert 0 < error < {8: 0.02, 4: 0.2}[bits]


@pytest.mark.parametrize(
    "spec", [s for s in SPECS if STRUCTURES[s.structure].linear], ids=lambda s: s.structure
)
def test_rows_of_a_product_are_those_of_its_last_factor(spec: Spec) -> None:
    """W = U Zᵀ, block row by block row, of groups of columns with all of U side by side."""
    factorizer = STRUCTURES[spec.structure].factorizer()
    torch.manual_seed(0)
    factors = {name: torch.randn(shape).double() for name, shape in spec.shapes().items()}
    right = factorizer.right_factor(factors, spec)
    left = to_matrix(QuantizedSpec(spec, 4), "U", factors["U"])
    rows = (left @ right.mT).reshape(spec.out_features, spec.in_features)
    torch.testing.assert_close(rows, factorizer.reconstruct(factors, spec))


def test_terms_that_cancel_survive_int4() -> None:
    """BLAST fits leave large terms of opposite sign: rounded alone they lose what is left of them."""
    spec = BlastSpec(64, 64, 4, 24)
    torch.manual_seed(0)
    factors = {name: torch.randn(shape) for name, shape in spec.shapes().items()}
    for name, sign in (("U", -1.0), ("V", 1.0), ("S", 1.0)):  # pairs of ranks of nearly one term
        noise = 0.3 * torch.randn_like(factors[name][..., :12])
        factors[name][..., 12:] = sign * factors[name][..., :12] + noise
    packed = QuantizedSpec(spec, 4)
    alone = [pack_factor(packed, name, factor, torch.float32) for name, factor in factors.items()]
    each = zip(factors, alone, strict=True)
    back = {name: unpack_factor(packed, name, stored, torch.float32) for name, stored in each}
    reconstruct = STRUCTURES["blast"].factorizer().reconstruct
    exact = reconstruct(factors, spec)
    missed = float((reconstruct(back, spec) - exact).norm() / exact.norm())
    assert quantize_factors(packed, factors).error < 0.8 * missed


@SPEC
def test_packed_factors_are_what_the_kernels_read(spec: Spec) -> None:
    """`packed` describes the physical factor, rows along the contracted axis."""
    layer = _layer(spec)
    new, _ = quantize_layer(layer, 8)
    held = dict(layer.named_parameters())
    for name in spec.shapes():
        if name != "S":
            found, packing = new.packed(name), QuantizedSpec(spec, 8)
            assert found.shape == packing.matrix_shape(name)
            near = to_matrix(packing, name, held[name].detach())
            torch.testing.assert_close(
                found.dequantized(), near, rtol=0, atol=float(near.abs().max()) / 100
            )


@SPEC
def test_stages_compute_the_layer(spec: Spec) -> None:
    """One after the other they give what the layer's own forward gives."""
    layer, _ = quantize_layer(_layer(spec), 8)
    stages = stages_of(layer)
    if spec.structure == "ks":
        assert stages is None
        return
    x = torch.randn(3, spec.in_features)
    expected = layer(x)
    for w, bias, mix, part, correction in stages:
        assert correction is None
        y = torch.empty(3, w.shape[0] * w.shape[1])
        grouped([QuantizedSegment(x, *w[:4], y, bias, mix, part)])
        x = y
    torch.testing.assert_close(x, expected)


@SPEC
@BITS
def test_a_state_dict_loads_into_an_empty_layer(spec: Spec, bits: int) -> None:
    layer = _layer(spec).bfloat16()
    new, _ = quantize_layer(layer, bits)
    empty = make_layer(quantized_spec(layer, bits).to_dict(), bias=True).bfloat16()
    assert {n: (t.shape, t.dtype) for n, t in empty.state_dict().items()} == {
        n: (t.shape, t.dtype) for n, t in new.state_dict().items()
    }
    empty.load_state_dict(new.state_dict())
    x = torch.randn(3, spec.in_features).bfloat16()
    assert torch.equal(empty(x), new(x))


def test_int4_takes_a_quarter_of_the_bytes() -> None:
    layer = _layer(LowRankSpec(1024, 1024, 512), bias=False).bfloat16()
    new, _ = quantize_layer(layer, 4)
    before, after = (sum(t.nbytes for t in m.state_dict().values()) for m in (layer, new))
    assert after == before / 4 * (1 + 2 / 64)  # a scale of 2 bytes beside 64 bytes


@BITS
def test_dense_layers_of_both_kinds(bits: int) -> None:
    torch.manual_seed(0)
    linear, conv = nn.Linear(150, 40), Conv1D(40, 150)
    conv.weight.data.copy_(linear.weight.mT)
    conv.bias.data.copy_(linear.bias)
    x = torch.randn(2, 3, 150)
    results = []
    for layer in (linear, conv):
        new, error = quantize_layer(layer, bits)
        assert isinstance(new, QuantizedLinear)
        assert error == pytest.approx(
            float((new.weight - linear.weight).detach().norm() / linear.weight.detach().norm()), rel=1e-3
        )
        results.append(new(x))
        expected = torch.nn.functional.linear(x, new.weight, linear.bias)
        torch.testing.assert_close(new(x), expected)
    assert torch.equal(*results)


def test_which_modules_are_quantized(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_pico("llama", tmp_path))
    names = quantizable(model)
    assert "lm_head" not in names
    assert len(names) == 2 * 7
    assert quantizable(model, dense=False) == []
    assert quantizable(model, skip=names[:1]) == names[1:]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_a_quantized_model_computes_and_loads_again(name: str, tmp_path: Path) -> None:
    """Saved and loaded by transformers into empty quantized layers: the same logits to the bit."""
    model = AutoModelForCausalLM.from_pretrained(save_pico(name, tmp_path / "dense")).eval()
    ids = torch.arange(12).reshape(2, 6)
    with torch.inference_mode():
        exact = model(ids).logits
    table = {n: quantized_spec(model.get_submodule(n), 8).to_dict() for n in quantizable(model)}
    errors = quantize_model(model, 8)
    assert set(errors) == set(table)
    with torch.inference_mode():
        logits = model(ids).logits
    assert 0 < float((logits - exact).norm() / exact.norm()) < 0.05
    model.save_pretrained(tmp_path / name)

    class Loaded(type(model)):
        def post_init(self) -> None:
            replace_layers(self, table, make_layer)
            super().post_init()

    again, info = Loaded.from_pretrained(tmp_path / name, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.inference_mode():
        assert torch.equal(again.eval()(ids).logits, logits)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_the_head_is_quantized_by_itself_and_tied_no_more(name: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_pico(name, tmp_path / "dense")).eval()
    table, weight = model.get_input_embeddings().weight, model.lm_head.weight.detach().clone()
    kept, ids = table.detach().clone(), torch.arange(12).reshape(2, 6)
    with torch.inference_mode():
        exact = model(ids).logits
    errors = quantize_head(model, 8)
    assert isinstance(model.lm_head, QuantizedLinear)
    measured = float((model.lm_head.weight - weight).norm() / weight.norm())
    assert list(errors) == ["lm_head"]
    assert errors["lm_head"] == pytest.approx(measured, rel=1e-3)
    model.tie_weights()
    assert model.get_input_embeddings().weight is table and torch.equal(table, kept)
    assert model.config.tie_word_embeddings is False
    with torch.inference_mode():
        assert 0 < float((model(ids).logits - exact).norm() / exact.norm()) < 0.01
    model.save_pretrained(tmp_path / "saved")
    assert {"lm_head.weight_q", "lm_head.weight_scale"} <= load_file(
        tmp_path / "saved" / "model.safetensors"
    ).keys()
    with pytest.raises(UsageError, match="QuantizedLinear: expected a linear layer"):
        quantize_head(model, 4)
    assert quantizable(model)  # the layers are left


def test_models_without_a_head_are_refused() -> None:
    with pytest.raises(UsageError, match="output head of Sequential is none"):
        quantize_head(nn.Sequential(nn.Linear(4, 4)), 8)


@BITS
def test_large_weights_in_turns_are_the_same(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bounds memory changes neither packed weights, nor errors, nor results."""
    torch.manual_seed(0)
    layer, x = nn.Linear(150, 41), torch.randn(2, 3, 150)
    whole, error = quantize_layer(layer, bits)
    expected = whole(x)
    monkeypatch.setattr("blr.compressor.modeling.layers.WHOLE", 150 * 7)
    parts = quantize_dense(layer.weight.detach(), QuantizedSpec(DenseSpec(150, 41), bits))
    assert parts.tensors["weight_q"].equal(whole.weight_q)
    assert parts.tensors["weight_scale"].equal(whole.weight_scale)
    assert parts.error == pytest.approx(error, rel=1e-6)
    torch.testing.assert_close(whole(x), expected)
    one = nn.Linear(150, 41, bias=False)
    assert quantize_layer(one, bits)[0](x).shape == (2, 3, 41)


def test_weights_beyond_their_scales_dtype_are_named() -> None:
    layer = nn.Linear(8, 2)
    nn.init.constant_(layer.weight, float("inf"))
    model = nn.Sequential(layer)
    with pytest.raises(NumericsError, match=r"^0: scales of weight are not finite"):
        quantize_model(model, 8)


def test_quantized_layers_are_not_quantized_again() -> None:
    model = nn.Sequential(_layer(SPECS[0]))
    quantize_model(model, 8)
    assert isinstance(model[0], StructuredLinear) and model[0].packing
    assert quantize_model(model, 4) == {}
