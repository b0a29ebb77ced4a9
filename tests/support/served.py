"""Models that vLLM serves in tests, and the prompt that they get."""

from __future__ import annotations

PROMPT = [5, 17, 90, 33, 64, 8, 101, 77, 21, 50]
SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODELS = {
    "llama": ("LlamaConfig", {**SIZES, "attention_bias": True}, "LlamaForCausalLM"),
    "mistral": ("MistralConfig", {**SIZES, "sliding_window": None}, "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", SIZES, "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", SIZES, "Qwen3ForCausalLM"),
}
_EXPERTS = {**SIZES, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_experts": 4}
MIXTURES = {
    "mixtral": ("MixtralConfig", {**_EXPERTS, "num_local_experts": 4}, "MixtralForCausalLM"),
    "olmoe": ("OlmoeConfig", _EXPERTS, "OlmoeForCausalLM"),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {**_EXPERTS, "shared_expert_intermediate_size": 64},
        "Qwen2MoeForCausalLM",
    ),
    "qwen3-moe": ("Qwen3MoeConfig", _EXPERTS, "Qwen3MoeForCausalLM"),
}
