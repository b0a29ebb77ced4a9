"""Twins: layers in full numbers in the place of packed ones give what these give, and their bytes."""

from __future__ import annotations

import pytest
import torch

from blr.compressor.fitting.rounding import Metric, is_latent, plain_fit, round_layer
from blr.compressor.fitting.student import make_twin
from blr.compressor.modeling.layers import layer_of
from blr.compressor.structures.latent import Banks
from blr.compressor.structures.specs import (
    BlastSpec,
    CorrectedSpec,
    DenseSpec,
    KroneckerSpec,
    LowRankSpec,
    MonarchSpec,
    QuantizedSpec,
    Spec,
)

Q2 = QuantizedSpec(DenseSpec(48, 32), 2, 32)
SPECS = [
    LowRankSpec(48, 32, 4),
    Q2,
    QuantizedSpec(DenseSpec(48, 32), 3, 64),
    QuantizedSpec(LowRankSpec(48, 32, 5), 4, 32, tiled=True),
    QuantizedSpec(MonarchSpec(48, 32, 4, 2), 4, 32),
    QuantizedSpec(BlastSpec(48, 32, 4, 8), 8, 32, kept_bits=8),
    QuantizedSpec(KroneckerSpec(48, 32, ((1, 8, 8, 4), (4, 8, 12, 1))), 4, 32),
    CorrectedSpec(Q2, LowRankSpec(48, 32, 4)),
    CorrectedSpec(Q2, QuantizedSpec(BlastSpec(48, 32, 4, 4), 4, 32, tiled=True)),
]


def _stored(spec: Spec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    weight = torch.randn(32, 48, dtype=torch.float64)
    metric = Metric(torch.eye(48, dtype=torch.float64))
    return weight, round_layer(weight, spec, metric, torch.bfloat16, plain_fit())


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.structure} {spec.describe()}")
def test_a_twin_is_the_layer_and_stores_its_bytes(spec: Spec) -> None:
    _, found = _stored(spec)
    tensors = {name: t for name, t in found.items() if not is_latent(name)}
    layer = layer_of(spec, bias=True)
    bias = torch.randn(32)
    layer.load_state_dict({**tensors, "bias": bias})
    twin, x = make_twin(spec, tensors, bias), torch.randn(7, 48)
    torch.testing.assert_close(twin.module(x), layer.float()(x), rtol=2e-2, atol=2e-2)
    Banks(twin.parts.values()).publish()
    kept = twin.stored(torch.bfloat16)
    assert set(kept) == set(spec.stored())
    again = layer_of(spec, bias=True)
    again.load_state_dict({**kept, "bias": bias})
    torch.testing.assert_close(again.float()(x), layer.float()(x), rtol=2e-2, atol=2e-2)
    same = all(torch.equal(kept[name], tensors[name]) for name in tensors)
    assert same or any(name.endswith("_q") for name in tensors)  # a scale of 0 has any level


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: f"{spec.structure} {spec.describe()}")
def test_a_twin_with_its_latent_numbers_starts_as_the_layer(spec: Spec) -> None:
    """They are those that were rounded: scaled as the stored ones, solved again where these were."""
    _, found = _stored(spec)
    plain = make_twin(spec, {name: t for name, t in found.items() if not is_latent(name)})
    twin, x = make_twin(spec, found), torch.randn(7, 48)
    Banks(twin.parts.values()).publish()
    expected = plain.module(x)
    assert float((twin.module(x) - expected).norm()) < 0.05 * float(expected.norm())


@pytest.mark.parametrize("spec", SPECS[1:], ids=lambda spec: f"{spec.structure} {spec.describe()}")
def test_training_a_twin_improves_what_is_stored(spec: Spec) -> None:
    weight, tensors = _stored(spec)
    twin = make_twin(spec, tensors)
    x = torch.randn(512, 12) @ torch.randn(12, 48)  # other inputs than it was rounded for
    target = x @ weight.float().mT
    twin.module.requires_grad_(True)
    banks = Banks(twin.parts.values())
    masters = [found for part in twin.parts.values() for found in part.masters]
    groups = [
        {"params": [m], "lr": 0.01 * r * float(m.detach().square().mean().sqrt())} for m, r in masters
    ]
    optimizer = torch.optim.Adam(groups)

    def lost() -> float:
        stored = {
            n: t.float() if t.is_floating_point() else t for n, t in twin.stored(torch.float32).items()
        }
        return float((make_twin(spec, stored).module(x) - target).detach().square().mean())

    before = lost()
    for _ in range(60):
        optimizer.zero_grad()
        (twin.module(x) - target).square().mean().backward()
        banks.collect()
        optimizer.step()
        banks.publish()
    assert lost() < 0.97 * before
