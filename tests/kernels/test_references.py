"""The plain-torch layers compute what their factors multiply out to, in every dtype and shape."""

from __future__ import annotations

import pytest
import torch
from tolerances import TOLERANCES

from blr.compressor.modeling.layers import make_layer
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import BlastSpec, LowRankSpec, MonarchSpec, Spec

pytestmark = pytest.mark.fast

SPECS: list[Spec] = [
    LowRankSpec(24, 40, 5),
    LowRankSpec(24, 40, 5, 4, "out"),
    LowRankSpec(24, 40, 3, 6, "in"),
    MonarchSpec(24, 36, 3, 2),
    MonarchSpec(16, 16, 4, 1),
    BlastSpec(24, 36, 6, 7),
    BlastSpec(18, 27, 9, 4),
]
BATCHES = [(1,), (3,), (17,), (2, 5), (129,), (0,)]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.structure}-{s.describe()}".replace(" ", "-"))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_forward_equals_the_dense_layer(spec: Spec, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    layer = make_layer(spec.to_dict(), bias).to(dtype).requires_grad_(False)
    if bias:
        layer.bias.normal_()
    factors = {name: t.double() for name, t in layer.state_dict().items() if name != "bias"}
    weight = STRUCTURES[spec.structure].factorizer().reconstruct(factors, spec)
    for batch in BATCHES:
        wide = torch.randn(*batch, 2 * spec.in_features, dtype=torch.float64).to(dtype)
        x = wide[..., ::2]  # not contiguous
        expected = torch.nn.functional.linear(x.double(), weight, layer.bias.double() if bias else None)
        found = layer(x)
        assert found.dtype == dtype
        assert found.shape == expected.shape
        if found.numel():
            error = (found.double() - expected).norm() / expected.norm()
            assert float(error) < TOLERANCES[dtype]
