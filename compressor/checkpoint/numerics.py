"""Whether numbers can be computed with: weights that are finite, and factors whose product is.

Factors can all be finite and multiply to more than a dtype holds. The product of their Euclidean
norms bounds every weight of the layer, so that only a layer beyond that bound is multiplied out.
"""

from collections.abc import Callable, Mapping
from math import isfinite, prod

import torch
from torch import Tensor

from blr.compressor.base.errors import NumericsError
from blr.compressor.structures.packing import restored
from blr.compressor.structures.specs import Spec

CHECKED = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def count_bad(tensor: Tensor) -> int:
    """How many values of `tensor` are NaN or Inf; extremes first, which are found much faster."""
    if tensor.dtype not in CHECKED or not tensor.numel():
        return 0
    least, most = torch.aminmax(tensor.detach())  # NaN if there is one
    return 0 if isfinite(least) and isfinite(most) else int((~torch.isfinite(tensor)).sum())


def norm(tensor: Tensor) -> float:
    """A bound, within a few percent, of the Euclidean norm of `tensor`; perhaps inf beyond 1e18."""
    return 1.05 * float(torch.linalg.vector_norm(tensor.detach()))


def check_finite(tensor: Tensor, name: str, how: str = "") -> None:
    """Raise NumericsError when `tensor` holds NaN or Inf; `name` and `how` begin the message."""
    if bad := count_bad(tensor):
        raise NumericsError(
            f"{name} holds {bad} NaN or Inf values of {tensor.numel()} {how}; expected finite ones: "
            "repair the checkpoint, or choose a --dtype with their range"
        )


def check_product(
    name: str,
    spec: Spec,
    norms: list[float],
    tensors: Callable[[], Mapping[str, Tensor]],
    dtype: torch.dtype,
) -> None:
    """Raise NumericsError when the weight of a structured layer exceeds the range of `dtype`. The
    product of the `norms` of its factors bounds it; `tensors` is called only beyond that bound."""
    limit = torch.finfo(dtype).max
    if prod(norms) <= limit:
        return
    weight = restored(spec, tensors(), torch.float64)
    if not bool((weight.abs() <= limit).all()):  # NaN is not
        raise NumericsError(
            f"{name}: its factors {', '.join(spec.shapes())} multiply to values out of range of "
            f"{dtype}, expected finite weights; repair the checkpoint, or choose a --dtype with their "
            "range"
        )
