"""Pico models: every family, randomly initialized, small enough to compress in a moment."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 128
_LLAMA = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_BERT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_VIT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}

# id -> (configuration class, its settings, model class)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("LlamaConfig", {**_LLAMA, "tie_word_embeddings": False}, "LlamaForCausalLM"),
    "llama-tied": ("LlamaConfig", {**_LLAMA, "tie_word_embeddings": True}, "LlamaForCausalLM"),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": 16}, "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", _LLAMA, "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", {**_LLAMA, "head_dim": 16}, "Qwen3ForCausalLM"),
    "gpt2": ("GPT2Config", _GPT2, "GPT2LMHeadModel"),
    "bert": ("BertConfig", _BERT, "BertModel"),
    "bert-mlm": ("BertConfig", _BERT, "BertForMaskedLM"),
    "roberta": ("RobertaConfig", {**_BERT, "pad_token_id": 1}, "RobertaForMaskedLM"),
    "vit": ("ViTConfig", _VIT, "ViTForImageClassification"),
    "opt": (
        "OPTConfig",
        {
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "pad_token_id": 1,
        },
        "OPTForCausalLM",
    ),
}

_T5 = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_DISTILBERT = {
    "vocab_size": VOCAB,
    "dim": 32,
    "hidden_dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 64,
}
_GEMMA = {**_LLAMA, "head_dim": 16, "sliding_window": 16, "query_pre_attn_scalar": 16}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "tie_word_embeddings": False}
_SHARED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1}
_SHARED |= {"n_group": 1, "topk_group": 1}
_INNER_RANKS = {
    **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "num_key_value_heads": 4},
}

# Families beyond those above: most tests need one of a kind
MORE: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma2": ("Gemma2Config", {**_GEMMA, "final_logit_softcapping": 0.5}, "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", _GEMMA, "Gemma3ForCausalLM"),
    "phi3": ("Phi3Config", {**_LLAMA, "tie_word_embeddings": False}, "Phi3ForCausalLM"),
    "distilbert": ("DistilBertConfig", _DISTILBERT, "DistilBertForSequenceClassification"),
    "xlm-roberta": (
        "XLMRobertaConfig",
        {**_BERT, "pad_token_id": 1},
        "XLMRobertaForSequenceClassification",
    ),
    "t5": ("T5Config", _T5, "T5ForConditionalGeneration"),
    # one that has no table in configs/
    "electra": ("ElectraConfig", _BERT, "ElectraForSequenceClassification"),
    # whose keys are normed before they are heads
    "olmo2": ("Olmo2Config", _LLAMA, "Olmo2ForCausalLM"),
    # what is inside these is made by AutoModel
    "qwen2-classes": ("Qwen2Config", {**_LLAMA, "num_labels": 3}, "Qwen2ForSequenceClassification"),
    "llama-answers": ("LlamaConfig", {**_LLAMA, "attention_bias": True}, "LlamaForQuestionAnswering"),
    "mixtral": ("MixtralConfig", {**_LLAMA, **_EXPERTS, "num_local_experts": 4}, "MixtralForCausalLM"),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {**_LLAMA, **_EXPERTS, "head_dim": 16, "num_experts": 4},
        "Qwen3MoeForCausalLM",
    ),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**_LLAMA, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
        "Qwen2MoeForCausalLM",
    ),
    "olmoe": ("OlmoeConfig", {**_LLAMA, **_EXPERTS, "num_experts": 4}, "OlmoeForCausalLM"),
    # one stack of experts, transposed and with biases
    "gpt-oss": (
        "GptOssConfig",
        {**_LLAMA, **_EXPERTS, "num_local_experts": 4, "head_dim": 16, "sliding_window": 16},
        "GptOssForCausalLM",
    ),
    "deepseek-v3": (
        "DeepseekV3Config",
        {**_LLAMA, **_SHARED, **_INNER_RANKS},
        "DeepseekV3ForCausalLM",
    ),
    "glm4-moe": ("Glm4MoeConfig", {**_LLAMA, **_SHARED, "head_dim": 16}, "Glm4MoeForCausalLM"),
    "granite-moe": (
        "GraniteMoeConfig",
        {**_LLAMA, **_EXPERTS, "num_local_experts": 4},
        "GraniteMoeForCausalLM",
    ),
}


def save_pico(name: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    """Save the pico model `name` (random weights of visible size, biases too) into `folder`."""
    config_name, settings, model_name = {**MODELS, **MORE}[name]
    save_model(config_name, settings, model_name, folder, dtype=dtype)
    return folder


def save_model(
    config_name: str,
    settings: dict[str, Any],
    model_name: str,
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Save a model of any class as `save_pico` does."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.to(dtype).save_pretrained(folder)


def save_rank_deficient(folder: Path, alive: int = 8) -> Path:
    """Save a pico GPT-2 whose units behind GELU are dead, one half, or copies of `alive` others.

    The second moments of what enters `mlp.c_proj` are singular then, as in real models of this type.
    """
    save_pico("gpt2", folder)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    with torch.no_grad():
        for block in model.transformer.h:
            weight, bias = block.mlp.c_fc.weight, block.mlp.c_fc.bias  # [d, units], [units]
            half = len(bias) // 2
            bias[:half] = -100.0  # GELU is zero there, exactly
            weight[:, half:] = weight[:, :alive].repeat(1, half // alive)
            bias[half:] = bias[half : half + alive].repeat(half // alive)
    model.save_pretrained(folder)
    return folder


def inputs_for(model: Any) -> dict[str, torch.Tensor]:
    """A batch that the model accepts."""
    torch.manual_seed(1)
    if hasattr(model.config, "image_size"):
        return {"pixel_values": torch.randn(2, 3, 32, 32, dtype=model.dtype)}
    return {"input_ids": torch.randint(2, VOCAB, (2, 24))}


SEEING = ("gemma3", "qwen3_5", "mistral3", "llava", "qwen3_vl")  # types of models of text and images


def save_seeing(model_type: str, folder: Path, vocabulary: int = VOCAB) -> Path:
    """Save a pico model of text and images of `model_type`, with random weights, into `folder`."""
    known = transformers.CONFIG_MAPPING[model_type]()
    text = {
        **{
            **_LLAMA,
            "vocab_size": vocabulary,
            "num_hidden_layers": 4,
            "head_dim": 8,
            "sliding_window": 8,
        },
        **{"full_attention_interval": 2, "layer_types": None, "linear_num_key_heads": 2},
        **{"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    }
    images = {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
        **{"image_size": 28, "patch_size": 14, "num_heads": 2, "depth": 2, "out_hidden_size": 32},
        **{"head_dim": 16},
    }
    parts = {
        "text_config": small(known.text_config, text).to_dict(),
        "vision_config": small(known.vision_config, images).to_dict(),
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(type(known)(**parts))
    model.save_pretrained(folder)
    return folder


def small(config: Any, settings: dict[str, Any]) -> Any:
    """A configuration of the kind of `config` with those of `settings` that it has."""
    kind = type(config)
    fixed = {name for name in settings if isinstance(getattr(kind, name, None), property)}
    return kind(**{k: v for k, v in settings.items() if hasattr(config, k) and k not in fixed})


def with_tokenizer(folder: Path, source: Path) -> Path:
    """`folder` with the tokenizer of another."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, folder)
    return folder
