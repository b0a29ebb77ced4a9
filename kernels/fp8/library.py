"""Products of float8 by the vendor's library: `torch._scaled_mm`."""

import torch
from torch import Tensor

from blr.kernels.fp8.reference import Rows

FROM = 1 << 21  # outputs of a product from which the library's is as fast, and quicker to start


def product(
    a: Tensor, by_row: Tensor, b: Tensor, by_col: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """[n, o] of float8 a [n, k] by `by_row` [n, 1] and b [o, k] or [1, o, k] by `by_col` [1, o], o and k
    multiples of 16, dtype bfloat16; sums in fewer bits than float32 has."""
    b = torch.as_strided(b, (b.shape[-1], b.shape[-2]), (1, b.stride(-2)))
    return torch._scaled_mm(
        a, b, scale_a=by_row, scale_b=by_col, bias=bias, out_dtype=dtype, use_fast_accum=True
    )


def column(x: Rows, number: int) -> Tensor:
    """[n, 1] of the scales (0) or the norms (2) of rows, in one step."""
    numbers = x.numbers
    return torch.as_strided(
        numbers, (x.q.shape[0], 1), (1, 1), numbers.storage_offset() + number * numbers.shape[1]
    )


def fits(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the library multiplies by a weight [..., o, i], for results in `dtype`."""
    return weight.is_cuda and dtype == torch.bfloat16 and not any(s % 16 for s in weight.shape[-2:])


def takes(n: int, U: Tensor, dtype: torch.dtype) -> bool:
    """Whether it can take the second product of two, by U [1, o, r], and was measured on an H200 to be
    the faster way."""
    return fits(U, dtype) and n * U.shape[-2] >= FROM
