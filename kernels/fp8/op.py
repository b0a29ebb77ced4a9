"""Products of layers with float8 weights: the operators `blr::fp8_rows` and `blr::fp8_product`.

Neither has gradients. Rows are an operator under `torch.compile`, too: what a compiler makes of the two
reductions behind a norm is slower than our kernel (scripts/log).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import kernels_on
from blr.kernels.common.dispatch import Plans
from blr.kernels.common.registration import register
from blr.kernels.common.tables import FLOAT8
from blr.kernels.fp8.plans import product_plan, rows_plan
from blr.kernels.fp8.reference import E4M3, Rows, Scales, room_for

CAPABILITY = (8, 9)  # of devices with tensor cores for float8
STRUCTURES = tuple(FLOAT8)
_PLANS = Plans()


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
    q, numbers, made = _run_rows(x, make, other, gain, eps, True)
    return Rows(q, numbers), made


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
    U, V = weights if len(weights) == 2 else (weights[0], None)
    plain = not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    run: Any = _run_product if plain else _PRODUCT.op
    y: Tensor = run(*rows, U, V, *scales, bias, structure, dtype)
    return y


def _run_rows(
    x: Tensor,
    make: str,
    other: Tensor | None,
    gain: Tensor | None,
    eps: float,
    keep: bool = False,
) -> tuple[Tensor, ...]:
    beside = None if other is None else (other.shape, other.dtype)
    by = None if gain is None else gain.dtype
    key = (make, x.shape, x.dtype, x.device, beside, by, eps, keep)
    run: Any = _PLANS.get(key) or _PLANS.keep(key, rows_plan(x, make, eps, keep))
    found: tuple[Tensor, ...] = run(x, other, gain)
    return found


def _run_product(
    q: Tensor,
    numbers: Tensor,
    U: Tensor,
    V: Tensor | None,
    first: Tensor | None,
    second: Tensor,
    mix: Tensor | None,
    bias: Tensor | None,
    structure: str,
    dtype: torch.dtype,
) -> Tensor:
    inner, kind = None if V is None else V.shape, None if bias is None else bias.dtype
    key = (structure, q.shape, U.shape, inner, dtype, kind, q.device)
    run = _PLANS.get(key) or _PLANS.keep(key, product_plan(structure, len(q), U, dtype))
    return run(q, numbers, U, V, first, second, mix, bias)


def _fake(
    q: Tensor, numbers: Any, U: Tensor, V: Tensor | None, first: Any, second: Any, mix: Any, bias: Any,
    structure: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[0], outputs_of([U]), dtype=dtype)


def outputs_of(weights: Sequence[Tensor]) -> int:
    """Outputs of a layer, of its U or its dense weight."""
    first = weights[0]
    return first.shape[0] * (first.shape[1] if first.dim() == 3 else 1)


def _fake_rows(x: Tensor, make: str, other: Any, gain: Any, eps: float) -> tuple[Tensor, ...]:
    numbers = x.new_empty(3, room_for(x.shape[0]), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=E4M3), numbers


_ROWS = register(
    "fp8_rows",
    "(Tensor x, str make, Tensor? other, Tensor? gain, float eps) -> (Tensor, Tensor)",
    *(_run_rows, _fake_rows, None, None, _run_rows),
)
_PRODUCT = register(
    "fp8_product",
    "(Tensor q, Tensor numbers, Tensor U, Tensor? V, Tensor? first, Tensor second, Tensor? mix, "
    "Tensor? bias, str structure, ScalarType dtype) -> Tensor",
    *(_run_product, _fake, None, None, _run_product),
)
