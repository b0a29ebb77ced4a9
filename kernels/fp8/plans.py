"""What runs the rows and the product of given shapes: decided once, and launched again without the
Python that led to it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import kernel_device
from blr.kernels.common.replay import Launches
from blr.kernels.fp8.library import dense as library_dense
from blr.kernels.fp8.library import fits, second, takes
from blr.kernels.fp8.reference import Rows, Scales
from blr.kernels.fp8.reference import layer as plain_layer
from blr.kernels.fp8.reference import quantize_rows as plain_rows

RowsPlan = Callable[..., Any]  # (x, other, gain) -> (q, numbers), and what was rounded
# (q, numbers, U, V, first, second, mix, bias) -> y
ProductPlan = Callable[..., Tensor]


def rows_plan(x: Tensor, make: str, eps: float, keep: bool) -> RowsPlan:
    """How rows [n, K] like x are rounded: as of `reference.quantize_rows`.

    keep: what is rounded is given, too.
    """
    if not kernel_device(x):
        return partial(_rows, plain_rows, make, eps, keep)
    from blr.kernels.fp8.launch import quantize_rows

    return Launches(partial(_rows, quantize_rows, make, eps, keep))


def _rows(
    run: Any, make: str, eps: float, keep: bool, x: Tensor, other: Tensor | None, gain: Tensor | None
) -> tuple[Tensor, ...]:
    x = x if x.stride(-1) == 1 else x.contiguous()
    if other is not None and other.stride(-1) != 1:
        other = other.contiguous()
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keep else None
    found: Rows = run(x, make, other, gain, eps, made)
    return tuple(found) if made is None else (*found, made)


def product_plan(structure: str, n: int, U: Tensor, dtype: torch.dtype) -> ProductPlan:
    """How products of n rows with weights like U (of a dense layer its weight) are computed."""
    if not kernel_device(U):
        return partial(_plain, structure, dtype)
    if structure == "dense" and fits(U, dtype):
        return partial(_library_dense, dtype)
    if structure == "lowrank" and takes(n, U, dtype):
        return partial(_halves, Launches(_inner), dtype)
    return Launches(partial(_ours, structure, dtype))


def _plain(
    structure: str,
    dtype: torch.dtype,
    q: Tensor,
    numbers: Tensor,
    U: Tensor,
    V: Tensor | None,
    *rest: Any,
) -> Tensor:
    *scales, bias = rest
    weights = [t for t in (U, V) if t is not None]
    made = [t for t in scales if t is not None]
    return plain_layer(structure, Rows(q, numbers), weights, made, dtype, bias)


def _library_dense(
    dtype: torch.dtype, q: Tensor, numbers: Tensor, U: Tensor, V: Any, first: Any, by: Tensor,
    mix: Any, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    return library_dense(Rows(q, numbers), U, by, dtype, bias)


def _halves(
    inner: Launches, dtype: torch.dtype, q: Tensor, numbers: Tensor, U: Tensor, V: Tensor, first: Tensor,
    by: Tensor, mix: Any, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """Low rank: our first product, the library's second."""
    z: Tensor = inner(q, numbers, V, first)
    return second(z, Rows(q, numbers), U, by, dtype, bias)


def _inner(q: Tensor, numbers: Tensor, V: Tensor, first: Tensor) -> Tensor:
    from blr.kernels.fp8.layers import inner

    return inner(Rows(q, numbers), V, first)


def _ours(
    structure: str, dtype: torch.dtype, q: Tensor, numbers: Tensor, U: Tensor, V: Any, first: Any,
    by: Tensor, mix: Any, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    from blr.kernels.fp8.layers import LAYERS, dense

    x = Rows(q, numbers)
    if structure == "dense":
        return dense(x, U, by, dtype, bias)
    return LAYERS[structure](x, U, V, Scales(first, by, mix), dtype, bias)
