"""What the published kernels share: chunks of tokens, sizes of tiles, the batched product."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from blr.kernels.decode.gemm.launch import bmm


def product(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    bias: Tensor | None = None,
    *,
    part: int | None = None,
    **config: Any,
) -> Tensor:
    """`gemm.launch.bmm` into `c` by the kernel that loads without the bulk copy engine."""
    return bmm(a, b, c, bias, part=part, tma=False, **config)


def fitting(size: int, least: int, most: int) -> int:
    """The least power of two that covers `size`, within [least, most]."""
    return max(least, min(most, 1 << max(size - 1, 0).bit_length()))


def spans(n: int, chunk: int | None) -> list[slice]:
    """0 … n in slices of at most `chunk`; one slice for None."""
    return [slice(begin, min(begin + (chunk or n), n)) for begin in range(0, n, chunk or max(n, 1))]
