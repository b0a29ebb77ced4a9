"""One decoding stage in plain torch, in the dtype of its input."""

import torch
from torch import Tensor


def gemv(
    x: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
    part: int | None = None,
) -> Tensor:
    """``y = W norm(x) + bias`` over the blocks of one stage.

    Args:
        x: [n, B·K]: block g of the weights takes columns g·K…; or [n, K], which all take.
        w: [B, R, K].
        bias: [B·R] in the order of the outputs.
        gain: as wide as x, which is divided by its root mean square and multiplied by `gain`.
        part: rows of a block that stay together: output ``(row // part, block, row % part)``;
            Monarch's first stage has part = r'. None: R, the plain order.

    Returns:
        [n, B·R].
    """
    _, rows, width = w.shape
    if gain is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain
    x = x.unflatten(-1, (-1, width))  # [n, B, K], or [n, 1, K]
    y = torch.einsum("grk,ngk->ngr", w, x)
    y = y.unflatten(-1, (-1, part or rows)).transpose(1, 2).flatten(1)
    return y if bias is None else y + bias
