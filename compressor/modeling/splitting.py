"""How transformers splits structured layers over processes. Shipped inside every checkpoint.

The native plan of a model says by which side each linear layer is cut; here that becomes cuts of the
factors, in styles that transformers has. Read when a model is distributed while it is loaded
(``from_pretrained(…, distributed_config=…)``), for inference: gradients of factors that every process
holds whole would be those of its own part.
"""

from __future__ import annotations

from typing import Any

from blr.compressor.modeling.classes import planned
from blr.compressor.modeling.corrected import CorrectedLinear
from blr.compressor.modeling.layers import BlastLinear, LowRankLinear, MonarchLinear, StructuredLinear
from blr.compressor.modeling.pairs import pair_plan
from blr.compressor.modeling.quantized import QuantizedLinear

# structure, then the side that is cut, to factor and axis; factors that are not named stay whole
AXES: dict[str, dict[str, dict[str, int]]] = {
    "svd": {"out": {"U": 0}, "in": {"V": 0}},
    "groups out": {"out": {"U": 0, "V": 0}, "in": {"V": 1}},
    "groups in": {"out": {"U": 1}, "in": {"U": 0, "V": 0}},
    # the last axis runs over the blocks of the other side first
    "monarch": {"out": {"U": 0, "V": 2}, "in": {"U": 2, "V": 0}},
    "blast": {"out": {"U": 0, "S": 0}, "in": {"S": 1, "V": 0}},
    "dense": {"out": {"weight": 0}, "in": {"weight": 1}},
}
SIDES = {"colwise": "out", "rowwise": "in"}
STYLES = {0: "embedding_rowwise", 1: "embedding_colwise", 2: "rowwise"}  # that cut a factor's axis
WHOLE = "replicate"
SPLIT = (LowRankLinear, MonarchLinear, BlastLinear)


def split_plan(model: Any, size: int) -> dict[str, str]:
    """Module or parameter to style, by names with `*` for numbers; empty where not every layer that the
    native plan splits can be.

    Raises ValueError for blocks that `size` processes do not divide.
    """
    plan: dict[str, str] = {}
    if "export" in (model.config.blr or {}):
        return plan  # other axes
    if "pairs" in (model.config.blr or {}):
        return pair_plan(model)
    for name, layer, style in planned(model):
        side = SIDES.get(style)
        if isinstance(layer, QuantizedLinear | CorrectedLinear):
            return {}
        if not isinstance(layer, StructuredLinear):
            plan |= {name: style}
            continue
        if side is None or type(layer) not in SPLIT or layer.spec.structure not in AXES:
            return {}
        if isinstance(layer, LowRankLinear) and layer.U.dim() == 3:
            return {}  # groups of heads
        axes = AXES[layer.spec.structure][side]
        for factor, shape in layer.spec.shapes().items():
            cut = shape[axes[factor]] if factor in axes else size
            if cut % size:
                raise ValueError(f"{name}.{factor} has {cut} parts to split over {size} processes")
            plan[f"{name}.{factor}"] = STYLES[axes[factor]] if factor in axes else WHOLE
        plan[name] = style
    return plan


def split_layers(model: Any) -> None:
    """Let the layers of a model that is about to be split compute with their parts."""
    for module in model.modules():
        if isinstance(module, SPLIT):
            module._hf_quantized_needs_local_tp = True


def freeze_parts(model: Any) -> None:
    """Let the factors of layers that were split not be trained."""
    for module in model.modules():
        if isinstance(module, SPLIT) and module._hf_quantized_needs_local_tp:
            for factor in module.spec.shapes():
                getattr(module, factor).requires_grad_(False)
