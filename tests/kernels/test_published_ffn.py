"""FlashSVD's feed-forward kernels compute what the layer does with everything in memory."""

from __future__ import annotations

import pytest
import torch
from tolerances import TOLERANCES

from blr.kernels.common.available import has_triton

pytestmark = pytest.mark.skipif(not has_triton(), reason="needs triton")
# tokens, inputs, middle, outputs, ranks of up, gate (0: none) and down, activation
SHAPES = [
    (37, 20, 50, 24, 7, 0, 5, "gelu"),
    (16, 48, 130, 48, 40, 0, 33, "relu"),
    (1, 33, 64, 17, 16, 9, 20, "silu"),
    (65, 24, 70, 24, 18, 18, 300, "gelu_tanh"),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["v1", "v2"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape[-1])
def test_equal_to_the_reference(shape: tuple, form: str, dtype: torch.dtype, bias: bool) -> None:
    from comparisons import FORMS, Factors, reference

    n, inputs, width, outputs, rank, gate_rank, out_rank, activation = shape
    torch.manual_seed(n)

    def factors(i: int, o: int, r: int) -> Factors:
        made = (torch.randn(o, r), torch.randn(i, r) / i**0.5, torch.randn(o) if bias else None)
        return Factors(*(t if t is None else t.to(dtype) for t in made))

    up, down = factors(inputs, width, rank), factors(width, outputs, out_rank)
    gate = factors(inputs, width, gate_rank) if gate_rank else None
    x = torch.randn(n, inputs).to(dtype)
    wide = [None if f is None else Factors(*(t if t is None else t.double() for t in f))
            for f in (up, down, gate)]  # fmt: skip
    expected = reference(x.double(), wide[0], wide[1], activation, wide[2])
    for found in (reference(x, up, down, activation, gate), FORMS[form](x, up, down, activation, gate)):
        assert found.dtype == dtype and found.shape == expected.shape
        assert (found - expected).norm() <= TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize("form", ["v1", "v2"])
@pytest.mark.parametrize("biased", ["gate", "up"])
def test_one_bias_of_a_gated_layer(biased: str, form: str) -> None:
    from comparisons import FORMS, Factors, reference

    torch.manual_seed(0)
    bias = {biased: torch.randn(20)}
    up, gate = (Factors(torch.randn(20, 3), torch.randn(12, 3), bias.get(n)) for n in ("up", "gate"))
    x, down = torch.randn(5, 12), Factors(torch.randn(12, 4), torch.randn(20, 4))
    expected, found = (run(x, up, down, "silu", gate) for run in (reference, FORMS[form]))
    assert (found - expected).norm() <= TOLERANCES[torch.float32] * expected.norm()


def test_no_tokens() -> None:
    from comparisons import FORMS, Factors

    layer = Factors(torch.randn(8, 3), torch.randn(8, 3))
    assert [form(torch.empty(0, 8), layer, layer, "gelu").shape for form in FORMS.values()] == [
        (0, 8)
    ] * 2
