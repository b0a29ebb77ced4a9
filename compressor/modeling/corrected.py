"""Layers ``W = Q + S``: a dense weight in few bits and a structure. Shipped in every checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.modeling.layers import LAYERS, StructuredLinear
from blr.compressor.modeling.modeling_blr import DenseWeight
from blr.compressor.modeling.quantized import QuantizedLinear, quantized_layer
from blr.compressor.modeling.stages import Stage
from blr.compressor.structures.specs import CorrectedSpec, QuantizedSpec


class CorrectedLinear(nn.Module):
    """``y = x Qᵀ + x Sᵀ + bias``; replaces nn.Linear and, transposed, GPT-2's Conv1D.

    base: Q, packed. correction: S, a structured layer, packed or not. Neither has a bias of its own.
    """

    def __init__(self, spec: CorrectedSpec, bias: bool) -> None:
        super().__init__()
        self.spec = self.described = spec
        self.in_features, self.out_features = spec.in_features, spec.out_features
        self.base = QuantizedLinear(spec.base, bias=False)
        self.correction = _structured(spec)
        self.bias = nn.Parameter(torch.zeros(spec.out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., i] -> [..., o]."""
        y = self.base(x) + self.correction(x)
        return y if self.bias is None else y + self.bias

    @property
    def entry(self) -> dict[str, Any]:
        """Of the table of layers in a file."""
        return self.described.to_dict()

    @property
    def weight(self) -> Tensor:
        """W [o, i], made where something computes with it."""
        if torch.compiler.is_compiling():
            return self.composed()
        return DenseWeight(self, self.base.packed().scale)

    def composed(self) -> Tensor:
        """W [o, i]."""
        return self.base.composed() + self.correction.composed()

    def stages(self) -> tuple[Stage, ...] | None:
        """One: the packed weight's, corrected; None if only `forward` computes it."""
        stages, correction = self.base.stages(), self.correction.correction()
        if stages is None or correction is None:
            return None
        return (stages[0]._replace(bias=self.bias, correction=correction),)


def _structured(spec: CorrectedSpec) -> StructuredLinear:
    made = (
        quantized_layer(spec.correction, bias=False)
        if isinstance(spec.correction, QuantizedSpec)
        else LAYERS[type(spec.correction)](spec.correction, bias=False)
    )
    assert isinstance(made, StructuredLinear)  # as the spec has checked
    return made
