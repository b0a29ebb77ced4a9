"""Plans folders for vLLM (`--as vllm`): compressed-tensors, and corrections as an adapter of peft. A
weight in few bits becomes `weight_packed`, `weight_scale` and `weight_shape` in the format
pack-quantized, symmetric and in groups, with the values that it had. vLLM's grids hold integers only.
So levels of int2, which are half-integers, are doubled, their scales halved, and 3 bits hold them.
Experts are written one by one, in 8 and 4 bits: vLLM has kernels of experts for no others."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.header import TORCH_NAMES
from blr.compressor.exporting.engines import CURVED, Engine, FewBits, layers_of, pack
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.exporting.plan import ExportPlan
from blr.compressor.exporting.tensors import Tensors
from blr.compressor.loading.native import meta_model, quiet_transformers
from blr.compressor.modeling.modeling_blr import module_names
from blr.compressor.output.files import json_file

BITS = {8: 8, 4: 4, 3: 3, 2: 3}  # of our formats to those of the integers that hold their values
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank of vLLM 0.33 takes
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # one layer each in vLLM
EXPERTS = ("mixtral", "olmoe", "qwen2_moe", "qwen3_moe")  # whose experts are of one scheme a block
PARTS = 3  # gate, up and down of an expert
ADAPTER, SERVED = "adapter", "corrected"  # the folder of the corrections, and the model that has them
CONFIG, WEIGHTS = f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors"


def engine() -> Engine:
    """vLLM by compressed-tensors, which transformers loads, too."""
    packages = ("compressed-tensors", "peft")
    adapter = f"`{ADAPTER}`, which a server has as the model `{SERVED}`,"
    plugin = ", or serve the checkpoint itself by the plugin of blr-compress"
    served = "vllm", "vLLM", packages, refusal, kind, adapter, plan, load, commands, plugin
    return Engine(*served, experts=EXPERTS)


def kind(layer: FewBits) -> str:
    """What a layer is stored as."""
    return "int{} in groups of {} of compressed-tensors".format(*scheme(layer))


def refusal(layer: FewBits) -> str:
    """Why vLLM has no exact form of a weight in few bits, or its correction; "" if it has one."""
    base = layer.base
    if layer.expert and (layer.correction is not None or base.bits not in (8, 4)):
        return "vLLM takes experts in int8 and int4, without corrections"
    if base.bits == 3 and base.curved:
        return CURVED
    if base.in_features % base.group:
        return f"{base.in_features} inputs are no whole groups of {base.group}; take a smaller --group"
    return f"an adapter of rank {layer.rank}, over {RANKS[-1]}" if layer.rank > RANKS[-1] else ""


def plan(begun: ExportPlan, options: ExportOptions) -> ExportPlan:
    """The whole plan. Raises UsageError for layers that vLLM fuses and that are stored differently."""
    layers, tensors = layers_of(begun.checkpoint), begun.tensors
    _check_fused(layers)
    _check_experts(layers)
    corrected = [layer for layer in layers if layer.rank]
    adapter = Tensors(tensors.source, make=tensors.make)
    for layer in layers:
        _add_packed(tensors, layer, begun.names[layer.module], options.dtype)
    for layer in corrected:
        _add_adapter(adapter, layer, options.dtype)
    return replace(
        begun,
        more={CONFIG: json_file(adapter_config(corrected))} if corrected else {},
        config={**begun.config, "quantization_config": quantization(layers)},
        beside={WEIGHTS: adapter.slots} if corrected else {},
        told=_told(layers),
    )


def _check_fused(layers: Sequence[FewBits]) -> None:
    """Raise UsageError where vLLM makes one layer of several that are not stored alike."""
    schemes = {layer.module: scheme(layer) for layer in layers}
    for module, own in schemes.items():
        block, _, name = module.rpartition(".")
        for names in (names for names in FUSED if name in names):
            differing = next((n for n in names if schemes.get(f"{block}.{n}") != own), None)
            if differing is not None:
                raise UsageError(
                    f"--as vllm: vLLM makes one layer of {', '.join(names)} in {block}, and {name} and "
                    f"{differing} are stored differently; compress them in the same bits and groups"
                )


def _check_experts(layers: Sequence[FewBits]) -> None:
    """Raise UsageError where a mixture has more schemes than readers know: vLLM makes one layer of the
    experts of a block, and transformers takes one scheme for all experts and one for all else."""
    experts = [layer for layer in layers if layer.expert]
    parts = {(layer.expert, layer.module.split(".")[-2]) for layer in experts}
    others = {scheme(layer) for layer in layers if not layer.expert}
    whole = len(parts) == PARTS * len({block for block, _ in parts})
    if experts and (not whole or len(set(map(scheme, experts))) > 1 or len(others) > 1):
        raise UsageError(
            f"--as vllm: layers of {experts[0].expert} or beside it are stored differently, or dense; "
            "compress all layers of an expert alike, and all other layers alike"
        )


def scheme(layer: FewBits) -> tuple[int, int]:
    """Bits and group of the integers that a layer is written in."""
    return BITS[layer.base.bits], layer.base.group


def _told(layers: Sequence[FewBits]) -> tuple[str, ...]:
    wider = sum(layer.base.bits == 2 for layer in layers)
    said = f"{wider} layers in int2 are written in 3 bits: vLLM's 2 bits have no half-integers"
    return (said,) if wider else ()


def _add_packed(tensors: Tensors, layer: FewBits, name: str, dtype: str | None) -> None:
    (bits, group), stored = scheme(layer), layer.stored(dtype)
    o, i = layer.spec.out_features, layer.spec.in_features
    for part, kind, size in (
        ("shape", "I64", (2,)),
        ("packed", "I32", (o, -(-i * bits // 32))),
        ("scale", stored, (o, i // group)),
    ):
        make = partial(_packed_part, layer, part, TORCH_NAMES[stored])
        tensors.add_made(f"{name}.weight_{part}", kind, size, make)


def _packed_part(layer: FewBits, name: str, dtype: str) -> Tensor:
    """One stored tensor of a weight in few bits."""
    if name == "shape":
        return torch.tensor([layer.spec.out_features, layer.spec.in_features])
    doubled, (levels, scale) = layer.base.bits == 2, layer.levels()
    if name == "scale":
        return (scale / 2 if doubled else scale).to(getattr(torch, dtype))
    return pack(2 * levels + 1 if doubled else levels, scheme(layer)[0])


def _add_adapter(tensors: Tensors, layer: FewBits, dtype: str | None) -> None:
    """Add the factors of a correction, as peft names them."""
    spec, stored = layer.spec, layer.stored(dtype)
    for factor, part, shape in (
        ("V", "lora_A", (layer.rank, spec.in_features)),
        ("U", "lora_B", (spec.out_features, layer.rank)),
    ):
        make = partial(layer.factor, factor, TORCH_NAMES[stored])
        name = f"base_model.model.{layer.module}.{part}.weight"
        tensors.add_made(name, stored, shape, make)


def quantization(layers: Sequence[FewBits]) -> dict[str, object]:
    """`quantization_config` of config.json: a group of layers for each of the schemes. Names may follow
    others, as vLLM's `draft_model.` before those of a draft."""
    model = meta_model(layers[0].source)
    names = module_names(model, [layer.module for layer in layers])
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    groups: dict[tuple[int, int], dict[str, None]] = {}  # patterns in order
    for layer in layers:
        pattern = _named(layer.expert, r"\.\d+\.\w+") if layer.expert else _named(names[layer.module])
        groups.setdefault(scheme(layer), {})[pattern] = None
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{n}": {"targets": list(targets), "weights": _arguments(*each)}
            for n, (each, targets) in enumerate(groups.items())
        },
        "ignore": [_named(name) for name in linear if name not in names.values()],
    }


