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


def lowrank(
    x: Rows,
    U: Tensor,
    V: Tensor,
    first: Tensor,
    second: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """``y = (x V) Uᵀ + bias``, [n, o], for V of one scale, whose product the library writes in float8.

    Args:
        U: float8 [o, r], V: float8 [r, i], o, r and i multiples of 16. first: float32 [2], what z is
            scaled by beside the scales of x and V, which `second` [o] makes good, and 1.
    """
    by_z, one = first[:1], first[1:]
    z = torch._scaled_mm(x.q, V.t(), scale_a=by_z, scale_b=one, out_dtype=E4M3, use_fast_accum=True)
    return torch._scaled_mm(
        z,
        U.t(),
        scale_a=x.scale[:, None],
        scale_b=second[None],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )
