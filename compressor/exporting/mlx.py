"""Plans folders for MLX (`--as mlx`): packed weights, and corrections as an adapter of mlx-lm.

MLX computes a weight as ``scale · code + bias``, in groups of 32, 64 or 128. The codes of a row are
packed without gaps, the lowest bit first. A bias is the scale times a power of two, exactly. That of
int2, whose levels are half-integers, is −1.5 scales. In bfloat16 it is rounded; float16 holds −1.5 times
any scale of bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from blr.compressor.checkpoint.header import TORCH_NAMES
from blr.compressor.checkpoint.source import Source
from blr.compressor.exporting.engines import (
    Engine,
    ForeignModel,
    adapter_factor,
    begun,
    blocks_refusal,
    check_decoder,
    correction_of,
    finest,
    integers_of,
    levels_of,
    pack,
    planned,
    rank_of,
    scale_entry,
    window_told,
)
from blr.compressor.exporting.options import ExportOptions
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.exporting.plan import ExportPlan
from blr.compressor.exporting.tensors import STORED, Tensors
from blr.compressor.output.files import json_file
from blr.compressor.structures.specs import Spec
from blr.kernels.decode.quantized.formats import grid_of

ADAPTER = "adapters"
CONFIG, WEIGHTS = f"{ADAPTER}/adapter_config.json", f"{ADAPTER}/adapters.safetensors"


def engine() -> Engine:
    """MLX by mlx-lm."""
    how = blocks_refusal, kind, f"The adapter `{ADAPTER}`", plan, load, commands
    return Engine("mlx", "MLX", ("mlx-lm",), *how)


def kind(spec: Spec) -> str:
    """What a layer is stored as."""
    base = integers_of(spec)
    return f"int{base.bits} in groups of {finest(base.group, base.in_features)} of MLX"


def plan(checkpoint: Checkpoint, rest: Mapping[str, Spec], options: ExportOptions) -> ExportPlan:
    """Plan the folder with the layers `rest` dense. Raises CapabilityError for models that mlx-lm
    computes otherwise; InputError for tensors that would not load."""
    native = check_decoder(checkpoint.source, engine())
    kept, config, tensors = begun(checkpoint, rest, options)
    adapter = Tensors([], tensors.make)
    for module, spec in kept.specs.items():
        _add_packed(tensors, kept.source, module, spec, options.dtype)
        _add_adapter(adapter, kept.source, module, spec, _largest(kept), options.dtype)
    return planned(
        engine(),
        checkpoint,
        rest,
        options,
        {CONFIG: json_file(adapter_config(kept))} if adapter.slots else {},
        config=config | rotary(native) | {"quantization": quantization(kept)},
        tensors=tensors,
        beside={WEIGHTS: adapter.slots} if adapter.slots else {},
        told=_told(kept, options.dtype or config.get("dtype")) + window_told(native, engine()),
    )


def _told(kept: Checkpoint, dtype: str | None) -> tuple[str, ...]:
    halves = sum(integers_of(spec).bits == 2 for spec in kept.specs.values())
    said = f"biases of {halves} layers in int2 are rounded to bfloat16; --dtype float16 keeps them exact"
    return (said,) if halves and dtype == "bfloat16" else ()


def rotary(config: PreTrainedConfig) -> dict[str, object]:
    """The rotary positions as mlx-lm reads them; of most models it knows only these older entries."""
    found = dict(config.rope_parameters)
    scaled = {} if found["rope_type"] == "default" else {"rope_scaling": found}
    return {"rope_theta": found["rope_theta"], **scaled}


def quantization(kept: Checkpoint) -> dict[str, object]:
    """The entry of config.json: bits and group of every layer, those of the first for others."""
    layers = {}
    for module, spec in kept.specs.items():
        base = integers_of(spec)
        layers[module] = {"group_size": finest(base.group, base.in_features), "bits": base.bits}
    return {**next(iter(layers.values())), **layers}


def _add_packed(tensors: Tensors, source: Source, module: str, spec: Spec, dtype: str | None) -> None:
    base, o, i = integers_of(spec), spec.out_features, spec.in_features
    stored = STORED[dtype] if dtype else scale_entry(source, module, spec).dtype
    groups = i // finest(base.group, i)
    for name, kind, width in (
        ("weight", "U32", i * base.bits // 32),
        ("scales", stored, groups),
        ("biases", stored, groups),
    ):
        make = partial(packed_part, source, module, spec, name, TORCH_NAMES[stored])
        tensors.add_made(f"{module}.{name}", kind, (o, width), source.shards[0], make)


def packed_part(source: Source, module: str, spec: Spec, name: str, dtype: str) -> Tensor:
    """One stored tensor of a weight in few bits: "weight", "scales" or "biases"."""
    base, (levels, scale) = integers_of(spec), levels_of(source, module, spec)
    if name == "weight":
        return pack(levels, base.bits)
    group = finest(base.group, base.in_features)
    each = scale.repeat_interleave(base.group // group, 1)[:, : base.in_features // group]
    factor = 1.0 if name == "scales" else grid_of(base.bits, base.curved).shift - 2 ** (base.bits - 1)
    return (each.float() * factor).to(getattr(torch, dtype))


def _largest(kept: Checkpoint) -> int:
    corrections = map(correction_of, kept.specs.values())
    return max((rank_of(spec) for spec in corrections if spec is not None), default=0)


def _add_adapter(
    tensors: Tensors, source: Source, module: str, spec: Spec, rank: int, dtype: str | None
) -> None:
    """Add the factors of a correction, as mlx-lm names them, with zeros up to `rank`: all layers of an
    adapter have one there. Nothing for a layer without a correction."""
    if correction_of(spec) is None:
        return
    stored = STORED[dtype] if dtype else scale_entry(source, module, spec).dtype
    for factor, part, shape in (
        ("V", "lora_a", (spec.in_features, rank)),
        ("U", "lora_b", (rank, spec.out_features)),
    ):
        make = partial(_padded, source, module, spec, factor, shape, TORCH_NAMES[stored])
        tensors.add_made(f"{module}.{part}", stored, shape, source.shards[0], make)


def _padded(
    source: Source, module: str, spec: Spec, factor: str, shape: tuple[int, int], dtype: str
) -> Tensor:
    """A factor of a correction, transposed, with zeros up to `shape`."""
    found = adapter_factor(source, module, spec, factor, dtype).mT
    missing = shape[0] - found.shape[0], shape[1] - found.shape[1]
    return torch.nn.functional.pad(found, (0, missing[1], 0, missing[0]))


def adapter_config(kept: Checkpoint) -> dict[str, object]:
    """The configuration of the corrections for mlx-lm."""
    keys = [module for module, spec in kept.specs.items() if correction_of(spec) is not None]
    layers = {"rank": _largest(kept), "scale": 1.0, "dropout": 0.0, "keys": keys}
    blocks = kept.source.config["num_hidden_layers"]
    return {"fine_tune_type": "lora", "num_layers": blocks, "lora_parameters": layers}


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
