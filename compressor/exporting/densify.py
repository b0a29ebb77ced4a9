"""Structured layers that an export makes dense again: those whose dense layer the GPU runs faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from blr.compressor.checkpoint.source import TORCH_NAMES
from blr.compressor.runtime.phases import FAMILIES
from blr.compressor.structures.laid import laid_shape
from blr.compressor.structures.restore import restored
from blr.compressor.structures.specs import Spec
from blr.kernels.common.tables import prefers_dense

if TYPE_CHECKING:
    from torch import Tensor

    from blr.compressor.checkpoint.source import Source
    from blr.compressor.exporting.origin import Checkpoint


def slower_layers(checkpoint: Checkpoint, gpu: str, batch: int, dtype: str | None) -> dict[str, Spec]:
    """Structured modules that the table of `gpu` (as `blr tune` writes it) says to run dense when
    decoding 1 to `batch` tokens. Only in models of the decoding runtime, whose weights are [o, i].

    dtype: torch's name of what is stored, None for the factors' own.
    """
    source = checkpoint.source
    if source.model_type not in FAMILIES:
        return {}
    tokens = range(1, batch + 1)
    found = {}
    for module, spec in checkpoint.specs.items():
        entry = source.entries.get(f"{module}.{next(iter(spec.stored()))}")
        if spec.quantized or entry is None or not entry.is_float:
            continue  # packed, or refused where the tensors are planned
        stored = getattr(torch, dtype or TORCH_NAMES[entry.dtype])
        if prefers_dense(spec.structure, laid_shape(spec), stored, gpu.replace("-", ""), tokens):
            found[module] = spec
    return found


def dense_weight(source: Source, module: str, spec: Spec, dtype: str) -> Tensor:
    """[o, i] of a structured layer, multiplied out in float32 or better and rounded once."""
    tensors = {name: source.load_tensor(source.entries[f"{module}.{name}"]) for name in spec.stored()}
    exact = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    wide = torch.float64 if exact else torch.float32
    return restored(spec, tensors, wide).to(getattr(torch, dtype))
