"""Rotations of queries and keys and gates of MLPs in plain torch."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x ⊙ cos + (−x₂, x₁) ⊙ sin`` of heads x [B, H, T, D]; cos and sin [B or 1, T, D].

    Halves in place of pairs. RoFormer (arXiv 2104.09864).
    """
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


# Of gate and up [..., K], by name
GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda gate, up: silu(gate) * up,
    "geglu": lambda gate, up: gelu(gate, approximate="tanh") * up,
}
