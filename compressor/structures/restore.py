"""Computes factors and dense weights from stored tensors, of plain, packed and corrected layers."""

from collections.abc import Mapping

import torch
from torch import Tensor

from blr.compressor.structures.packing import unpack_factor
from blr.compressor.structures.registry import STRUCTURES
from blr.compressor.structures.specs import DenseSpec, Spec


def factors_of(spec: Spec, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The canonical factors of a plain or packed layer in `dtype`, by name."""
    if (packing := spec.packing) is not None:
        return {n: unpack_factor(packing, n, tensors, dtype) for n in spec.shapes()}
    return {name: tensors[name].to(dtype) for name in spec.shapes()}


def restored(spec: Spec, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """The dense weight [o, i], computed in `dtype`.

    Args:
        tensors: by the names of ``spec.stored()``.
    """
    if len(spec.parts()) > 1:
        parts = ((part, part_of(tensors, name)) for name, part in spec.parts())
        base, correction = (restored(part, held, dtype) for part, held in parts)
        return base + correction
    factors, plain = factors_of(spec, tensors, dtype), spec.plain
    if plain.structure == DenseSpec.structure:
        return factors["weight"]
    return STRUCTURES[plain.structure].factorizer().reconstruct(factors, plain)


def part_of(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors of one part of a corrected layer, by their names in it."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): tensor for k, tensor in tensors.items() if k.startswith(prefix)}
