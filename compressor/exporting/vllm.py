"""Plans folders for vLLM (`--as vllm`): compressed-tensors, and corrections as an adapter of peft.

A weight in few bits becomes `weight_packed`, `weight_scale` and `weight_shape` in the format
pack-quantized, symmetric and in groups, with the values that it had. vLLM's grids hold integers only.
So levels of int2, which are half-integers, are doubled, their scales halved, and 3 bits hold them.
"""

import re
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.base.errors import UsageError
from blr.compressor.checkpoint.header import TORCH_NAMES
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.engines import (
    CURVED,
    Engine,
    adapter_factor,
    begun,
    correction_of,
    integers_of,
    levels_of,
    pack,
    planned,
    rank_of,
    scale_entry,
)
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.exporting.plan import ExportPlan
from blr.compressor.exporting.tensors import STORED, Tensors
from blr.compressor.loading.native import meta_model, quiet_transformers
from blr.compressor.modeling.modeling_blr import module_names
from blr.compressor.output.files import json_file
from blr.compressor.structures.specs import Spec

BITS = {8: 8, 4: 4, 3: 3, 2: 3}  # of our formats to those of the integers that hold their values
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank of vLLM 0.33 takes
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # one layer each in vLLM
ADAPTER, SERVED = "adapter", "corrected"  # the folder of the corrections, and the model that has them
CONFIG, WEIGHTS = f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapter_model.safetensors"


def engine() -> Engine:
    """vLLM by compressed-tensors, which transformers loads, too."""
    packages = ("compressed-tensors", "peft")
    adapter = f"`{ADAPTER}`, which a server has as the model `{SERVED}`,"
    plugin = ", or serve the checkpoint itself by the plugin of blr-compress"
    return Engine("vllm", "vLLM", packages, refusal, kind, adapter, plan, load, commands, plugin)


def kind(spec: Spec) -> str:
    """What a layer is stored as."""
    return "int{} in groups of {} of compressed-tensors".format(*scheme(spec))


def refusal(spec: Spec) -> str:
    """Why vLLM has no exact form of a weight in few bits, or its correction; "" if it has one."""
    base, correction = integers_of(spec), correction_of(spec)
    if base.bits == 3 and base.curved:
        return CURVED
    if base.in_features % base.group:
        return f"{base.in_features} inputs are no whole groups of {base.group}; take a smaller --group"
    if correction is not None and rank_of(correction) > RANKS[-1]:
        return f"an adapter of rank {rank_of(correction)}, over {RANKS[-1]}"
    return ""


def plan(checkpoint: Checkpoint, rest: Mapping[str, Spec], options: ExportOptions) -> ExportPlan:
    """Plan the folder with the layers `rest` dense. Raises UsageError for layers that vLLM fuses and
    that are stored differently; InputError for tensors that would not load."""
    kept, config, tensors = begun(checkpoint, rest, options)
    _check_fused(kept)
    adapter = Tensors([], tensors.make)
    for module, spec in kept.specs.items():
        _add_packed(tensors, kept.source, module, spec, options.dtype)
        _add_adapter(adapter, kept.source, module, spec, options.dtype)
    return planned(
        engine(),
        checkpoint,
        rest,
        options,
        {CONFIG: json_file(adapter_config(kept))} if adapter.slots else {},
        config={**config, "quantization_config": quantization(kept)},
        tensors=tensors,
        beside={WEIGHTS: adapter.slots} if adapter.slots else {},
        told=_told(kept),
    )


def _check_fused(kept: Checkpoint) -> None:
    """Raise UsageError where vLLM makes one layer of several that are not stored alike."""
    for module in kept.specs:
        block, _, name = module.rpartition(".")
        for names in (names for names in FUSED if name in names):
            others = {n: kept.specs.get(f"{block}.{n}") for n in names}
            schemes = {n: None if spec is None else scheme(spec) for n, spec in others.items()}
            differing = next((n for n in names if schemes[n] != schemes[name]), None)
            if differing is not None:
                raise UsageError(
                    f"--as vllm: vLLM makes one layer of {', '.join(names)} in {block}, and {name} and "
                    f"{differing} are stored differently; compress them in the same bits and groups"
                )


def scheme(spec: Spec) -> tuple[int, int]:
    """Bits and group of the integers that a layer is written in."""
    base = integers_of(spec)
    return BITS[base.bits], base.group


def _told(kept: Checkpoint) -> tuple[str, ...]:
    wider = sum(integers_of(spec).bits == 2 for spec in kept.specs.values())
    said = f"{wider} layers in int2 are written in 3 bits: vLLM's 2 bits have no half-integers"
    return (said,) if wider else ()


