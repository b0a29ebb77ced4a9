"""Launches the mix of BLAST on tensors [blocks, ranks, tokens]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blr.kernels.gemm.launch import dot_precision


def mix(
    z: Tensor, s: Tensor, out: Tensor | None = None, *, cores: str | None = None, **config: Any
) -> Tensor:
    """``out[k, r, n] = Σ_l s[k, l, r] z[l, r, n]``, sums in float32.

    Args:
        z: [b, r, n], tokens of stride 1. s: [b, b, r], any strides.
        out: like z, or z itself: the mix is safe in place. Default: a new tensor.
        cores: "tensor" (a dot over l, padded to 16) or "cuda" (b a power of two up to 16);
            default: by b.
        config: BR, BN, STEPS (tensor) or BN (cuda), num_warps.
    """
    from blr.kernels.blast.triton import mix_dot_kernel, mix_fma_kernel

    blocks, ranks, tokens = z.shape
    out = torch.empty_like(z) if out is None else out
    if z.numel() == 0:
        return out
    if (cores or default_cores(blocks)) == "cuda":
        config = {"BN": 512 if blocks > 8 else 1024, "num_warps": 4, **config}
        grid = (-(-tokens // config["BN"]), ranks)
        mix_fma_kernel[grid](
            *(z, s, out, tokens, z.stride(0), z.stride(1), *s.stride(), out.stride(0), out.stride(1)),
            B=blocks,
            **config,
        )
        return out
    config = {"BR": 4, "BN": 128, "STEPS": 1, "num_warps": 4, **config}
    grid = (-(-tokens // (config["BN"] * config["STEPS"])), -(-ranks // config["BR"]))
    mix_dot_kernel[grid](
        *(z, s, out, tokens, ranks, blocks, z.stride(0), z.stride(1), *s.stride()),
        *(out.stride(0), out.stride(1)),
        B=max(16, 1 << (blocks - 1).bit_length()),
        PRECISION=dot_precision(),
        **config,
    )
    return out


def default_cores(blocks: int) -> str:
    """Few blocks: the CUDA cores hold them all in registers."""
    return "cuda" if blocks in (1, 2, 4, 8) else "tensor"
