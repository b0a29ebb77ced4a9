"""Layers with float8 weights on a GPU that multiplies so: what they compute dequantized."""

from __future__ import annotations

import pytest
import torch
from rows import relative

from blr.bench.models import float8_of
from blr.compressor.modeling.float8 import prepare_layer
from blr.compressor.modeling.layers import layer_of
from blr.compressor.structures.specs import BlastSpec, DenseSpec, LowRankSpec, MonarchSpec, Spec
from blr.kernels.fp8.op import fp8_device

pytestmark = pytest.mark.gpu
SPECS: list[Spec] = [
    DenseSpec(1024, 768),
    DenseSpec(100, 36),
    LowRankSpec(1024, 768, 256),
    LowRankSpec(1024, 768, 150),
    LowRankSpec(100, 36, 7),
    MonarchSpec(1024, 768, 16, 16),
    MonarchSpec(60, 36, 3, 5),
    BlastSpec(1024, 768, 4, 128),
    BlastSpec(192, 288, 6, 33),
]
LIMIT = 0.06  # float8 of x and of z: 0.027 each, and 0.03 of BLAST's mix
FEW = 0.12  # the same of sums of a few terms, which do not average what each is rounded by


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=repr)
def test_a_layer_computes_what_its_weights_stand_for(
    spec: Spec, dtype: torch.dtype, on_cuda: str
) -> None:
    if not fp8_device(torch.device(on_cuda)):
        pytest.skip("the GPU has no float8 products")
    torch.manual_seed(0)
    factors = {n: torch.randn(s) / s[-1] ** 0.5 for n, s in spec.shapes().items()}
    bias = torch.randn(spec.out_features).to(dtype)
    dense = isinstance(spec, DenseSpec)
    plain = torch.nn.Linear(spec.in_features, spec.out_features) if dense else layer_of(spec, bias=True)
    plain.load_state_dict({**factors, "bias": bias}, assign=True)
    layer = float8_of(plain.to(dtype)).to(on_cuda)
    prepare_layer(layer)
    torch.compiler.reset()  # all layers are one function to it, of which it compiles eight
    compiled = torch.compile(layer, dynamic=False, fullgraph=True)
    limit = LIMIT if spec.in_features > 128 else FEW
    for tokens in (1, 17, 300):
        x = torch.randn(tokens, spec.in_features, device=on_cuda, dtype=dtype)
        x[0] *= 100
        with torch.enable_grad():
            expected = layer(x.clone().requires_grad_()).detach()
        with torch.no_grad():
            found = [layer(x), compiled(x), layer(x[None])[0]]
            found += [layer(x.clone()) for _ in range(3)]  # launched as the calls before were
        assert all(relative(y, expected) < limit for y in found), [relative(y, expected) for y in found]
        assert all(relative(y, expected) > 0 for y in found)  # it is not the dequantized product itself
        zero = torch.zeros_like(x)
        with torch.no_grad():
            assert torch.equal(layer(zero), bias.to(on_cuda).expand(tokens, -1))