def _add_packed(tensors: Tensors, source: Source, module: str, spec: Spec, dtype: str | None) -> None:
    """Add the weight of a layer in few bits, as compressed-tensors names and packs it."""
    (bits, group), shape = scheme(spec), (spec.out_features, spec.in_features)
    words, groups = -(-shape[1] * bits // 32), shape[1] // group
    stored = STORED[dtype] if dtype else scale_entry(source, module, spec).dtype
    for name, kind, size in (
        ("shape", "I64", (2,)),
        ("packed", "I32", (shape[0], words)),
        ("scale", stored, (shape[0], groups)),
    ):
        make = partial(_packed_part, source, module, spec, name, TORCH_NAMES[stored])
        tensors.add_made(f"{module}.weight_{name}", kind, size, source.shards[0], make)


def _packed_part(source: Source, module: str, spec: Spec, name: str, dtype: str) -> Tensor:
    """One stored tensor of a weight in few bits."""
    if name == "shape":
        return torch.tensor([spec.out_features, spec.in_features])
    levels, scale = levels_of(source, module, spec)
    doubled = integers_of(spec).bits == 2
    if name == "scale":
        return (scale / 2 if doubled else scale).to(getattr(torch, dtype))
    return pack(2 * levels + 1 if doubled else levels, scheme(spec)[0])


def _add_adapter(tensors: Tensors, source: Source, module: str, spec: Spec, dtype: str | None) -> None:
    """Add the factors of a correction, as peft names them; nothing for a layer without one."""
    if (correction := correction_of(spec)) is None:
        return
    rank = rank_of(correction)
    stored = STORED[dtype] if dtype else scale_entry(source, module, spec).dtype
    for factor, part, shape in (
        ("V", "lora_A", (rank, spec.in_features)),
        ("U", "lora_B", (spec.out_features, rank)),
    ):
        make = partial(adapter_factor, source, module, spec, factor, TORCH_NAMES[stored])
        name = f"base_model.model.{module}.{part}.weight"
        tensors.add_made(name, stored, shape, source.shards[0], make)


def quantization(kept: Checkpoint) -> dict[str, object]:
    """`quantization_config` of config.json: a group of layers for each of the schemes. Names may follow
    others, as vLLM's `draft_model.` before those of a draft."""
    model = meta_model(kept.source)
    names = module_names(model, kept.specs)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    groups: dict[tuple[int, int], list[str]] = {}
    for module, spec in kept.specs.items():
        groups.setdefault(scheme(spec), []).append(_named(names[module]))
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{n}": {"targets": targets, "weights": _arguments(*each)}
            for n, (each, targets) in enumerate(groups.items())
        },
        "ignore": [_named(name) for name in linear if name not in names.values()],
    }


def _named(name: str) -> str:
    """The pattern of compressed-tensors for a module, whatever is before its name."""
    return rf"re:(.*\.)?{re.escape(name)}$"


def _arguments(bits: int, group: int) -> dict[str, object]:
    return {
        **{"num_bits": bits, "type": "int", "symmetric": True},
        **{"strategy": "group", "group_size": group, "dynamic": False},
    }


def adapter_config(kept: Checkpoint) -> dict[str, object]:
    """The configuration of the corrections for peft. Each is as large as its rank says: alpha is the
    rank, so nothing scales them."""
    corrections = {module: correction_of(spec) for module, spec in kept.specs.items()}
    ranks = {module: rank_of(spec) for module, spec in corrections.items() if spec is not None}
    most = max(ranks.values())
    smaller = {module: rank for module, rank in ranks.items() if rank != most}
    return {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": None},
        **{"inference_mode": True, "bias": "none", "r": most, "lora_alpha": most},
        **{"rank_pattern": smaller, "alpha_pattern": smaller, "target_modules": sorted(ranks)},
    }


def load(folder: Path, dtype: object = "auto") -> Any:
    """The model in a written folder, by transformers and peft alone."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    unpacked = CompressedTensorsConfig(run_compressed=False)  # peft asks layers for their weight
    with quiet_transformers(), warnings.catch_warnings(action="ignore"):
        how = {"dtype": dtype, "quantization_config": unpacked, "local_files_only": True}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **how)
        if (folder / CONFIG).is_file():
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, folder / ADAPTER)
    return model.eval()


def commands(folder: str, made: ExportPlan) -> list[str]:
    """The command that serves a folder."""
    corrections = [correction_of(spec) for spec in made.checkpoint.specs.values()]
    ranks = [rank_of(spec) for spec in corrections if spec is not None]
    serve = f"vllm serve {quote(folder)}"
    if ranks:
        room = next(rank for rank in RANKS if rank >= max(ranks))
        serve += f" --enable-lora --lora-modules {SERVED}={quote(f'{folder}/{ADAPTER}')}"
        serve += f" --max-lora-rank {room}"
    return [serve]
