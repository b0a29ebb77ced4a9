"""Linear layers as stages of the decoding kernels: lists of [B, R, K] weights, read in place."""

from __future__ import annotations

from typing import Any

from torch import nn

from blr.compressor.modeling.corrected import CorrectedLinear
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.modeling.quantized import QuantizedLinear
from blr.compressor.modeling.stages import Stage


def kind_of(w: Any) -> tuple[int, int]:
    """Bits and group of packed weights, zeros for others: stages of one `dual` have the same."""
    return getattr(w, "bits", 0), getattr(w, "group", 0)


def stages_of(module: nn.Module) -> tuple[Stage, ...] | None:
    """The stages of a dense or structured layer; None for one that only its own forward computes."""
    if isinstance(module, StructuredLinear | QuantizedLinear | CorrectedLinear):
        return module.stages()
    return (Stage(module.weight[None], module.bias),) if type(module) is nn.Linear else None
