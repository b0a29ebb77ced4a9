"""What is known of a tensor before its values are. Shipped inside every checkpoint."""

from __future__ import annotations

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
