"""Turns a model into the phases that compute one token (`plan.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from blr.compressor.modeling.stages import LayerStage, Packed, kind_of, stages_of
from blr.compressor.runtime.failures import UnsupportedError
from blr.compressor.runtime.plan import Columns, Heads, Phase, StagePart, TokenPlan
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
Targets = dict[str, tuple[nn.Module, Columns]]  # layers by their names in a block, and where to
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
    """Plan the phases of `model`. Raises UnsupportedError with the reason that `supports` gives."""
    reason = supports(model)
    if reason is not None:
        raise UnsupportedError(f"{reason}; generate with transformers instead")
    base, config, plan = model.get_decoder(), model.config, TokenPlan()
    x = Columns("x", config.hidden_size)
    table = cast(Tensor, model.get_input_embeddings().weight)
    plan.add(Phase("embed", "embed", target=x, weight=table))
    activation = ACTIVATIONS[config.hidden_act]
    for index, layer in enumerate(base.layers[: config.num_hidden_layers]):
        block = _Block(plan, f"layer.{index}.")
        block.attention(layer, _heads(layer.self_attn, config, index), x)
        block.mlp(layer, activation, x)
    head, logits = model.get_output_embeddings(), Columns("logits", config.vocab_size)
    _Block(plan, "").layers("lm_head", {"lm_head": (head, logits)}, x, base.norm)
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


class Norm(Protocol):
    """An RMS norm of any family."""

    weight: Tensor
    variance_epsilon: float


@dataclass(frozen=True)
class _Block:
    """Adds the phases of one decoder layer, or of the head, to a plan."""

    plan: TokenPlan
    prefix: str

    def add(self, phase: Phase, norm: Norm | None = None) -> None:
        """Add a phase, behind a norm of its input."""
        if norm is not None:
            phase = replace(phase, gain=norm.weight, eps=norm.variance_epsilon)
        self.plan.add(replace(phase, name=self.prefix + phase.name))

    def attention(self, layer: Any, heads: Heads, x: Columns) -> None:
        """Add the norm, projections, attention and output projection."""
        own, targets, at = layer.self_attn, Targets(), 0
        for name in TOGETHER["self_attn"]:
            module = getattr(own, name)
            targets[name.removesuffix("_proj")] = module, Columns("qkv", module.out_features, at)
            at += module.out_features
        self.layers("qkv", targets, x, layer.input_layernorm)
        mixed = Columns("heads", own.o_proj.in_features)
        self.add(Phase("attention", "attention", source=Columns("qkv", at), target=mixed, heads=heads))
        self.layers("o", {"o": (own.o_proj, x)}, mixed, add=True)

    def mlp(self, layer: Any, activation: str, x: Columns) -> None:
        """Add the norm, gated projections and output projection, or the experts."""
        mlp, norm = layer.mlp, layer.post_attention_layernorm
        if hasattr(mlp, "experts"):
            from blr.compressor.runtime.mixtures import add_experts

            return add_experts(mlp, x, norm, self.add, self.modules)
        inner = Columns("inner", width := mlp.down_proj.in_features)
        modules = [getattr(mlp, name) for name in TOGETHER["mlp"]]
        gate, up = map(stages_of, modules)
        if gate is not None and up is not None and _pair(gate, up):
            last, down = Phase("gate_up", "dual", activation=activation), stages_of(mlp.down_proj)
            self.stages(last, [gate, up], x, [inner, inner], norm, _order([down], 0))
        else:
            slots = Columns("gate_up", width), Columns("gate_up", width, width)
            both = dict(zip(("gate", "up"), zip(modules, slots, strict=True), strict=True))
            self.layers("gate_up", both, x, norm)
            read = Columns("gate_up", 2 * width)
            self.add(Phase("act", "gate", source=read, target=inner, activation=activation))
        self.layers("down", {"down": (mlp.down_proj, x)}, inner, add=True)

    def layers(
        self,
        name: str,
        targets: Targets,
        source: Columns,
        norm: Norm | None = None,
        add: bool = False,
    ) -> None:
        """Add layers that share an input, in common launches if their numbers of stages agree."""
        found = {key: stages_of(module) for key, (module, _) in targets.items()}
        stages = [chain for chain in found.values() if chain is not None]
        if len(set(map(_number, found.values()))) > 1:
            for key, target in targets.items():
                self.layers(key, {key: target}, source, norm, add)
        elif stages:
            slots = [slot for _, slot in targets.values()]
            self.stages(Phase(name, "stages", add=add), stages, source, slots, norm)
        else:
            self.modules(targets, source, norm, add)

    def modules(self, targets: Targets, source: Columns, norm: Norm | None, add: bool) -> None:
        """Add layers that only their own forward computes, with their norm as a phase before."""
        if norm is not None:
            normed = Columns("normed", source.width)
            self.add(Phase(f"{'+'.join(targets)}.norm", "norm", source=source, target=normed), norm)
            source = normed
        for key, (module, slot) in targets.items():
            self.add(Phase(key, "module", source=source, target=slot, module=module, add=add))

    def stages(
        self,
        last: Phase,
        stages: Sequence[Sequence[LayerStage]],
        source: Columns,
        targets: Sequence[Columns],
        norm: Norm | None,
        order: tuple[int, int] | None = None,
    ) -> None:
        """Add the stages of layers that share `source`, a launch for each depth; the `last` one, of this
        `order`, into `targets`."""
        inputs, deepest = [source] * len(stages), len(stages[0]) - 1
        for depth in range(deepest):
            parts, at, read = [], 0, _order(stages, depth + 1)
            for given, chain in zip(inputs, stages, strict=True):
                target = Columns(f"z{depth}", chain[depth].rows, at)
                parts.append(StagePart(chain[depth], given, target, order=read))
                at += -(-target.width // GROUP) * GROUP  # whole, should the next weights be packed
            self.add(Phase(f"{last.name}.V", "stages", tuple(parts)), norm if depth == 0 else None)
            inputs = [part.target for part in parts]
        name, parts = last.name + ".U" * (deepest > 0), _last(stages, inputs, targets, order)
        self.add(replace(last, name=name, parts=tuple(parts)), None if deepest else norm)


def _last(
    stages: Sequence[Sequence[LayerStage]],
    inputs: Sequence[Columns],
    targets: Sequence[Columns],
    order: tuple[int, int] | None,
) -> list[StagePart]:
    """The last stages; the first stages of corrections write side by side into "z"."""
    parts, at = [], 0
    for chain, given, target in zip(stages, inputs, targets, strict=True):
        correction, first = chain[-1].correction, None
        if correction is not None:
            z = Columns("z", correction.first.rows, at)
            first = StagePart(correction.first, given, z)
            at += -(-z.width // 8) * 8  # 32-byte boundaries
        parts.append(StagePart(chain[-1], given, target, first, order))
    return parts


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
    return same and gate[-1].w.shape[:2] == up[-1].w.shape[:2]


def _number(stages: Sequence[LayerStage] | None) -> int:
    return 0 if stages is None else len(stages)
