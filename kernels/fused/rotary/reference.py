"""Rotary position embeddings in plain torch, halves in place of pairs. RoFormer (arXiv 2104.09864)."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x ⊙ cos + (−x₂, x₁) ⊙ sin`` of heads x [B, H, T, D]; cos and sin [B or 1, T, D]."""
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)
