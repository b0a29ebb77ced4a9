"""Root-mean-square norms as the one kernel that torch has for them. Shipped inside every checkpoint.

Theirs are six kernels, which for long prompts take a tenth of the time of a compressed model in eager
mode (scripts/LOG.md). Under `torch.compile`, for gradients, on a CPU and in single precision the native
module computes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from blr.compressor.modeling.extended import Extension, extend
from blr.compressor.modeling.probes import norm_of
from blr.kernels.common.available import HALF
from blr.kernels.common.registration import is_unwatched


class FusedNorm(Extension):
    """Mixin before a norm of transformers with `weight`. fused_eps: its eps."""

    fused_eps: float

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As of the module, [..., d]; products are rounded once, the module's twice."""
        if args or kwargs or not is_fused(x, self.weight):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return rms_norm(x, self.weight.shape, self.weight, self.fused_eps)


def fuse_norms(model: nn.Module) -> None:
    """Let the norms of `model` that are `x / rms(x) * weight` be one kernel."""
    for module in model.modules():
        if (found := norm_of(module)) is not None and found[0] == "rms":
            extend(module, FusedNorm)
            module.fused_eps = found[1]  # type: ignore[assignment]


def is_fused(x: Tensor, weight: Tensor) -> bool:
    """Whether a norm of `x` is the fused kernel."""
    return is_unwatched(x) and x.is_cuda and x.dtype == weight.dtype and x.dtype in HALF
