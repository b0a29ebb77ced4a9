"""Runs one product by the variant that the tables choose for its shape."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import kernel_device
from blr.kernels.common.tables import REFERENCE, Shape, bucket, choose, heuristic
from blr.kernels.common.tables import forget as forget_tables
from blr.kernels.common.transient import chunks, transient_bytes

MIXED = ("monarch", "blast")  # structures whose products have intermediates of blocks x tokens x ranks
WEIGHTS = ("materialize",)  # variants that have none, since they make the dense weight
FEWEST = 2048  # tokens of a chunk at least

Variant = Callable[..., Tensor]
Variants = Callable[[], Mapping[str, Variant]]


def dispatch(
    structure: str,
    shape: Shape,
    variants: Variants,
    reference: Variant,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    on_cpu: Variant | None = None,
) -> Tensor:
    """``reference(x, *factors, bias)`` for x [n, i], by a kernel where kernels run.

    What runs is decided at the first call for a shape and a power of two of n, and kept.

    Args:
        variants: gives the structure's VARIANTS; called only where kernels run, since variants
            may need Triton. One that a table names and this version lacks is replaced by the
            rule of thumb.
        on_cpu: what runs on a CPU in the reference's place.

    Returns:
        [n, o], contiguous, sharing no memory with an argument.

    Raises:
        TypeError: factors of another dtype than `x`.
    """
    dtype, n = x.dtype, x.shape[0]
    for tensor in factors if bias is None else (*factors, bias):
        if tensor.dtype != dtype:
            raise TypeError(f"{structure}: input {dtype} and factors {tensor.dtype}: cast one of them")
    if n == 0:
        return x.new_zeros(0, shape.outputs)
    plain = on_cpu if on_cpu is not None and x.device.type == "cpu" else reference
    run, config = _chosen(structure, shape, bucket(n), dtype, x.device, variants, plain)
    call = partial(run, **config)
    bounded = run is not on_cpu and run.__name__ not in WEIGHTS and structure in MIXED
    tokens = _tokens(shape, dtype, x.device.type) if bounded else n
    if n <= tokens:
        return call(x, *factors, bias=bias).contiguous()
    y = x.new_empty(n, shape.outputs)
    for start, stop in chunks(n, tokens):
        y[start:stop] = call(x[start:stop], *factors, bias=bias)
    return y


def _tokens(shape: Shape, dtype: torch.dtype, device: str) -> int:
    """How many tokens a product takes at a time: those whose two intermediates [blocks, n, rank] are
    within BLR_TRANSIENT, and at least `FEWEST`, below which products of blocks are slower."""
    bound = transient_bytes(device)
    if bound is None:
        return sys.maxsize
    return max(FEWEST, bound // max(2 * shape.blocks * shape.rank * dtype.itemsize, 1))


def forget() -> None:
    """Read tables and BLR_KERNELS again at the next call."""
    _chosen.cache_clear()
    forget_tables()


@cache
def _chosen(
    structure: str,
    shape: Shape,
    n: int,
    dtype: torch.dtype,
    device: torch.device,
    variants: Variants,
    reference: Variant,
) -> tuple[Variant, dict[str, Any]]:
    if not _has_kernels(dtype, device):
        return reference, {}
    variant, config = choose(structure, shape, n, dtype, device)
    table = variants() if variant != REFERENCE else {}
    if variant not in table:
        variant, config = heuristic(structure, n, dtype)
    return (table[variant], config) if variant in table else (reference, {})


def _has_kernels(dtype: torch.dtype, device: torch.device) -> bool:
    """Triton's interpreter on the CPU has no correct bfloat16 products."""
    if device.type == "cpu" and dtype == torch.bfloat16:
        return False
    return kernel_device(torch.empty(0, device=device))
