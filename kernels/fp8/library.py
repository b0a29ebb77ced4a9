"""Products of float8 by the vendor's library: `torch._scaled_mm`."""

from __future__ import annotations

import torch
from torch import Tensor

from blr.kernels.fp8.reference import E4M3, Rows


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


def second(z: Tensor, norm: Tensor, U: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The second product of two, [n, o]: z float8 [n, r] by rows of `norm` [n], U float8 [o, r]."""
    return torch._scaled_mm(
        z, U.t(), scale_a=norm[:, None], scale_b=scale[None], out_dtype=dtype, use_fast_accum=True
    )


def first(q: Tensor, V: Tensor, one: Tensor, result: Tensor) -> Tensor:
    """``result · q Vᵀ`` in float8, [n, r], for V of one scale."""
    return torch._scaled_mm(
        q, V.t(), scale_a=one, scale_b=one, scale_result=result, out_dtype=E4M3, use_fast_accum=True
    )
