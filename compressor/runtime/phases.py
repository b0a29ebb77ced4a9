"""Turns a model into the phases that compute one token (`plan.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from blr.compressor.modeling.stages import LayerStage, Packed, kind_of, stages_of
from blr.compressor.runtime.failures import UnsupportedError
from blr.compressor.runtime.plan import Columns, Heads, Phase, StagePart, TokenPlan
from blr.kernels.decode.gemv.segments import dual_fits
from blr.kernels.decode.quantized.formats import GROUP

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *MIXTURES)
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
# Layers of a block that read the same input, of the modules that hold them.
TOGETHER = {"self_attn": ("q_proj", "k_proj", "v_proj"), "mlp": ("gate_proj", "up_proj")}
# Rotary embeddings whose table does not depend on the length of the sequence so far.
ROTARY = ("default", "linear", "llama3", "yarn")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def supports(model: PreTrainedModel) -> str | None:
    """Why `model` cannot be decoded by phases, in one line; None if it can."""
    config = model.config
    family = config.model_type.removeprefix("blr_")
    if family not in FAMILIES:
        return f"model type {config.model_type!r}: expected one of {', '.join(FAMILIES)}"
    if config.hidden_act not in ACTIVATIONS:
        return f"activation {config.hidden_act!r}: expected one of {', '.join(ACTIVATIONS)}"
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rotary not in ROTARY:
        return f"rotary embedding {rotary!r}: expected one of {', '.join(ROTARY)}"
    if model.get_output_embeddings() is None:
        return f"{type(model).__name__} has no output embedding: expected a causal language model"
    if model.dtype not in DTYPES:
        return f"dtype {model.dtype}: expected float32, float16 or bfloat16"
    if model.device.type == "cuda" and family in MIXTURES:
        from blr.compressor.runtime.mixtures import waits_for_the_host

        if waits_for_the_host(model):
            return f"dense experts in {model.dtype}: expected bfloat16, which alone a CUDA graph takes"
    devices = {parameter.device for parameter in model.parameters()}
    return None if len(devices) == 1 else f"weights on {len(devices)} devices: expected one"


@torch.no_grad()
def make_plan(model: PreTrainedModel) -> TokenPlan:
    """Plan the phases of `model`, which may mix dense and structured layers. Raises UnsupportedError
    with the reason that `supports` gives."""
    reason = supports(model)
    if reason is not None:
        raise UnsupportedError(f"{reason}; generate with transformers instead")
    base, config, plan = model.get_decoder(), model.config, TokenPlan()
    x = Columns("x", config.hidden_size)
    table = cast(Tensor, model.get_input_embeddings().weight)
    plan.add(Phase("embed", "embed", target=x, weight=table))
    activation = ACTIVATIONS[config.hidden_act]
    for index, layer in enumerate(base.layers[: config.num_hidden_layers]):
        prefix = f"layer.{index}."
        _attention(plan, prefix, layer, _heads(layer.self_attn, config, index), x)
        _mlp(plan, prefix, layer, activation, x)
    head, logits = model.get_output_embeddings(), Columns("logits", config.vocab_size)
    _projections(plan, "", {"lm_head": (head, logits)}, x, "lm_head", base.norm)
    plan.add(Phase("choose", "choose", source=logits))
    return plan


def _heads(attention: Any, config: PreTrainedConfig, index: int) -> Heads:
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    window = getattr(config, "sliding_window", None)
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    elif config.model_type.removeprefix("blr_") not in ("mistral", "mixtral"):
        window = None
    q_gain, k_gain = (None if norm is None else norm.weight for norm in (q_norm, k_norm))
    eps = 0.0 if q_norm is None else q_norm.variance_epsilon
    sinks = getattr(attention, "sinks", None)
    return Heads(index, attention.head_dim, attention.scaling, q_gain, k_gain, eps, window, sinks)


def _attention(plan: TokenPlan, prefix: str, layer: Any, heads: Heads, x: Columns) -> None:
    """Add the norm, projections, attention and output projection of a decoder layer."""
    own, targets, at = layer.self_attn, {}, 0
    for name in TOGETHER["self_attn"]:
        module = getattr(own, name)
        width = module.out_features
        targets[name.removesuffix("_proj")] = (module, Columns("qkv", width, at))
        at += width
    _projections(plan, prefix, targets, x, "qkv", layer.input_layernorm)
    mixed = Columns("heads", own.o_proj.in_features)
    read = Columns("qkv", at)
    plan.add(Phase(f"{prefix}attention", "attention", source=read, target=mixed, heads=heads))
    _projections(plan, prefix, {"o": (own.o_proj, x)}, mixed, "o", add=True)


def _mlp(plan: TokenPlan, prefix: str, layer: Any, activation: str, x: Columns) -> None:
    """Add the norm, gated projections and output projection of a decoder layer, or its experts."""
    mlp, norm = layer.mlp, layer.post_attention_layernorm
    if hasattr(mlp, "experts"):
        from blr.compressor.runtime.mixtures import add_experts

        return add_experts(plan, prefix, mlp, x, norm, _modules)
    width = mlp.down_proj.in_features
    inner = Columns("inner", width)
    modules = [getattr(mlp, name) for name in TOGETHER["mlp"]]
    gate, up = map(stages_of, modules)
    name = f"{prefix}gate_up"
    if gate is not None and up is not None and _pair(gate, up):
        inputs = _advance(plan, name, [gate, up], x, norm)
        last = _last(inputs, [gate, up], [inner, inner], _order([stages_of(mlp.down_proj)], 0))
        gain = {"gain": norm.weight, "eps": norm.variance_epsilon} if len(gate) == 1 else {}
        name += ".U" if len(gate) > 1 else ""
        plan.add(Phase(name, "dual", tuple(last), activation=activation, **gain))
    else:
        both = Columns("gate_up", 2 * width)
        targets = {"gate": (modules[0], Columns("gate_up", width))}
        targets["up"] = (modules[1], Columns("gate_up", width, width))
        _projections(plan, prefix, targets, x, "gate_up", norm)
        plan.add(Phase(f"{prefix}act", "gate", source=both, target=inner, activation=activation))
    _projections(plan, prefix, {"down": (mlp.down_proj, x)}, inner, "down", add=True)


def _order(stages: Sequence[Sequence[LayerStage] | None], depth: int) -> tuple[int, int] | None:
    """Bits and group of the weights that all stages at a depth have; None unless each is one packed
    block, neither mixed nor corrected, of whole groups or with zeros as padding of the last."""
    found = set()
    for chain in stages:
        if chain is None:
            return None
        w = chain[depth].w
        bits, group, _ = kind_of(w)
        whole = bits == 4 or (bits == 2 and isinstance(w, Packed) and w.K % group == 0)
        if not whole or w.shape[0] > 1 or chain[depth].mix is not None or chain[depth].correction:
            return None
        found.add((bits, group))
    return found.pop() if len(found) == 1 else None


def _pair(gate: Sequence[LayerStage], up: Sequence[LayerStage]) -> bool:
    """Whether the last stages of two layers fit one `dual`."""
    same = _number(gate) == _number(up) and kind_of(gate[-1].w) == kind_of(up[-1].w)
    return same and dual_fits(gate[-1].w, up[-1].w)


def _number(stages: Sequence[LayerStage] | None) -> int:
    """The number of a layer's stages, 0 if its own forward computes it."""
    return 0 if stages is None else len(stages)


