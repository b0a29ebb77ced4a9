"""Checkpoints that transformers loads though they are not what it saves: ODDITIES maps an id to one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pico import MODELS, MORE, save_model
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
GPT2_TABLE, LLAMA_TABLE = "transformer.wte.weight", "model.embed_tokens.weight"
BERT_TABLE, BERT_HEAD = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"


class Odd(NamedTuple):
    """The pico model that is saved, what is done to its tensors and to config.json (None removes a
    key), and what is told of it."""

    base: str
    edit: Callable[[Tensors], Any]
    config: dict[str, Any]
    told: str = ""


def under(new: str, old: str) -> Callable[[Tensors], Any]:
    """Stores the tensor `old` as `new`."""
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def own(name: str, table: str) -> Callable[[Tensors], Any]:
    """Stores `name` with values that the embedding has not."""
    return lambda tensors: tensors.update({name: tensors[table].flip(0) * 0.5})


def beside(*names: str, shape: tuple[int, ...] = (4, 4)) -> Callable[[Tensors], Any]:
    """Stores further tensors."""
    return lambda tensors: tensors.update({name: torch.ones(shape) for name in names})


def renamed(change: Callable[[str], str]) -> Callable[[Tensors], Any]:
    def edit(tensors: Tensors) -> None:
        changed = {change(name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(changed)

    return edit


def _mask(tensors: Tensors) -> None:
    for block in range(2):
        tensors[f"transformer.h.{block}.attn.masked_bias"] = torch.tensor(-1e4)
        tensors[f"transformer.h.{block}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)


def _bert_under_the_head(tensors: Tensors) -> None:
    under(BERT_HEAD, BERT_TABLE)(tensors)
    under("cls.predictions.decoder.bias", "cls.predictions.bias")(tensors)


def _t5_under_encoder_and_decoder(tensors: Tensors) -> None:
    table = tensors.pop("shared.weight")
    tensors |= {f"{part}.embed_tokens.weight": table.clone() for part in ("decoder", "encoder")}


def _as_block(prefix: str) -> Callable[[Tensors], Any]:
    """Stores the last block once more, and what predicts a further token from it."""

    def edit(tensors: Tensors) -> None:
        last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
        start = f"model.layers.{last}."
        for name in [name for name in tensors if name.startswith(start)]:
            tensors[name.replace(start, prefix)] = tensors[name].clone()
        beside(f"{prefix}eh_proj.weight")(tensors)

    return edit


_PLAIN = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
_HYBRID = {**_PLAIN, "linear_value_head_dim": 8, "head_dim": 8, "num_hidden_layers": 4}
_LEFT, _OWN, _NAMED = "left out, as transformers does: ", "with values of its own", "taken as "
_ANY: dict[str, Any] = {"architectures": None}


def _nothing(tensors: Tensors) -> None:
    pass


ODDITIES = {
    # tied weights that are stored under the head's name alone
    "head-llama": Odd("llama-tied", under("lm_head.weight", LLAMA_TABLE), {}),
    "head-gpt2": Odd("gpt2", under("lm_head.weight", GPT2_TABLE), {}),
    "head-bert": Odd("bert-mlm", _bert_under_the_head, {}),
    "head-t5": Odd("t5", under("lm_head.weight", "shared.weight"), {}),
    "tables-t5": Odd("t5", _t5_under_encoder_and_decoder, {}),
    "head-opt": Odd("opt", under("lm_head.weight", "model.decoder.embed_tokens.weight"), {}),
    # a head of its own beside a configuration that ties it
    "own-llama": Odd("llama-tied", own("lm_head.weight", LLAMA_TABLE), {}, _OWN),
    "own-gpt2": Odd("gpt2", own("lm_head.weight", GPT2_TABLE), {}, _OWN),
    "own-bert": Odd("bert-mlm", own(BERT_HEAD, BERT_TABLE), {}, _OWN),
    "own-t5": Odd("t5", own("lm_head.weight", "shared.weight"), {}, _OWN),
    # buffers of older releases
    "masks-gpt2": Odd("gpt2", _mask, {}, _LEFT),
    "rotations-llama": Odd(
        "llama", beside("model.layers.0.self_attn.rotary_emb.inv_freq", shape=(4,)), {}, _LEFT
    ),
    "positions-bert": Odd("bert-mlm", beside("bert.embeddings.position_ids", shape=(1, 64)), {}, _LEFT),
    # no place in the class
    "pretraining-bert": Odd(
        "bert-mlm", beside("cls.seq_relationship.weight", "bert.pooler.dense.weight"), {}, _LEFT
    ),
    "values-llama": Odd("llama", beside("v_head.summary.weight"), {}, _LEFT),
    "head-of-a-base": Odd("bert", beside("cls.predictions.bias", shape=(128,)), {}, _LEFT),
    # layers that predict further tokens
    "further-qwen3.5": Odd("qwen3_5", _as_block("mtp.layers.0."), {}, _LEFT),
    "further-glm4-moe": Odd("glm4_moe", _as_block("model.layers.46."), {}, _LEFT),
    "further-norm": Odd("qwen3_5", beside("mtp.norm.weight", shape=(32,)), {}, _LEFT),
    # no class named
    "unnamed-llama": Odd("llama", _nothing, _ANY, _NAMED + "LlamaForCausalLM"),
    "unnamed-gpt2": Odd("gpt2", _nothing, _ANY, _NAMED + "GPT2LMHeadModel"),
    "unnamed-bert": Odd("bert", _nothing, _ANY, _NAMED + "BertModel"),
    "unnamed-masks": Odd("bert-mlm", _nothing, _ANY, _NAMED + "BertForMaskedLM"),
    "unnamed-t5": Odd("t5", _nothing, _ANY, _NAMED + "T5ForConditionalGeneration"),
    "unnamed-vit": Odd("vit", _nothing, _ANY, _NAMED + "ViTForImageClassification"),
    # other names of the same
    "bare-gpt2": Odd("gpt2", renamed(lambda name: name.removeprefix("transformer.")), {}),
    "gamma-bert": Odd(
        "bert-mlm",
        renamed(
            lambda name: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                "LayerNorm.bias", "LayerNorm.beta"
            )
        ),
        {},
    ),
    "prefixed-bert": Odd("bert", renamed(lambda name: f"bert.{name}"), {}),
}
_MORE = {
    "qwen3_5": ("Qwen3_5TextConfig", {**MORE["qwen3-moe"][1], **_HYBRID}, "Qwen3_5ForCausalLM"),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **{**MORE["qwen3-moe"][1], "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8},
            **{"num_key_value_heads": 1, "moe_intermediate_size": 8, "num_experts_per_tok": 1},
            **{"n_routed_experts": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
            **{"num_hidden_layers": 46, "num_nextn_predict_layers": 1, "intermediate_size": 16},
        },
        "Glm4MoeForCausalLM",
    ),
}


def save_odd(name: str, folder: Path) -> Path:
    """Save the odd checkpoint `name` into `folder`."""
    odd = ODDITIES[name]
    save_model(*{**MODELS, **MORE, **_MORE}[odd.base], folder)
    tensors = load_file(folder / "model.safetensors")
    odd.edit(tensors)
    stored = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **odd.config}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def class_of(name: str) -> str:
    """The class that an odd checkpoint is of."""
    return {**MODELS, **MORE, **_MORE}[ODDITIES[name].base][2]
