"""How llama.cpp calls models, sizes, tensors and tokenizers, and what it computes otherwise."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from blr.compressor.base.errors import CapabilityError
from blr.compressor.base.quoting import quote
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.engines import ROTARY, Engine, check_decoder, rotary_of, unlike
from blr.compressor.loading.load import load_tokenizer

TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
REMEDY = "take --as mlx, vllm or dense"
# How llama.cpp calls the ways in which text is cut into words, by regular expression or by kind
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
_WORDS += r"|\s+(?!\S)|\s+"
CUTS = {
    _WORDS % r"\p{N}{1,3}": "llama-bpe",
    _WORDS % r"\p{N}": "qwen2",
    "ByteLevel": "gpt-2",
    "Digits ByteLevel": "smollm",
}
WHOLE_WORDS = ("llama-bpe",)  # those where a word that is a token is not cut


@dataclass(frozen=True)
class Architecture:
    """A type of models of llama.cpp. rotary: the scalings of rotary positions that it has. activation:
    as transformers calls it. neighbours: whether positions rotate neighbours, where transformers rotates
    halves of a head. tensors: names that differ from `TENSORS`. period: each how many-th layer attends
    to all tokens, the others to a sliding window; 0 where all do. whole: counts of layers of models that
    scale attention by the width of the model over its heads, others by the width of a head."""

    name: str
    rotary: tuple[str, ...] = ROTARY[:2]
    activation: str = "silu"
    neighbours: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)
    period: int = 0
    whole: int = 0


_LLAMA = Architecture("llama", ROTARY, neighbours=True)
ARCHITECTURES = {
    **{"llama": _LLAMA, "mistral": _LLAMA, "phi3": Architecture("phi3", ROTARY[:1])},
    **{kind: Architecture(kind) for kind in ("qwen2", "qwen3")},
    "gemma2": Architecture("gemma2", ROTARY[:1], "gelu_pytorch_tanh", False, GEMMA, 2, 46),
    "gemma3_text": Architecture("gemma3", ROTARY[:2], "gelu_pytorch_tanh", False, GEMMA, 6, 62),
}


def check_architecture(source: Source, engine: Engine) -> PreTrainedConfig:
    """The configuration of a model that llama.cpp computes as transformers does, or CapabilityError."""
    types = {kind: each.activation for kind, each in ARCHITECTURES.items()}
    made = ARCHITECTURES.get(source.model_type)
    config = check_decoder(source, engine, types, made.rotary if made else ROTARY)
    if made is None or not made.period:
        return config
    layers, width = config.num_hidden_layers, config.head_dim
    scalar = config.hidden_size // config.num_attention_heads if layers == made.whole else width
    if config.query_pre_attn_scalar != scalar:
        found = f"query_pre_attn_scalar {config.query_pre_attn_scalar}"
        raise unlike(source, engine, found, str(scalar))
    kinds = [
        "full_attention" if n % made.period == 0 else "sliding_attention" for n in range(1, layers + 1)
    ]
    if config.layer_types != kinds:
        raise unlike(source, engine, "other layer_types", f"each {made.period}th full_attention")
    sliding = rotary_of(config).get("sliding_attention", {})
    if sliding.get("rope_type", "default") != "default":
        raise unlike(source, engine, "scaled positions in sliding layers", "default ones")
    caps = [config.attn_logit_softcapping is None, config.final_logit_softcapping is None]
    if caps != [made.name == "gemma3"] * 2:
        raise unlike(source, engine, "other softcapping", f"that of a {made.name}")
    return config


@dataclass(frozen=True)
class GgufModel:
    """A model that `check_architecture` lets pass, as llama.cpp calls and computes it."""

    config: PreTrainedConfig

    @property
    def architecture(self) -> Architecture:
        return ARCHITECTURES[self.config.model_type]

    @property
    def width(self) -> int:
        """The width of a head."""
        config = self.config
        return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    @property
    def type(self) -> dict[str, object]:
        """The entry of a file that says for which type of models it is."""
        return {"general.architecture": self.architecture.name}

    def name_of(self, stored: str) -> str:
        """What llama.cpp calls a tensor; "" if it has no such. A block's is ``blk.3.attn_q.weight``."""
        module, _, part = stored.rpartition(".")
        names = {**TENSORS, **self.architecture.tensors}
        if block := re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module):
            name = names.get(block[2])
            return f"blk.{block[1]}.{name}.{part}" if name else ""
        return f"{names[module]}.{part}" if module in names else ""

    def row_order(self, name: str) -> Tensor | None:
        """The order of the rows of a tensor in llama.cpp; None if it is ours. Its Llama rotates
        neighbours, where transformers rotates halves of a head."""
        config, layer = self.config, name.split(".")[-2]
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        if not self.architecture.neighbours or layer not in heads:
            return None
        rows = torch.arange(heads[layer] * self.width)
        return rows.unflatten(0, (-1, 2, self.width // 2)).transpose(1, 2).flatten()

    def added_to(self, name: str) -> float:
        """What a tensor of llama.cpp has more than ours: Gemma's norms multiply by 1 + weight."""
        return 1.0 if self.architecture.period and name.endswith("norm.weight") else 0.0

    def values(self, name: str) -> dict[str, object]:
        """The sizes of a decoder. name: of the model."""
        config, made, width = self.config, self.architecture, self.width
        rotary = rotary_of(config)
        whole = rotary.get("") or rotary["full_attention"]
        sizes = {
            "vocab_size": config.vocab_size,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "block_count": config.num_hidden_layers,
            "feed_forward_length": config.intermediate_size,
            "rope.dimension_count": int(width * whole.get("partial_rotary_factor", 1.0)),
            "rope.freq_base": float(whole["rope_theta"]),
            "attention.head_count": config.num_attention_heads,
            "attention.head_count_kv": config.num_key_value_heads,
            "attention.key_length": width,
            "attention.value_length": width,
            "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        }
        if whole["rope_type"] == "linear":
            sizes |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(whole["factor"])}
        if made.period:
            sizes["attention.sliding_window"] = config.sliding_window
        if "sliding_attention" in rotary:
            sizes["rope.freq_base_swa"] = float(rotary["sliding_attention"]["rope_theta"])
        for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
            if value := getattr(config, cap, None):
                sizes[cap] = float(value)
        general = {"type": "model", "name": name, "quantization_version": 2}
        found = self.type | {f"general.{k}": v for k, v in general.items()}
        return found | {f"{made.name}.{k}": v for k, v in sizes.items()}


def tokenizer_values(folder: Path, size: int) -> dict[str, object]:
    """The tokenizer in `folder`, of a model with `size` tokens, and its chat template. Raises
    CapabilityError for one that llama.cpp does not have."""
    tokenizer: Any = load_tokenizer(folder)
    if not tokenizer.is_fast or len(tokenizer) > size:
        said = f"{len(tokenizer)} tokens, not fast or more than the {size} of the model"
        raise CapabilityError(f"--as gguf: the tokenizer of {folder} has {said}; {REMEDY}")
    table = json.loads(tokenizer.backend_tokenizer.to_str())  # its class may differ from its file
    values = _vocabulary(folder, table, size)
    if values["model"] == "llama":
        values["add_space_prefix"] = tokenizer.tokenize("a") == ["▁a"]
    ids = {name: getattr(tokenizer, f"{short}_token_id") for short, name in SPECIAL.items()}
    values |= {f"{name}_token_id": token for name, token in ids.items() if token is not None}
    read = tokenizer("a").input_ids
    for name, token in (("bos", read[0]), ("eos", read[-1])):
        values[f"add_{name}_token"] = token == ids[name] is not None
    template = tokenizer.chat_template
    template = template.get("default") if isinstance(template, dict) else template
    chat = {"tokenizer.chat_template": template} if template else {}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()} | chat


def _vocabulary(folder: Path, table: dict[str, Any], size: int) -> dict[str, object]:
    """Tokens and how text becomes tokens: merges of bytes, or of characters in the order of tokens."""
    model, (texts, kinds) = table["model"], _tokens(table, size)
    values: dict[str, Any] = {"tokens": texts, "token_type": kinds}
    if model["type"] == "BPE" and model.get("byte_fallback"):
        return values | {"model": "llama", "scores": [float(-n) for n in range(size)]}
    if model["type"] == "BPE" and (cut := _cut(table)):
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        return values | {"model": "gpt2", "pre": cut, "merges": merges}
    told = quote(table.get("pre_tokenizer"), 120)[1:-1]
    raise CapabilityError(
        f"--as gguf: the tokenizer of {folder} ({model['type']}, {told}) is none that llama.cpp has, "
        f"expected one that cuts text as those of Llama, Qwen, GPT-2 or SmolLM; {REMEDY}"
    )


def _cut(table: dict[str, Any]) -> str | None:
    """llama.cpp's name for how a byte-level tokenizer cuts text; None if it has none."""
    before = table.get("pre_tokenizer") or {}
    steps = before.get("pretokenizers", [before])
    kinds = " ".join(step.get("type", "") for step in steps)
    pattern = steps[0].get("pattern", {}).get("Regex")
    cut = CUTS.get(pattern if kinds == "Split ByteLevel" else kinds)
    whole = bool(table["model"].get("ignore_merges")) == (cut in WHOLE_WORDS)
    return cut if whole and not steps[-1].get("add_prefix_space") else None


def _tokens(table: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    texts = [f"[PAD{n}]" for n in range(size)]
    kinds = [UNUSED] * size
    unknown = table["model"].get("unk_token")
    fallback = table["model"].get("byte_fallback")
    for text, n in table["model"]["vocab"].items():
        is_byte = fallback and len(text) == 6 and text.startswith("<0x")
        texts[n], kinds[n] = text, BYTE if is_byte else UNKNOWN if text == unknown else NORMAL
    for added in table.get("added_tokens", []):
        n = added["id"]
        if kinds[n] != UNKNOWN:
            texts[n], kinds[n] = added["content"], CONTROL if added["special"] else USER
    return texts, kinds