def _projections(
    plan: TokenPlan,
    prefix: str,
    targets: dict[str, tuple[nn.Module, Columns]],
    source: Columns,
    name: str,
    norm: Any = None,
    add: bool = False,
) -> None:
    """Add layers that share an input, in common launches if their numbers of stages agree."""
    found = {key: stages_of(module) for key, (module, _) in targets.items()}
    if len(set(map(_number, found.values()))) > 1:
        for key, target in targets.items():
            _projections(plan, prefix, {key: target}, source, key, norm, add)
        return
    stages = [chain for chain in found.values() if chain is not None]
    if not stages:
        _modules(plan, prefix, targets, source, norm, add)
        return
    slots = [slot for _, slot in targets.values()]
    parts = _advance(plan, prefix + name, stages, source, norm)
    gain = {"gain": norm.weight, "eps": norm.variance_epsilon} if norm and len(stages[0]) == 1 else {}
    label = prefix + name + (".U" if len(stages[0]) > 1 else "")
    plan.add(Phase(label, "stages", tuple(_last(parts, stages, slots)), add=add, **gain))


def _advance(
    plan: TokenPlan, name: str, stages: Sequence[Sequence[LayerStage]], source: Columns, norm: Any
) -> list[Columns]:
    """Add all stages but the last of layers that share `source`; returns the inputs of the last
    stages."""
    inputs = [source] * len(stages)
    orders = [_order(stages, depth + 1) for depth in range(len(stages[0]) - 1)]
    for depth in range(len(stages[0]) - 1):
        parts, at = [], 0
        for given, chain in zip(inputs, stages, strict=True):
            target = Columns(f"z{depth}", chain[depth].rows, at)
            parts.append(StagePart(chain[depth], given, target, order=orders[depth]))
            at += -(-target.width // GROUP) * GROUP  # whole groups, should the next weights be packed
        gain = {"gain": norm.weight, "eps": norm.variance_epsilon} if norm and depth == 0 else {}
        plan.add(Phase(f"{name}.V", "stages", tuple(parts), **gain))
        inputs = [part.target for part in parts]
    return inputs


def _last(
    inputs: Sequence[Columns],
    stages: Sequence[Sequence[LayerStage]],
    targets: Sequence[Columns],
    order: tuple[int, int] | None = None,
) -> list[StagePart]:
    """The last stages, into `targets`; the first stages of corrections write side by side into "z".
    order: as of `StagePart`."""
    parts, at = [], 0
    for chain, given, target in zip(stages, inputs, targets, strict=True):
        stage, first = chain[-1], None
        if stage.correction is not None:
            z = Columns("z", stage.correction.first.rows, at)
            first = StagePart(stage.correction.first, given, z)
            at += -(-z.width // 8) * 8  # 32-byte boundaries
        parts.append(StagePart(stage, given, target, first, order))
    return parts


def _modules(
    plan: TokenPlan,
    prefix: str,
    targets: dict[str, tuple[nn.Module, Columns]],
    source: Columns,
    norm: Any,
    add: bool,
) -> None:
    """Add layers that only their own forward computes, with their norm as a phase before."""
    if norm is not None:
        normed, key = Columns("normed", source.width), "+".join(targets)
        gain = {"gain": norm.weight, "eps": norm.variance_epsilon}
        plan.add(Phase(f"{prefix}{key}.norm", "norm", source=source, target=normed, **gain))
        source = normed
    for key, (module, slot) in targets.items():
        plan.add(Phase(prefix + key, "module", source=source, target=slot, module=module, add=add))
