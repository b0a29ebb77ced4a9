"""No time without the right numbers: results against float64, in what each precision may be wrong by.

Torch is imported when it is needed: a wrong name of a precision is refused without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING

from blr.compressor.base.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROWS = 32  # of the output that are compared, first and last among them


@dataclass(frozen=True)
class Precision:
    """`gate`: relative Frobenius error against float64 above which an arm is wrong. Each is five to
    ten times what three products in a row with float32 sums have on random data (2^-24, 2^-11 and
    2^-8 rounding of operands and intermediates), and below what one wrong tile causes."""

    name: str
    stored: str
    tf32: bool
    gate: float

    @property
    def dtype(self) -> torch.dtype:
        """What tensors are stored in."""
        import torch

        found: torch.dtype = getattr(torch, self.stored)
        return found


PRECISIONS = {
    p.name: p
    for p in (
        Precision("float32", "float32", False, 3e-5),
        Precision("tf32", "float32", True, 4e-3),
        Precision("float16", "float16", False, 4e-3),
        Precision("bfloat16", "bfloat16", False, 2e-2),
    )
}


def find_precision(name: str) -> Precision:
    """The precision called `name`. Raises UsageError listing the known ones."""
    if name not in PRECISIONS:
        raise UsageError(f"dtype {name!r} is unknown; expected one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


@contextmanager
def computing_in(precision: Precision) -> Iterator[None]:
    """While active, float32 products of torch use TF32 exactly if `precision` says so."""
    import torch

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision.tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class WrongResult(Exception):
    """An arm computes something else; `error` is relative, NaN if the output was not all written."""

    def __init__(self, error: float, said: str = "") -> None:
        misshapen = "not all written, not finite or of another shape"
        super().__init__(said or (f"relative error {error:.2g}" if isfinite(error) else misshapen))
        self.error = error


def within(error: float, limit: float) -> float:
    """The error. Raises WrongResult above `limit` and for NaN."""
    if not error <= limit:
        raise WrongResult(error)
    return error


@dataclass(frozen=True)
class Expected:
    """Rows [k] of the output and their right values [k, o]."""

    rows: Tensor
    values: Tensor

    def error(self, y: Tensor) -> float:
        """Relative Frobenius error of the rows; NaN if anything of `y` is no finite number or its
        shape is another."""
        import torch

        if y.ndim != 2 or y.shape[1] != self.values.shape[1] or y.shape[0] <= int(self.rows.max()):
            return float("nan")
        if not bool(y.sum(dtype=torch.float32).isfinite()):
            return float("nan")
        return relative_error(y[self.rows].to(self.values.dtype), self.values)


def relative_error(found: Tensor, right: Tensor) -> float:
    """Of all numbers together."""
    return float((found - right).norm() / right.norm())


def expect(reference: Callable[..., Tensor], x: Tensor, weights: Sequence[Tensor]) -> Expected:
    """What `reference(x, *weights)`, x [n, i], gives in float64 on `ROWS` rows spread over all."""
    import torch

    rows = torch.linspace(0, len(x) - 1, min(ROWS, len(x)), device=x.device).round().long()
    wide = (w.double() if w.is_floating_point() else w for w in weights)
    return Expected(rows, reference(x[rows].double(), *wide))


def poisoned(call: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> Tensor:
    """The second result of `call`, after the memory of the first was filled with NaN and freed: a
    caching allocator hands it out again, so that an element never written shows."""
    import torch

    first = call(*arguments)
    own = {tensor.data_ptr() for tensor in arguments if tensor.layout is torch.strided}
    if first.data_ptr() not in own:
        first.fill_(float("nan"))
    del first
    return call(*arguments)


def float_dtype(name: str) -> torch.dtype:
    """The torch dtype of that name. Raises UsageError for one that kernels do not compute in."""
    if name not in ("float32", "float16", "bfloat16"):
        raise UsageError(f"dtype {name!r}: expected float32, float16 or bfloat16")
    import torch

    return getattr(torch, name)