def _named(name: str, inside: str = "") -> str:
    """The pattern of compressed-tensors for a module, or those `inside`, whatever is before its name."""
    return rf"re:(.*\.)?{re.escape(name)}{inside}$"


def _arguments(bits: int, group: int) -> dict[str, object]:
    return {
        **{"num_bits": bits, "type": "int", "symmetric": True},
        **{"strategy": "group", "group_size": group, "dynamic": False},
    }


def adapter_config(corrected: Sequence[FewBits]) -> dict[str, object]:
    """The configuration of the corrections for peft: alpha is the rank, so nothing scales them."""
    ranks = {layer.module: layer.rank for layer in corrected}
    most = max(ranks.values())
    smaller = {module: rank for module, rank in ranks.items() if rank != most}
    return {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None},
        **{"inference_mode": True, "bias": "none", "r": most, "lora_alpha": most},
        **{"rank_pattern": smaller, "alpha_pattern": smaller, "target_modules": sorted(ranks)},
    }


def load(folder: Path, dtype: object = "auto") -> PreTrainedModel:
    """The model in a written folder, by transformers and peft alone."""
    from transformers import AutoConfig, AutoModelForCausalLM, CompressedTensorsConfig

    stacked = AutoConfig.from_pretrained(folder, local_files_only=True).model_type in EXPERTS
    unpacked = CompressedTensorsConfig(run_compressed=False)  # peft asks layers for their weight
    unpacked = CompressedTensorsConfig(dequantize=True) if stacked else unpacked
    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        how = {"dtype": dtype, "quantization_config": unpacked, "local_files_only": True}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **how)
        if (folder / CONFIG).is_file():
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, folder / ADAPTER)
    return model.eval()


def commands(folder: str, made: ExportPlan) -> list[str]:
    """The command that serves a folder."""
    serve = f"vllm serve {quote(folder)}"
    if most := max(layer.rank for layer in layers_of(made.checkpoint)):
        room = next(rank for rank in RANKS if rank >= most)
        serve += f" --enable-lora --lora-modules {SERVED}={quote(f'{folder}/{ADAPTER}')}"
        serve += f" --max-lora-rank {room}"
    return [serve]
