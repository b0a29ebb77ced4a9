"""Products of float8 by the vendor's library: `torch._scaled_mm`."""

from __future__ import annotations

import torch
from torch import Tensor

from blr.kernels.common.tables import Shape, product_choice
from blr.kernels.fp8.reference import Rows

FROM = 1 << 21  # outputs of a product from which the library's is as fast, and quicker to start


def dense(
    x: Rows,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    fast: bool = True,
) -> Tensor:
    """``y = x Wᵀ + bias``, [n, o], a scale a row of both.

    Args:
        weight: float8 [o, i], o and i multiples of 16. scale: float32 [o]. dtype: bfloat16.
        fast: sums in fewer bits than float32 has.
    """
    return torch._scaled_mm(
        x.q,
        weight.t(),
        scale_a=x.scale[:, None],
        scale_b=scale[None],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=fast,
    )


def second(
    z: Tensor,
    norm: Tensor,
    U: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The second product of two, [n, o]: z float8 [n, r] by rows of `norm` [n], U float8 [o, r] by
    `scale` [o], o and r multiples of 16."""
    return torch._scaled_mm(
        z,
        U.t(),
        scale_a=norm[:, None],
        scale_b=scale[None],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


def takes(z: Tensor, U: Tensor, dtype: torch.dtype) -> bool:
    """Whether `second` can, and was measured to be the faster way: by the tables, else on an H200."""
    if not z.is_cuda or dtype != torch.bfloat16 or any(size % 16 for size in U.shape):
        return False
    n, (outputs, rank) = z.shape[0], U.shape
    found = product_choice(Shape(rank, outputs), n, z.device)
    return n * outputs >= FROM if found is None else found[0] == "library"
