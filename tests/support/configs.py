"""config.json of the models that recipes are shipped for: sizes only, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def _decoder(kind: str, width: int, inner: int, heads: int, kv: int, layers: int, **more: int) -> Any:
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
        **more,
    }


def _encoder(kind: str, width: int, inner: int, heads: int, layers: int) -> Any:
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "llama-7b": _decoder("llama", 4096, 11008, 32, 32, 32),
    "llama-3.2-1b": _decoder("llama", 2048, 8192, 32, 8, 16, head_dim=64),
    "llama-3.1-8b": _decoder("llama", 4096, 14336, 32, 8, 32),
    "llama-3.1-70b": _decoder("llama", 8192, 28672, 64, 8, 80),
    "gqa": _decoder("llama", 4096, 14336, 32, 8, 32),
    "mistral-7b": _decoder("mistral", 4096, 14336, 32, 8, 32),
    "qwen2-7b": _decoder("qwen2", 3584, 18944, 28, 4, 28),
    "qwen3-8b": _decoder("qwen3", 4096, 12288, 32, 8, 36, head_dim=128),
    "gpt2": {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_inner": None},
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_head": 16, "n_layer": 24},
    "bert-base": _encoder("bert", 768, 3072, 12, 12),
    "roberta-base": _encoder("roberta", 768, 3072, 12, 12),
    "minilm": _encoder("bert", 384, 1536, 12, 6),
    "vit-b": _encoder("vit", 768, 3072, 12, 12),
    "vit-s": _encoder("vit", 384, 1536, 6, 12),
    "dit-xl-2": {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": 16,
        "attention_head_dim": 72,
        "num_layers": 28,
    },
}


LARGE = {  # with what forecasts of memory and speed ask for, too
    **CONFIGS["llama-3.1-8b"],
    **{"architectures": ["LlamaForCausalLM"], "head_dim": 128},
    **{"vocab_size": 128256, "tie_word_embeddings": False},
}


SMOL = {  # SmolLM2-135M
    **_decoder("llama", 576, 1536, 9, 3, 30, vocab_size=49152, max_position_embeddings=8192),
    **{"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True},
}
BILLION = {
    **CONFIGS["llama-3.2-1b"],
    **{"architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "tie_word_embeddings": True},
}


def model_of(recipe: str) -> str:
    """The model that a shipped recipe's name begins with."""
    return max((name for name in CONFIGS if recipe.startswith(f"{name}-")), key=len)


def save_config(model: str, folder: Path) -> Path:
    """Write the config.json of `model` and nothing else into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]))
    return folder
