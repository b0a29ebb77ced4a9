"""Inputs that are normed and rounded once before a launch. Interpreter only."""

from __future__ import annotations

import pytest
import torch

from blr.kernels.common.available import has_triton


@pytest.mark.skipif(not has_triton(), reason="needs triton")
@pytest.mark.parametrize("width", [40, 5000])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "normed"])
def test_inputs_are_normed_once_and_rounded_once(norm: bool, width: int) -> None:
    from blr.kernels.decode.gemv.ready import ready

    torch.manual_seed(0)
    x, gain = torch.randn(3, width + 8)[:, :width], torch.rand(width)
    out = torch.full((3, width), float("nan"), dtype=torch.float16)
    ready(x, out, gain=gain if norm else None, eps=1e-5)
    wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * gain if norm else x
    torch.testing.assert_close(out, wide.half(), atol=0, rtol=1e-3)
