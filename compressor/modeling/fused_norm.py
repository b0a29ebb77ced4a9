"""Norms by one fast kernel each.

Root-mean-square norms are six kernels in transformers and one in torch: for long prompts a tenth of the
time of a compressed model in eager mode. Layer norms of narrow rows reach a third of the memory's speed
by torch's kernel (scripts/log). Under `torch.compile`, for gradients, on a CPU and in single
precision the native module computes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from blr.compressor.modeling.extended import Extension, extend
from blr.compressor.modeling.probes import norm_of
from blr.kernels.common.available import HALF
from blr.kernels.common.registration import is_unwatched
from blr.kernels.fused.normed.launch import is_faster, layer_norm


class FusedNorm(Extension):
    """Mixin before a norm of transformers with `weight`. fused_eps: its eps."""

    fused_eps: float

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As of the module, [..., d]; products are rounded once, the module's twice."""
        if args or kwargs or not is_fused(x, self.weight):
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        return rms_norm(x, self.weight.shape, self.weight, self.fused_eps)


class FusedLayerNorm(Extension):
    """Mixin before a layer norm with `weight` and `bias`."""

    def forward(self: Any, x: Tensor) -> Any:
        """As of the module, [..., d]."""
        if not is_fused(x, self.weight) or not is_faster(x):
            return super().forward(x)  # type: ignore[misc]
        return layer_norm(x, self.weight, self.bias, self.eps)


def fuse_norms(model: nn.Module) -> None:
    """Let the norms of `model` that are `x / rms(x) * weight`, and torch's layer norms of the last axis,
    be one kernel."""
    for module in model.modules():
        if type(module) is nn.LayerNorm:
            if module.weight is not None and len(module.normalized_shape) == 1:
                extend(module, FusedLayerNorm)
        elif (found := norm_of(module)) is not None and found[0] == "rms":
            extend(module, FusedNorm)
            module.fused_eps = found[1]  # type: ignore[assignment]


def is_fused(x: Tensor, weight: Tensor) -> bool:
    """Whether a norm of `x` is the fused kernel."""
    return is_unwatched(x) and x.is_cuda and x.dtype == weight.dtype and x.dtype in HALF
