"""What a run computes in: dtypes by name, TF32 on or off, and how wrong a result may
be. Torch is imported when it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from blr.compressor.base.errors import UsageError

if TYPE_CHECKING:
    import torch


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

        return getattr(torch, self.stored)


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
