"""What the published kernels share: chunks of tokens, sizes of tiles, the batched product."""

from __future__ import annotations

import torch
from torch import Tensor

from blr.kernels.gemm.launch import bmm

SMALLEST_SHARED = 99 * 1024  # bytes a block may use on sm_86 and sm_89, the least of the cards we serve


def product(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    bias: Tensor | None = None,
    *,
    part: int | None = None,
    **config: int,
) -> Tensor:
    """`gemm.launch.bmm` into `c` by the kernel that loads without the bulk copy engine."""
    return bmm(a, b, c, bias, part=part, tma=False, **config)


def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that one block may use on `device` (the least we know of off the GPU)."""
    if device.type != "cuda":
        return SMALLEST_SHARED
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", SMALLEST_SHARED)


def fitting(size: int, least: int, most: int) -> int:
    """The least power of two that covers `size`, within [least, most]."""
    return max(least, min(most, 1 << max(size - 1, 0).bit_length()))


def spans(n: int, chunk: int | None) -> list[slice]:
    """0 … n in slices of at most `chunk`; one slice for None."""
    return [slice(begin, min(begin + (chunk or n), n)) for begin in range(0, n, chunk or max(n, 1))]
