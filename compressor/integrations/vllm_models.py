"""vLLM's models with structured layers; vLLM imports them when it first sees one of their names."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from blr.compressor.base.errors import CapabilityError
from blr.compressor.exporting.origin import EXPORTED
from blr.compressor.integrations.vllm_plugin import INSTEAD, ServedConfig


class ServedModel:
    """Mixin that gives a model's layers their structures ahead of its construction."""

    def __init__(self: Any, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if vllm_config.quant_config is not None:
            found = f"{vllm_config.model_config.model}: --quantization of a model of blr"
            raise CapabilityError(f"{found}; leave it out")
        table = vllm_config.model_config.hf_config.blr or {}
        if not table.keys().isdisjoint(EXPORTED):
            found = f"{vllm_config.model_config.model}: found an export of blr"
            raise CapabilityError(f"{found}, expected what `blr compress` writes; {INSTEAD}")
        layers = ServedConfig(table.get("layers", {}), type(self).packed_modules_mapping)
        self.quant_config = vllm_config.quant_config = layers
        native: Any = super()
        native.__init__(vllm_config=vllm_config, prefix=prefix)


class BlrLlamaForCausalLM(ServedModel, LlamaForCausalLM):
    """Llama."""


class BlrMistralForCausalLM(ServedModel, MistralForCausalLM):
    """Mistral."""


class BlrQwen2ForCausalLM(ServedModel, Qwen2ForCausalLM):
    """Qwen2."""


class BlrQwen3ForCausalLM(ServedModel, Qwen3ForCausalLM):
    """Qwen3."""
