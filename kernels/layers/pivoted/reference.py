"""Low-rank linear layer held by its pivot rows, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def pivoted_linear(
    x: Tensor, U: Tensor, V: Tensor, places: Tensor, bias: Tensor | None = None
) -> Tensor:
    """``y = P [t; U t] + bias`` with ``t = x V``: the pivot outputs, the others made of them, in place.

    Source: PIFA (arXiv 2501.19090), section 3.

    Args:
        x: [..., i], any float dtype, contiguous or not.
        U: [o - r, r] and V: [i, r], the dtype of `x`.
        places: [o] int32: output k is number ``places[k]`` of t and U t side by side.
        bias: [o] or None.

    Returns:
        [..., o] in the dtype of `x`.
    """
    t = x @ V
    y = torch.cat((t, torch.nn.functional.linear(t, U)), -1).index_select(-1, places)
    return y if bias is None else y + bias
