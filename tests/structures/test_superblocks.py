"""Grids q2_k and q3_k: whatever rounds or trains weights, the scales of a superblock have one unit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from blr.compressor.structures.gptq import compensation, gptq
from blr.compressor.structures.latent import Banks, Latent, RoundedGrid
from blr.kernels.decode.quantized.formats import K_GROUP, MULTIPLES, SUPERBLOCK
from blr.kernels.decode.quantized.reference import quantize, shared_scales

WIDE = 2 * SUPERBLOCK * K_GROUP


def check_scales(scale: Tensor, bits: int) -> None:
    """Each 8 are multiples of some unit that float16 holds, by at most the largest multiple."""
    most = MULTIPLES[bits][0]
    for part in scale.float().reshape(-1, SUPERBLOCK):
        units = part.abs().max() / torch.arange(1, most + 1)
        counts = part / units[:, None]
        assert ((counts == counts.round()).all(-1) & (units.half() == units)).any()


def weights(dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    sizes = torch.rand(12, WIDE // 32, 1, generator=generator)
    return (torch.randn(12, WIDE // 32, 32, generator=generator) * sizes / 50).flatten(1).to(dtype)


@pytest.mark.parametrize("bits", [2, 3])
def test_rounding_is_on_the_grid(bits: int) -> None:
    """To the nearest level, with compensation, and with latent weights after a step of training."""
    w, form = weights(), {"curved": False, "superblocks": True}
    _, scale = quantize(w, bits, torch.bfloat16, K_GROUP, **form)
    check_scales(scale, bits)
    grid = RoundedGrid(bits, K_GROUP, **form)
    _, found, _ = gptq(w, compensation(torch.eye(WIDE) + 0.5).float(), grid)
    check_scales(found, bits)
    parameter = nn.Parameter(w.clone())
    latent = Latent(parameter, grid, scale=scale)
    banks = Banks([latent])
    banks.publish()
    parameter.grad = torch.randn_like(parameter)
    banks.collect()
    assert latent.scale.grad is not None and float(latent.scale.grad.abs().sum()) > 0
    latent.scale -= 1e-3 * latent.scale.grad
    check_scales(latent.rounded()[1], bits)


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_scales_on_the_grid_stay_as_they_are(bits: int, dtype: torch.dtype) -> None:
    scale = torch.rand(64, 4 * SUPERBLOCK, generator=torch.Generator().manual_seed(0)).to(dtype)
    once = shared_scales(scale, bits)
    assert torch.equal(shared_scales(once, bits), once)
    assert float((once - scale).abs().max() / scale.max()) < 0.5 / 12
    assert not shared_scales(torch.zeros(SUPERBLOCK), bits).any()
