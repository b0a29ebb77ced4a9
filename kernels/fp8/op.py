"""Products of layers with float8 weights: the operators `blr::fp8_rows` and `blr::fp8_product`, without
gradients. Rows are an operator when compiled, too: what a compiler makes of a norm's two reductions is
slower (scripts/log)."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from blr.kernels.common.available import kernel_device, kernels_on
from blr.kernels.common.dispatch import Plans
from blr.kernels.common.registration import register
from blr.kernels.common.replay import Launches
from blr.kernels.fp8 import reference
from blr.kernels.fp8.reference import E4M3, Rows, Scales, room_for

CAPABILITY = (8, 9)  # of devices with tensor cores for float8
STRUCTURES = ("dense", "lowrank", "monarch", "blast")
FROM = 1 << 21  # outputs of a product from which the library's is as fast, and quicker to start
RowsPlan = Callable[..., tuple[Tensor, ...]]  # (x, other, gain) -> (q, numbers), and what was rounded
ProductPlan = Callable[..., Tensor]  # (q, numbers, U, V, first, second, mix, bias) -> y
_PLANS: Plans[RowsPlan] = Plans()
_PRODUCTS: Plans[ProductPlan] = Plans()


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
    run = _run_product if plain else _PRODUCT.op
    return run(*rows, U, V, *scales, bias, structure, dtype)


def _run_rows(
    x: Tensor, make: str, other: Tensor | None, gain: Tensor | None, eps: float, keep: bool = False
) -> tuple[Tensor, ...]:
    beside = None if other is None else (other.shape, other.dtype)
    by = None if gain is None else gain.dtype
    key = (make, x.shape, x.dtype, x.device, beside, by, eps, keep)
    run = _PLANS.get(key) or _PLANS.keep(key, rows_plan(x, make, eps, keep))
    return run(x, other, gain)


class Operands(NamedTuple):
    """Of a product beside its rows: weights, scales as of `reference.Scales`, and the bias."""

    U: Tensor
    V: Tensor | None
    first: Tensor | None
    second: Tensor
    mix: Tensor | None
    bias: Tensor | None


def _run_product(q: Tensor, numbers: Tensor, *rest: object) -> Tensor:
    *given, structure, dtype = rest
    assert isinstance(structure, str) and isinstance(dtype, torch.dtype)
    w = Operands._make(given)
    inner, kind = None if w.V is None else w.V.shape, None if w.bias is None else w.bias.dtype
    key = (structure, q.shape, w.U.shape, inner, dtype, kind, q.device)
    run = _PRODUCTS.get(key) or _PRODUCTS.keep(key, product_plan(structure, len(q), w.U, dtype))
    return run(q, numbers, *w)


def rows_plan(x: Tensor, make: str, eps: float, keep: bool) -> RowsPlan:
    """How rows [n, K] like x are rounded: as of `reference.quantize_rows`.

    keep: what is rounded is given, too.
    """
    if not kernel_device(x):
        return partial(_rows, reference.quantize_rows, make, eps, keep)
    from blr.kernels.fp8.launch import quantize_rows

    return Launches(partial(_rows, quantize_rows, make, eps, keep))


def _rows(
    run: Callable[..., Rows],
    make: str,
    eps: float,
    keep: bool,
    x: Tensor,
    other: Tensor | None,
    gain: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    x = x if x.stride(-1) == 1 else x.contiguous()
    if other is not None and other.stride(-1) != 1:
        other = other.contiguous()
    made = torch.empty(x.shape, dtype=x.dtype, device=x.device) if keep else None
    found = run(x, make, other, gain, eps, made)
    return tuple(found) if made is None else (*found, made)


def product_plan(structure: str, n: int, U: Tensor, dtype: torch.dtype) -> ProductPlan:
    """How products of n rows with weights like U (of a dense layer its weight) are computed."""
    if not kernel_device(U):
        return partial(_plain, structure, dtype)
    if structure == "dense" and _library_fits(U, dtype):
        return partial(_library_dense, dtype)
    if structure == "lowrank" and _library_fits(U, dtype) and n * U.shape[-2] >= FROM:
        return partial(_halves, Launches(_inner), dtype)
    return Launches(partial(_ours, structure, dtype))


def _plain(
    structure: str, dtype: torch.dtype, q: Tensor, numbers: Tensor, *rest: Tensor | None
) -> Tensor:
    weights, scales = ([t for t in some if t is not None] for some in (rest[:2], rest[2:5]))
    return reference.layer(structure, Rows(q, numbers), weights, scales, dtype, rest[5])


def _library_dense(dtype: torch.dtype, q: Tensor, numbers: Tensor, *rest: Tensor | None) -> Tensor:
    w = Operands._make(rest)
    return _library_product(q, _column(Rows(q, numbers), 0), w.U, w.second[None], dtype, w.bias)


def _halves(
    inner: Launches, dtype: torch.dtype, q: Tensor, numbers: Tensor, *rest: Tensor | None
) -> Tensor:
    """Low rank: our first product, the library's second."""
    w, by_row = Operands._make(rest), _column(Rows(q, numbers), 2)
    return _library_product(inner(q, numbers, w.V, w.first), by_row, w.U, w.second, dtype, w.bias)


def _library_product(
    a: Tensor, by_row: Tensor, b: Tensor, by_col: Tensor, dtype: torch.dtype, bias: Tensor | None = None
) -> Tensor:
    """[n, o] of float8 a [n, k] by `by_row` [n, 1] and b [o, k] or [1, o, k] by `by_col` [1, o], o and k
    multiples of 16, dtype bfloat16; sums in fewer bits than float32 has."""
    b = torch.as_strided(b, (b.shape[-1], b.shape[-2]), (1, b.stride(-2)))
    return torch._scaled_mm(
        a, b, scale_a=by_row, scale_b=by_col, bias=bias, out_dtype=dtype, use_fast_accum=True
    )


def _column(x: Rows, number: int) -> Tensor:
    """[n, 1] of the scales (0) or the norms (2) of rows, in one step."""
    numbers = x.numbers
    return torch.as_strided(
        numbers, (x.q.shape[0], 1), (1, 1), numbers.storage_offset() + number * numbers.shape[1]
    )


def _library_fits(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the library multiplies by a weight [..., o, i], for results in `dtype`."""
    return weight.is_cuda and dtype == torch.bfloat16 and not any(s % 16 for s in weight.shape[-2:])


def _inner(q: Tensor, numbers: Tensor, V: Tensor, first: Tensor) -> Tensor:
    from blr.kernels.fp8.launch import inner

    return inner(Rows(q, numbers), V, first)


def _ours(
    structure: str, dtype: torch.dtype, q: Tensor, numbers: Tensor, *rest: Tensor | None
) -> Tensor:
    from blr.kernels.fp8.launch import LAYERS

    w = Operands._make(rest)
    scales = Scales(w.first, w.second, w.mix)
    return LAYERS[structure](Rows(q, numbers), w.U, w.V, scales, dtype, w.bias)


def _fake(q: Tensor, numbers: Tensor, U: Tensor, *rest: object) -> Tensor:
    dtype = rest[-1]
    assert isinstance(dtype, torch.dtype)
    return q.new_empty(q.shape[0], outputs_of([U]), dtype=dtype)


def outputs_of(weights: Sequence[Tensor]) -> int:
    """Outputs of a layer, of its U or its dense weight."""
    first = weights[0]
    return first.shape[0] * (first.shape[1] if first.dim() == 3 else 1)


def _fake_rows(x: Tensor, make: str, other: object, gain: object, eps: float) -> tuple[Tensor, ...]:
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
