"""Plans how transformers splits structured layers over processes (tensor parallelism), for inference.
The native plan says by which side each layer is cut; that becomes cuts of the factors. In training each
process would compute gradients of its own part only."""

from collections.abc import Iterator
from typing import Any, TypeGuard

from torch import nn

from blr.compressor.modeling.layers import CorrectedLinear, KernelLinear, StructuredLinear
from blr.compressor.modeling.modeling_blr import Pair

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
EMBEDDING = "embed_tokens"  # as transformers itself adds to plans


def split_plan(model: Any, size: int) -> dict[str, str]:
    """The style of each module or parameter, by names with `*` for numbers; empty unless all layers that
    the native plan splits can be split. Raises ValueError for blocks that `size` does not divide."""
    plan: dict[str, str] = {}
    if "export" in (model.config.blr or {}):
        return plan  # other axes
    if "pairs" in (model.config.blr or {}):
        return pair_plan(model)
    for name, layer, style in planned(model):
        side = SIDES.get(style)
        if not isinstance(layer, KernelLinear | CorrectedLinear):
            plan |= {name: style}
            continue
        if side is None or not _can_split(layer):
            return {}
        axes = AXES[layer.spec.structure][side]
        for factor, shape in layer.spec.shapes().items():
            cut = shape[axes[factor]] if factor in axes else size
            if cut % size:
                raise ValueError(f"{name}.{factor} has {cut} parts to split over {size} processes")
            plan[f"{name}.{factor}"] = STYLES[axes[factor]] if factor in axes else WHOLE
        plan[name] = style
    return plan


def _can_split(layer: nn.Module) -> TypeGuard[StructuredLinear]:
    """Whether a module is a structured layer that can be split: not packed, nor in groups."""
    if not isinstance(layer, StructuredLinear) or not layer.has_own_layout:
        return False
    return layer.spec.structure in AXES and getattr(layer.spec, "groups", 1) == 1


def split_layers(model: nn.Module) -> None:
    """Tell the layers of a model that is about to be split to compute with their parts."""
    for module in model.modules():
        if _can_split(module):
            module._hf_quantized_needs_local_tp = True


def freeze_parts(model: nn.Module) -> None:
    """Exclude the factors of layers that were split from training."""
    for module in model.modules():
        if isinstance(module, StructuredLinear) and module._hf_quantized_needs_local_tp:
            for factor in module.spec.shapes():
                getattr(module, factor).requires_grad_(False)


def planned(model: Any) -> Iterator[tuple[str, nn.Module, str]]:
    """The name with `*` for numbers, the module and the style of every module in the plan of the native
    class (ours has none), and of the embedding, to which a head that is split may be tied."""
    plans = (cls.__dict__.get("base_model_tp_plan") for cls in type(model.config).__mro__)
    native: dict[str, str] = next((plan for plan in plans if plan), {})
    native = {EMBEDDING: "embedding_rowwise", **native} if native else {}
    base = "" if model.base_model is model else f"{model.base_model_prefix}."
    for name, module in model.named_modules():
        generic = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        style = native.get(generic.removeprefix(base)) if generic.startswith(base) else None
        if style is not None:
            yield generic, module, style


def table_plan(model: Any) -> dict[str, str]:
    """The styles of the embedding and the head, which may be tied: both, or neither."""
    tables = {n: style for n, module, style in planned(model) if isinstance(module, nn.Embedding)}
    if not tables:
        return {}
    modules, heads = dict(model.named_modules()), type(model).made_of._tp_plan or {}
    return tables | {n: style for n, style in heads.items() if isinstance(modules.get(n), nn.Linear)}


def pair_plan(model: object) -> dict[str, str]:
    """The native plan for a model with pairs of linear layers: U is cut by outputs, V by inputs, so that
    sums over processes have the size of the rank. Empty without pairs, or with pairs in some blocks."""
    kinds: dict[str, set[bool]] = {}
    plan: dict[str, str] = {}
    for name, module, style in planned(model):
        paired = isinstance(module, Pair)
        kinds.setdefault(name, set()).add(paired)
        plan[f"{name}.{'V' if style == 'rowwise' else 'U'}" if paired else name] = style
    mixed = any(len(found) > 1 for found in kinds.values())
    return plan if {True} in kinds.values() and not mixed else {}
