"""Outputs of pivot rows in their places, with what follows elementwise. Interpreter only."""

from __future__ import annotations

import pytest
import torch

from blr.kernels.common.available import has_triton
from blr.kernels.layers.pivoted.places import Places


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("options", [{}, {"add": True}, {"activation": "silu"}], ids=str)
@pytest.mark.parametrize("outputs", [6, 1030])
def test_every_output_is_put_in_its_place(outputs: int, options: dict[str, object], bias: bool) -> None:
    from blr.kernels.layers.pivoted.gather import gather

    torch.manual_seed(0)
    source = torch.randn(3, outputs + 40)[:, 8:]  # a slice of a wider buffer
    index = torch.randperm(outputs + 32)[:outputs].int()
    places = Places(index, torch.randn(outputs) if bias else None)
    width = outputs // 2 if "activation" in options else outputs
    before = torch.randn(3, width + 5, dtype=torch.float16)[:, :width]
    found, expected = before.clone(), before.clone()
    gather(source, places, found, **options)
    places.into(source, expected, **options)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert not torch.equal(found, before)
