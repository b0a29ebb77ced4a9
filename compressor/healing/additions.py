"""Low-rank additions: what is trained is ``W + B A`` beside frozen weights, and merged in the end.

The sum is exact where a layer holds it: dense weights, and low rank and BLAST by r' more columns
(couplings of one). LoRA (arXiv 2106.09685); layers of other structures are trained themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.structures.specs import BlastSpec, LowRankSpec, Spec

LEFT, RIGHT = "added_B", "added_A"
Tensors = dict[str, Tensor]


def holds_sum(layer: Any) -> bool:
    """Whether the weight of `layer` plus a product of low rank is again one of its kind."""
    if not isinstance(layer, StructuredLinear):
        return type(layer) is nn.Linear
    return _extends(layer.spec)


def _extends(spec: Spec) -> bool:
    known = (LowRankSpec.structure, BlastSpec.structure)
    return spec.structure in known and getattr(spec, "groups", 1) == 1


def growth(specs: Collection[Spec], rank: int) -> list[str]:
    """A line on layers that additions of `rank` make larger than dense ones, if there are any."""
    grown = [raised(spec, rank) for spec in specs if _extends(spec)]
    large = sum(spec.parameters > spec.dense_parameters for spec in grown)
    if not large:
        return []
    return [
        f"additions of rank {rank} make {large} of {len(specs)} layers larger than dense ones; take a "
        "lower --lora where size counts"
    ]


def check_takes_additions(student: Checkpoint, rank: int) -> None:
    """Raise CapabilityError for layers in few bits, UsageError for a `rank` that no layer has."""
    sizes = [min(spec.in_features, spec.out_features) for spec in student.specs.values()]
    if rank > max(sizes, default=rank):
        raise UsageError(
            f"--lora {rank}: expected at most {max(sizes)}, the largest rank of a layer; lower it"
        )
    if packed := sum(spec.quantized for spec in student.specs.values()):
        raise CapabilityError(
            f"{student.source.folder}: {packed} layers are stored in few bits, expected factors as they "
            "are for --lora; heal without it, which trains what is packed"
        )


def attach(model: Any, rank: int, seed: int) -> set[str]:
    """Give every linear layer of `model` but its head, where it can hold them, additions of `rank`,
    which change nothing until `add_products`. Returns the layers' names."""
    generator, head = torch.Generator().manual_seed(seed), model.get_output_embeddings()
    found = set()
    for name, layer in model.named_modules():
        if layer is head or not holds_sum(layer):
            continue
        A = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
        layer.register_parameter(RIGHT, nn.Parameter(A.to(model.device)))
        zeros = torch.zeros(layer.out_features, rank, device=model.device)
        layer.register_parameter(LEFT, nn.Parameter(zeros))
        found.add(name)
    return found


def add_products(model: Any, names: set[str]) -> None:
    """Let the layers called `names` compute with their additions."""
    for name in names:
        layer = model.get_submodule(name)
        layer.forward = partial(_forward, layer, layer.forward)


def _forward(layer: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x) + linear(linear(x, layer.added_A), layer.added_B)


def is_addition(name: str) -> bool:
    """Whether a parameter called `name` is a part of one."""
    return name.rpartition(".")[2] in (LEFT, RIGHT)


def product_of(masters: Tensors, name: str) -> tuple[Tensor, Tensor] | None:
    """B [o, r'] and A [r', i] of a layer, float64 on the CPU; None without any, or while B is zero."""
    left, right = (masters.get(f"{name}.{part}") for part in (LEFT, RIGHT))
    if left is None or right is None or not bool(left.any()):
        return None
    B, A = left.detach().double().cpu(), right.detach().double().cpu()
    sizes = B.norm(dim=0), A.norm(dim=1)
    scale = torch.where(sizes[0] > 0, (sizes[1] / sizes[0]).sqrt(), 1.0)
    return B * scale, A / scale[:, None]


def extended(factor: Tensor, spec: Spec, name: str, B: Tensor, A: Tensor) -> Tensor:
    """The factor `name` of the weight plus ``B A``: r' more columns, float64."""
    rank, blocks = A.shape[0], getattr(spec, "blocks", None)
    if name == "S":
        added = B.new_ones(len(factor), len(factor), rank)
    else:
        added = {"U": B, "V": A.mT}[name]
        added = added.unflatten(0, (blocks, -1)) if blocks else added
    return torch.cat((factor.double(), added), -1)


def raised(spec: Spec, rank: int) -> Spec:
    """The spec of `extended` factors."""
    assert isinstance(spec, LowRankSpec | BlastSpec)
    return replace(spec, rank=spec.rank + rank)
