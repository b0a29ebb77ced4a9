"""vLLM serves compressed checkpoints of some families by its own models.

A layer of theirs (one for q, k and v, one for gate and up) holds a part for every layer on disk. Written
against vLLM 0.32: its registry, `QuantizationConfig`, `LinearMethodBase`, parallel linear layers and
`load_weights`. Anything else goes through vLLM's Transformers backend."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from importlib import import_module
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from blr.compressor.base.errors import CapabilityError
from blr.compressor.exporting.origin import EXPORTED
from blr.compressor.integrations.vllm_experts import ServedExperts
from blr.compressor.integrations.vllm_parts import Share, make_part, pack, product, shares_input
from blr.compressor.structures.specs import Spec, spec_from_dict

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
MIXTURES = ("Mixtral", "Olmoe", "Qwen2Moe", "Qwen3Moe")
INSTEAD = "serve it with --model-impl transformers"


def register() -> None:
    from vllm import ModelRegistry

    from blr.compressor.modeling import register as register_configurations

    register_configurations()
    for family in (*FAMILIES, *MIXTURES):
        name = f"Blr{family}ForCausalLM"
        ModelRegistry.register_model(name, f"{__name__}:{name}")


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


@cache
def __getattr__(name: str) -> type:
    """vLLM's model of a family with structured layers, made when vLLM asks for its name."""
    family = name.removeprefix("Blr").removesuffix("ForCausalLM")
    if family not in (*FAMILIES, *MIXTURES):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = family.replace("Moe", "_moe").lower()
    native = getattr(import_module(f"vllm.model_executor.models.{module}"), name[3:])
    return type(name, (ServedModel, native), {"__module__": __name__})


class ServedConfig(QuantizationConfig):
    """Says how each layer computes: ``config.blr["layers"]``, and `packed_modules_mapping`."""

    def __init__(self, layers: dict[str, dict[str, object]], merged: dict[str, list[str]]) -> None:
        super().__init__()
        self.specs = {name: spec_from_dict(fields) for name, fields in layers.items()}
        # some mixtures name gate and up only as they are made
        self.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"], **merged}

    def get_name(self) -> str:
        return "blr"

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, dict[str, dict[str, object]]]) -> ServedConfig:
        return cls(config["layers"], {})

    def get_quant_method(self, layer: nn.Module, prefix: str) -> object:
        """Ours for a layer with a structured member. Raises CapabilityError for one that is neither a
        linear layer nor experts."""
        if isinstance(layer, LinearBase):
            parent, _, merged = prefix.rpartition(".")
            members = [f"{parent}.{name}" for name in self.packed_modules_mapping.get(merged, [merged])]
            if any(name in self.specs for name in members):
                return ServedMethod({name: self.specs.get(name) for name in members})
            return UnquantizedLinearMethod()
        if isinstance(layer, RoutedExperts):
            start = f"{prefix}."
            mine = {n.removeprefix(start): s for n, s in self.specs.items() if n.startswith(start)}
            return ServedExperts(layer, mine) if mine else None
        if prefix in self.specs:
            raise CapabilityError(f"{prefix}: found a structured {type(layer).__name__}; {INSTEAD}")
        return None


class ServedMethod(LinearMethodBase):
    """Computes one layer of vLLM. `members` are its layers on disk, in order; None is a dense one."""

    def __init__(self, members: dict[str, Spec | None]) -> None:
        self.members = members

    def create_weights(
        self,
        layer: LinearBase,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **_: object,
    ) -> None:
        """Give `layer` its parts. Sizes are those of this process, but `input_size`."""
        parts = []
        for (name, spec), width in zip(self.members.items(), output_partition_sizes, strict=True):
            outputs = spec.out_features if spec else width * layer.tp_size
            shape = (outputs, input_size)
            parts.append(make_part(name, spec, shape, _share(layer, outputs, width), params_dtype))
        layer.parts = nn.ModuleList(parts)
        layer.load_weights = partial(load_weights, layer)
        if any(part.in_rank_space for part in parts):
            # the sum is taken before U: the layer itself must not take it again
            layer.summed, layer.reduce_results = layer.reduce_results, False
            if not layer.summed:
                raise CapabilityError(
                    f"{layer.prefix}: found a layer that leaves its sum to others; {INSTEAD}"
                )

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Lay factors as the kernels read them. Raises ValueError where any is missing."""
        for part in layer.parts:
            if missing := set(part.names) - part.loaded:
                raise ValueError(f"{part.name}: no {', '.join(sorted(missing))} in the checkpoint")
        if shares_input(layer.parts):
            pack(layer.parts)
        elif next(chain(layer.parameters(), layer.buffers())).is_cuda and layer.tp_size == 1:
            for part in layer.parts:
                part.relayout_()

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = product(layer.parts, x, tensor_model_parallel_all_reduce)
        if getattr(layer, "summed", False) and not layer.skip_bias_add:
            bias = layer.bias  # rank 0 alone is given it, for the sum that is not taken
        return y if bias is None else y + bias


def load_weights(layer: LinearBase, weights: Iterable[tuple[str, Tensor]]) -> Iterable[str]:
    """Hand tensors of a checkpoint to the parts of a layer; their names, as vLLM asks for them."""
    for name, tensor in weights:
        shard = getattr(tensor, "shard_id", None)
        if name == "bias":
            given = (tensor,) if shard is None else (tensor, shard)
            layer.weight_loader(layer.bias, *given)
            yield name
        else:
            index = "qkv".index(shard) if isinstance(shard, str) else shard or 0
            layer.parts[index].load(name, tensor)
            yield f"parts.{index}.{layer.parts[index].path(name)}"


def _share(layer: LinearBase, outputs: int, width: int) -> Share:
    """The share of a layer here, `width` of `outputs`; several processes may hold one head."""
    if isinstance(layer, RowParallelLinear):
        return Share("in", layer.tp_rank, layer.tp_size)
    size = outputs // width
    return Share("out", layer.tp_rank * size // layer.tp_size, size)
