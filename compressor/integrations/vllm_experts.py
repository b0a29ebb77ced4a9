"""The experts of a mixture in vLLM: the layers that a checkpoint has, in place of vLLM's two stacks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts

from blr.compressor.base.errors import CapabilityError
from blr.compressor.integrations.vllm_parts import load_experts, make_experts
from blr.compressor.modeling.float8 import prepare_float8
from blr.compressor.modeling.layers import prepare_layers
from blr.compressor.modeling.modeling_blr import PREFIX
from blr.compressor.structures.specs import Spec


class ServedExperts(FusedMoEMethodBase):
    """Computes the experts of one block, whose structured layers are `specs` ("gate_proj.3")."""

    def __init__(self, layer: RoutedExperts, specs: Mapping[str, Spec]) -> None:
        super().__init__(layer.moe_config)
        self.specs = specs

    def create_weights(self, layer: RoutedExperts, *_: object, **options: Any) -> None:
        """Give `layer` its experts. Raises CapabilityError for several processes."""
        split = self.moe.moe_parallel_config
        if (count := max(split.tp_size, split.ep_size, split.dp_size)) > 1:
            found = f"{layer.layer_name}: compressed experts over {count} processes"
            raise CapabilityError(f"{found}, expected one; serve it in one process")
        gate_up = [layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name]
        stacks = {"gate_up_proj": gate_up, "down_proj": [layer.ckpt_down_proj_name]}
        layer.parts = make_experts(native_experts(options["params_dtype"]), stacks, self.specs)
        layer.loaded, layer.load_weights = set(), partial(load_weights, layer)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        return None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Lay factors as the kernels read them. Raises ValueError where any is missing."""
        if missing := layer.parts.state_dict().keys() - layer.loaded:
            lacks = f"the checkpoint lacks {', '.join(sorted(missing))}"
            raise ValueError(f"{layer.layer_name}: {lacks}; copy or compress it again")
        prepare_layers(layer.parts)
        prepare_float8(layer.parts)

    def apply(
        self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, **_: object
    ) -> Tensor:
        """The outputs [n, h] of tokens x [n, h] by their k experts and weights [n, k]."""
        found: Tensor = layer.parts(x, topk_ids.long(), topk_weights)
        return found


def native_experts(dtype: torch.dtype) -> nn.Module:
    """transformers' experts of a block of the model that is being made, on the meta device."""
    config = get_current_vllm_config().model_config.hf_config
    name = config.architectures[0].removeprefix(PREFIX)
    module = sys.modules[getattr(transformers, name).__module__]
    kind = getattr(module, name.replace("ForCausalLM", "Experts"))
    with torch.device("meta"):
        made: nn.Module = kind(config).to(dtype)
    return made


def load_weights(layer: RoutedExperts, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
    """Take the tensors of a checkpoint. Gives the names of those taken, which vLLM counts."""
    for name in load_experts(layer.parts, weights):
        layer.loaded.add(name)
        yield f"parts.{name}"
