"""Products of layers with float8 weights: the operators `blr::fp8_rows` and `blr::fp8_product`.

Neither has gradients. Rows are an operator under `torch.compile`, too: what a compiler makes of the two
reductions behind a norm is slower than our kernel (scripts/LOG.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import kernel_device, kernels_on
from blr.kernels.common.registration import register
from blr.kernels.common.tables import FLOAT8
from blr.kernels.fp8.reference import E4M3, Rows, Scales
from blr.kernels.fp8.reference import layer as plain_layer
from blr.kernels.fp8.reference import quantize_rows as plain_rows

CAPABILITY = (8, 9)  # of devices with tensor cores for float8
STRUCTURES = tuple(FLOAT8)


def fp8_device(device: torch.device) -> bool:
    """Whether `device` multiplies in float8, by our kernels."""
    return kernels_on(device) and _multiplies(device)


@cache
def _multiplies(device: torch.device) -> bool:
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= CAPABILITY


def fp8_rows(
    x: Tensor, make: str = "", other: Tensor | None = None, gain: Tensor | None = None, eps: float = 0.0
) -> Rows:
    """Activations [n, K] in float8, or what `make` makes of them: as of `reference.quantize_rows`."""
    plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    return Rows(*(_run_rows if plain else _ROWS.op)(x, make, other, gain, eps))


def fp8_rows_and(
    x: Tensor, make: str, other: Tensor | None, gain: Tensor | None, eps: float
) -> tuple[Rows, Tensor]:
    """The same and what was rounded, [n, K] in the dtype of `x`, by one kernel; not when compiled."""
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return Rows(*_run_rows(x, make, other, gain, eps, made)), made


def fp8_product(
    structure: str,
    rows: Rows,
    weights: Sequence[Tensor],
    scales: Scales,
    dtype: torch.dtype,
    bias: Tensor | None = None,
) -> Tensor:
    """The output [n, o] of a layer, in `dtype`.

    Args:
        structure: of `STRUCTURES`.
        weights: float8 U [B, q, r] and V [B, r, p], or the dense weight [o, i].
        scales: of `reference.scales_of`; of a dense weight `second` alone.
    """
    made = [t for t in scales if t is not None]
    arguments = (*rows, list(weights), made, bias, structure, dtype)
    plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    y: Tensor = (_PRODUCT.run if plain else _PRODUCT.op)(*arguments)
    return y


def _run_rows(
    x: Tensor,
    make: str,
    other: Tensor | None,
    gain: Tensor | None,
    eps: float,
    keep: Tensor | None = None,
) -> tuple[Tensor, ...]:
    if not kernel_device(x):
        return tuple(plain_rows(x, make, other, gain, eps, keep))
    from blr.kernels.fp8.launch import quantize_rows

    if other is not None and other.stride(-1) != 1:
        other = other.contiguous()
    return tuple(quantize_rows(x if x.stride(-1) == 1 else x.contiguous(), make, other, gain, eps, keep))


def _run_product(
    q: Tensor,
    scale: Tensor,
    unit_norm: Tensor,
    norm: Tensor,
    weights: list[Tensor],
    scales: list[Tensor],
    bias: Tensor | None,
    structure: str,
    dtype: torch.dtype,
) -> Tensor:
    rows = Rows(q, scale, unit_norm, norm)
    if not kernel_device(q):
        return plain_layer(structure, rows, weights, scales, dtype, bias)
    from blr.kernels.fp8.layers import LAYERS, dense
    from blr.kernels.fp8.library import dense as library_dense

    if structure == "dense":
        weight = weights[0]
        by_library = q.is_cuda and dtype == torch.bfloat16 and not any(s % 16 for s in weight.shape)
        run: Any = library_dense if by_library else dense
        y: Tensor = run(rows, weight, scales[0], dtype, bias)
        return y
    U, V = weights
    return LAYERS[structure](rows, U, V, Scales(*scales), dtype, bias)


def _fake(
    q: Tensor, scale: Any, unit_norm: Any, norm: Any, weights: list[Tensor], scales: Any, bias: Any,
    structure: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], outputs_of(weights), dtype=dtype)


def outputs_of(weights: Sequence[Tensor]) -> int:
    """Outputs of a layer, of its U or its dense weight."""
    first = weights[0]
    return first.shape[0] * (first.shape[1] if first.dim() == 3 else 1)


def _no_gradient(*_: Any) -> Any:
    raise RuntimeError("float8 products have no gradient: the layer dequantizes where one is asked for")


def _fake_rows(x: Tensor, make: str, other: Any, gain: Any, eps: float) -> tuple[Tensor, ...]:
    numbers = (x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(3))
    return x.new_empty(x.shape, dtype=E4M3), *numbers


_ROWS = register(
    "fp8_rows",
    "(Tensor x, str make, Tensor? other, Tensor? gain, float eps) -> (Tensor, Tensor, Tensor, Tensor)",
    *(_run_rows, _fake_rows, lambda ctx, inputs, output: None, _no_gradient, _run_rows),
)
_PRODUCT = register(
    "fp8_product",
    "(Tensor q, Tensor scale, Tensor unit_norm, Tensor norm, Tensor[] weights, Tensor[] scales, "
    "Tensor? bias, str structure, ScalarType dtype) -> Tensor",
    *(_run_product, _fake, lambda ctx, inputs, output: None, _no_gradient, _run_product),
)
