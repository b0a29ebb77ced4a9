"""The product of a structure f(x, *factors, bias=None): in plain torch, by kernels, by each variant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

import torch
from torch import Tensor

from blr.compressor.structures.specs import KroneckerSpec
from blr.kernels.common.dispatch import Variant
from blr.kernels.common.names import FOLDERS

Call = Callable[..., Tensor]


def reference_of(structure: str) -> Call:
    """In plain torch, also of "dense"."""
    return torch.nn.functional.linear if structure == "dense" else _product(structure, "reference")


def product_of(structure: str) -> Call:
    """By kernels."""
    return _product(structure, "op")


def variants_of(structure: str) -> Mapping[str, Variant]:
    """By each variant of its kernels; all take factors one by one."""
    found: Mapping[str, Variant] = import_module(_folder(structure) + ".op").variants()
    return found


def _folder(structure: str) -> str:
    return f"blr.kernels.layers.{FOLDERS[structure]}"


def _product(structure: str, module: str) -> Call:
    """Factors are its arguments, also of a chain, whose product takes them as a list."""
    product: Call = getattr(
        import_module(f"{_folder(structure)}.{module}"), f"{FOLDERS[structure]}_linear"
    )
    if structure != KroneckerSpec.structure:
        return product
    return lambda x, *factors, bias=None: product(x, list(factors), bias)
