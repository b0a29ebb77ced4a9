"""Plans folders for MLX (`--as mlx`): packed weights, and corrections as an adapter of mlx-lm. MLX
computes a weight as ``scale · code + bias``, in groups of 32, 64 or 128. The codes of a row are packed
without gaps, the lowest bit first. A bias is the scale times a power of two, exactly. That of int2,
whose levels are half-integers, is −1.5 scales. In bfloat16 it is rounded; float16 holds −1.5 times any
scale of bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from blr.compressor.checkpoint.header import TORCH_NAMES
from blr.compressor.exporting.engines import (
    Engine,
    FewBits,
    ForeignModel,
    blocks_refusal,
    check_decoder,
    finest,
    layers_of,
    pack,
    window_told,
)
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.exporting.plan import ExportPlan
from blr.compressor.exporting.tensors import Tensors
from blr.compressor.output.files import json_file
from blr.kernels.decode.quantized.formats import grid_of

ADAPTER = "adapters"
CONFIG, WEIGHTS = f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapters.safetensors"


def engine() -> Engine:
    """MLX by mlx-lm."""
    how = blocks_refusal, kind, f"The adapter `{ADAPTER}`", plan, load, commands
    return Engine("mlx", "MLX", ("mlx-lm",), *how)


def kind(layer: FewBits) -> str:
    """What a layer is stored as."""
    return f"int{layer.base.bits} in groups of {group_of(layer)} of MLX"


def group_of(layer: FewBits) -> int:
    """How many numbers share a scale in MLX."""
    return finest(layer.base.group, layer.base.in_features)


def plan(begun: ExportPlan, options: ExportOptions) -> ExportPlan:
    """The whole plan. Raises CapabilityError for models that mlx-lm computes otherwise."""
    layers, config, tensors = layers_of(begun.checkpoint), begun.config, begun.tensors
    native = check_decoder(begun.checkpoint.source, engine())
    corrected = [layer for layer in layers if layer.rank]
    adapter = Tensors(tensors.source, make=tensors.make)
    rank = max((layer.rank for layer in corrected), default=0)
    for layer in layers:
        _add_packed(tensors, layer, options.dtype)
    for layer in corrected:
        _add_adapter(adapter, layer, rank, options.dtype)
    return replace(
        begun,
        more={CONFIG: json_file(adapter_config(corrected, rank, native))} if corrected else {},
        config=config | rotary(native) | {"quantization": quantization(layers)},
        beside={WEIGHTS: adapter.slots} if corrected else {},
        told=_told(layers, options.dtype or config.get("dtype")) + window_told(native, engine()),
    )


def _told(layers: Sequence[FewBits], dtype: str | None) -> tuple[str, ...]:
    halves = sum(layer.base.bits == 2 for layer in layers)
    said = f"biases of {halves} layers in int2 are rounded to bfloat16; --dtype float16 keeps them exact"
    return (said,) if halves and dtype == "bfloat16" else ()


def rotary(config: PreTrainedConfig) -> dict[str, object]:
    """The rotary positions as mlx-lm reads them; of most models it knows only these older entries."""
    found = dict(config.rope_parameters)
    scaled = {} if found["rope_type"] == "default" else {"rope_scaling": found}
    return {"rope_theta": found["rope_theta"], **scaled}


def quantization(layers: Sequence[FewBits]) -> dict[str, object]:
    """The entry of config.json: bits and group of every layer, those of the first for others."""
    each = {layer.module: {"group_size": group_of(layer), "bits": layer.base.bits} for layer in layers}
    return {**each[layers[0].module], **each}


def _add_packed(tensors: Tensors, layer: FewBits, dtype: str | None) -> None:
    o, i, stored = layer.spec.out_features, layer.spec.in_features, layer.stored(dtype)
    groups = i // group_of(layer)
    for name, kind, width in (
        ("weight", "U32", i * layer.base.bits // 32),
        ("scales", stored, groups),
        ("biases", stored, groups),
    ):
        make = partial(packed_part, layer, name, TORCH_NAMES[stored])
        tensors.add_made(f"{layer.module}.{name}", kind, (o, width), make)


def packed_part(layer: FewBits, name: str, dtype: str) -> Tensor:
    """One stored tensor of a weight in few bits: "weight", "scales" or "biases"."""
    base, group, (levels, scale) = layer.base, group_of(layer), layer.levels()
    if name == "weight":
        return pack(levels, base.bits)
    each = scale.repeat_interleave(base.group // group, 1)[:, : base.in_features // group]
    factor = 1.0 if name == "scales" else grid_of(base.bits, base.curved).shift - 2 ** (base.bits - 1)
    return (each.float() * factor).to(getattr(torch, dtype))


def _add_adapter(tensors: Tensors, layer: FewBits, rank: int, dtype: str | None) -> None:
    """Add the factors of a correction, with zeros up to the one `rank` of an adapter of mlx-lm."""
    spec, stored = layer.spec, layer.stored(dtype)
    for factor, part, shape in (
        ("V", "lora_a", (spec.in_features, rank)),
        ("U", "lora_b", (rank, spec.out_features)),
    ):
        make = partial(_padded, layer, factor, shape, TORCH_NAMES[stored])
        tensors.add_made(f"{layer.module}.{part}", stored, shape, make)


def _padded(layer: FewBits, factor: str, shape: tuple[int, int], dtype: str) -> Tensor:
    """A factor of a correction, transposed, with zeros up to `shape`."""
    found = layer.factor(factor, dtype).mT
    missing = shape[0] - found.shape[0], shape[1] - found.shape[1]
    return torch.nn.functional.pad(found, (0, missing[1], 0, missing[0]))


def adapter_config(
    corrected: Sequence[FewBits], rank: int, config: PreTrainedConfig
) -> dict[str, object]:
    """The configuration of the corrections for mlx-lm."""
    keys = [layer.module for layer in corrected]
    layers = {"rank": rank, "scale": 1.0, "dropout": 0.0, "keys": keys}
    return {"fine_tune_type": "lora", "num_layers": config.num_hidden_layers, "lora_parameters": layers}


def load(folder: Path, dtype: object = "auto") -> ForeignModel:
    """The model in a written folder, by mlx-lm alone."""
    import mlx.core as mx
    import numpy
    from mlx_lm.utils import load_adapters, load_model

    model, _ = load_model(folder)
    if (folder / CONFIG).is_file():
        model = load_adapters(model, str(folder / ADAPTER))
    if dtype != "auto":
        model.set_dtype(getattr(mx, str(dtype).removeprefix("torch.")))

    def logits(ids: Tensor) -> Tensor:
        found = model(mx.array(ids.numpy())).astype(mx.float32)
        return torch.from_numpy(numpy.array(found))

    return ForeignModel(folder, logits)


def commands(folder: str, made: ExportPlan) -> list[str]:
    """The command that generates from a folder."""
    adapter = f" --adapter-path {quote(f'{folder}/{ADAPTER}')}" if made.beside else ""
    return [f'mlx_lm.generate --model {quote(folder)}{adapter} --prompt "A prompt"']
