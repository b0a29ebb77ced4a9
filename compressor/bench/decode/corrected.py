"""Dense models whose weights become ``W = Q + U V`` in place: few bits and a low-rank correction."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.exporting.pack import quantizable
from blr.compressor.fitting.rounding import quantize_dense, quantize_factors
from blr.compressor.modeling.corrected import CorrectedLinear
from blr.compressor.structures.specs import CorrectedSpec, DenseSpec, LowRankSpec, QuantizedSpec

FACTOR_BITS = 4


def correct_model(model: nn.Module, bits: int, rank: int) -> None:
    """Replace every linear layer but the head: its weight rounded to `bits`, and a random correction of
    `rank` in int4 beside it, as large as the error. For timing: what is corrected is no better."""
    for name in quantizable(model):
        parent, _, child = name.rpartition(".")
        holder = model.get_submodule(parent)
        setattr(holder, child, corrected_layer(getattr(holder, child), bits, rank))


def corrected_layer(layer: Any, bits: int, rank: int) -> CorrectedLinear:
    """The corrected layer in the place of an nn.Linear, on its device, with scales of its dtype."""
    weight: Tensor = layer.weight.detach()
    outputs, inputs = weight.shape
    structure = LowRankSpec(inputs, outputs, min(rank, inputs, outputs))
    base = QuantizedSpec(DenseSpec(inputs, outputs), bits)
    correction = QuantizedSpec(structure, FACTOR_BITS, tiled=True)
    like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    u = torch.randn(outputs, structure.rank, **like) * 0.1 / structure.rank**0.5
    v = torch.randn(inputs, structure.rank, **like) / inputs**0.5
    tensors = {f"base.{n}": t for n, t in quantize_dense(weight, base).tensors.items()}
    packed = quantize_factors(correction, {"U": u, "V": v}).tensors
    tensors |= {f"correction.{n}": t for n, t in packed.items()}
    if layer.bias is not None:
        tensors["bias"] = layer.bias.detach()
    with torch.device("meta"):
        made = CorrectedLinear(CorrectedSpec(base, correction), layer.bias is not None)
    made.to(weight.dtype).load_state_dict(tensors, assign=True)
    return made.requires_grad_(False).train(layer.training)
