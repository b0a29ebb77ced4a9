"""Layers in few bits: what is stored computes what it says, and its errors fall where they should."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from calibrating import drift, run
from pico import save_pico

from blr.compressor.base.errors import NumericsError
from blr.compressor.fitting.rounding import (
    Metric,
    is_latent,
    plain_fit,
    round_layer,
)
from blr.compressor.modeling.layers import layer_of
from blr.compressor.structures.base import FitOptions, relative_error, weighted_norm_squared
from blr.compressor.structures.packing import restored
from blr.compressor.structures.specs import (
    BlastSpec,
    CorrectedSpec,
    DenseSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
)

OUT, IN = 96, 160
BASE = QuantizedSpec(DenseSpec(IN, OUT), 2)


def _packed(spec: Spec, bits: int = 4) -> QuantizedSpec:
    return QuantizedSpec(spec, bits, 32, kept_bits=8, tiled=True)


SPECS: list[Spec] = [
    QuantizedSpec(DenseSpec(IN, OUT), 8),
    QuantizedSpec(DenseSpec(IN, OUT), 3, 32),
    QuantizedSpec(LowRankSpec(IN, OUT, 24), 4),
    QuantizedSpec(MonarchSpec(IN, OUT, 4, 6), 3, 32),
    QuantizedSpec(BlastSpec(IN, OUT, 4, 24), 4, 32, kept_bits=8),
    CorrectedSpec(BASE, LowRankSpec(IN, OUT, 8)),
    CorrectedSpec(BASE, _packed(LowRankSpec(IN, OUT, 8))),
    CorrectedSpec(BASE, _packed(MonarchSpec(IN, OUT, 4, 2))),
    CorrectedSpec(BASE, _packed(BlastSpec(IN, OUT, 4, 8))),
]


def _rounded(
    weight: torch.Tensor, spec: Spec, gram: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """What is stored in float32, without what training goes on from."""
    metric, fit = None if gram is None else Metric(gram), plain_fit(FitOptions(rounds=10), gram)
    found = round_layer(weight, spec, metric, torch.float32, fit)
    return {name: tensor for name, tensor in found.items() if not is_latent(name)}


def _weight() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(OUT, IN, dtype=torch.float64)


@pytest.mark.fast
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.structure} {s.describe()}")
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_the_weight_that_its_tensors_stand_for(spec: Spec, bias: bool) -> None:
    tensors = _rounded(_weight(), spec)
    layer, x = layer_of(spec, bias), torch.randn(2, 3, IN)
    if bias:
        tensors["bias"] = torch.randn(OUT)
    layer.load_state_dict(tensors)
    expected = torch.nn.functional.linear(
        x.double(), restored(spec, tensors, torch.float64), tensors["bias"].double() if bias else None
    )
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-5, atol=1e-4)
    weight = restored(spec, tensors, torch.float32)
    torch.testing.assert_close(layer.weight @ x.mT, weight @ x.mT, rtol=1e-5, atol=1e-4)
    assert layer.weight.dtype == torch.float32 and layer.described == spec
    moved = layer.to(torch.bfloat16)
    assert moved(x.bfloat16()).dtype == torch.bfloat16 and layer.weight.dtype == torch.bfloat16
    kinds = {t.dtype for t in moved.state_dict().values()}
    assert kinds - {torch.int32} <= {torch.bfloat16, torch.uint8, torch.int8}


@pytest.mark.fast
@pytest.mark.parametrize("spec", SPECS[5:], ids=lambda s: s.describe())
def test_a_correction_takes_error_off_the_base(spec: CorrectedSpec) -> None:
    """Of a weight with a few large directions, which two bits alone lose."""
    weight = _weight() + 2 * torch.randn(OUT, 3).double() @ torch.randn(3, IN).double()
    alone = restored(BASE, _rounded(weight, BASE), torch.float64)
    both = restored(spec, _rounded(weight, spec), torch.float64)
    assert relative_error(weight, both) < 0.75 * relative_error(weight, alone)


@pytest.mark.fast
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.structure} {s.describe()}")
def test_statistics_of_the_inputs_take_errors_off_the_outputs(spec: Spec) -> None:
    """Inputs of very unequal size; int8 has nothing to gain."""
    sizes = torch.logspace(-1, 1, IN, dtype=torch.float64)[torch.randperm(IN)]
    x = torch.randn(512, IN, dtype=torch.float64) * sizes
    gram, weight, missed = x.mT @ x, _weight(), {}
    for metric in (None, gram):
        found = restored(spec, _rounded(weight, spec, metric), torch.float64)
        missed[metric is None] = weighted_norm_squared(weight - found, gram)
    share = {8: 1.001, 3: 0.97}.get(getattr(spec, "bits", 0), 0.9)
    assert missed[False] < share * missed[True]


@pytest.mark.fast
def test_scales_beyond_their_dtype_are_named() -> None:
    for spec in SPECS[:2]:
        with pytest.raises(NumericsError, match="scales of weight are not finite"):
            _rounded(torch.full((OUT, IN), torch.inf), spec)


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "dense", "quantize": "int4"},
        {"method": "svd", "cf": 1.25, "quantize": "int4"},
        {"method": "blast", "blocks": 4, "rounds": 3, "base": "int3", "rank": 4},
    ],
    ids=["dense", "svd", "corrected"],
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_calibrated_fits_in_few_bits(name: str, settings: dict[str, object], tmp_path: Path) -> None:
    """The prefix is the stored one, a run goes on from its journal, and few bits cost little."""
    given = {"group": 32, **settings}
    found = run(save_pico(name, tmp_path / name), tmp_path / "journal", epochs=1, **given)
    kept = sorted(path.name for path in (tmp_path / "journal").iterdir())
    again = run(tmp_path / name, tmp_path / "journal", epochs=1, **given)
    assert sorted(path.name for path in (tmp_path / "journal").iterdir()) == kept
    assert found.results.keys() == again.results.keys() == found.planned.keys()
    bound = 0.9 if settings["method"] == "svd" else 0.35
    assert drift(found) == drift(again) < bound
    for module, (tensors, record) in found.results.items():
        spec = found.planned[module].spec
        assert tensors.keys() == spec.stored().keys() and spec.quantized
        assert record["bits"] == pytest.approx(spec.stored_bits(32) / spec.dense_parameters)
