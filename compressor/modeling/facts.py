"""What is known of a tensor before its values are, and which functions of torch write some.

Shipped inside every checkpoint.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

FACTS = {
    getattr(Tensor, name).__get__
    for name in ("dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_cuda", "is_meta")
} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_floating_point,
    Tensor.__len__,
}


def writes(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function of torch writes to one of its arguments."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__")
    return (
        in_place or operator or name == "__setitem__" or "out" in kwargs or bool(kwargs.get("inplace"))
    )
