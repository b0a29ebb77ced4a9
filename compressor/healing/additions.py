"""Low-rank additions: ``B A`` is trained beside frozen weights W, and merged into them at the end.

Only layers whose structure can hold the sum exactly get additions: dense weights, and low rank and
BLAST with r' more columns (and couplings of 1). Layers of other structures are trained themselves.
Source: LoRA (arXiv 2106.09685).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from blr.compressor.base.errors import CapabilityError, UsageError
from blr.compressor.exporting.origin import Checkpoint
from blr.compressor.modeling.layers import StructuredLinear
from blr.compressor.structures.specs import BlastSpec, LowRankSpec, Spec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LEFT, RIGHT = "added_B", "added_A"
Tensors = dict[str, Tensor]


def holds_sum(layer: object) -> bool:
    """Whether the weight of `layer` plus a low-rank product has the same structure."""
    if not isinstance(layer, StructuredLinear):
        return type(layer) is nn.Linear
    return _extends(layer.spec)


def _extends(spec: Spec) -> bool:
    known = (LowRankSpec.structure, BlastSpec.structure)
    return spec.structure in known and getattr(spec, "groups", 1) == 1


def growth(specs: Collection[Spec], rank: int) -> list[str]:
    """A note on layers that additions of `rank` make larger than dense ones; empty if there are none."""
    grown = [raised(spec, rank) for spec in specs if _extends(spec)]
    large = sum(spec.parameters > spec.dense_parameters for spec in grown)
    if not large:
        return []
    return [
        f"additions of rank {rank} make {large} of {len(specs)} layers larger than dense ones; take a "
        "lower --lora where size counts"
    ]


def check_takes_additions(student: Checkpoint, rank: int) -> None:
    """Raise CapabilityError for layers in few bits, UsageError for a `rank` above every layer's."""
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


def attach(model: PreTrainedModel, rank: int, seed: int) -> set[str]:
    """Give additions of `rank` to every linear layer of `model` that can hold them, except the head.
    They change nothing until `add_products`. Returns the layers' names."""
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


def add_products(model: PreTrainedModel, names: set[str]) -> None:
    """Let the layers called `names` add their additions to what they compute."""
    for name in names:
        layer = model.get_submodule(name)
        layer.forward = partial(_forward, layer, layer.forward)


def _forward(layer: Any, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return forward(x) + linear(linear(x, layer.added_A), layer.added_B)


def is_addition(name: str) -> bool:
    """Whether the parameter called `name` belongs to an addition."""
    return name.rpartition(".")[2] in (LEFT, RIGHT)


def product_of(masters: Tensors, name: str) -> tuple[Tensor, Tensor] | None:
    """B [o, r'] and A [r', i] of a layer, balanced, float64, on the CPU; None without or if zero."""
    left, right = (masters.get(f"{name}.{part}") for part in (LEFT, RIGHT))
    if left is None or right is None or not bool(left.any()):
        return None
    B, A = left.detach().double().cpu(), right.detach().double().cpu()
    sizes = B.norm(dim=0), A.norm(dim=1)
    scale = torch.where(sizes[0] > 0, (sizes[1] / sizes[0]).sqrt(), 1.0)
    return B * scale, A / scale[:, None]


def extended(factor: Tensor, spec: Spec, name: str, B: Tensor, A: Tensor) -> Tensor:
    """The factor `name` with the r' columns that add ``B A`` to the layer's weight, float64."""
    rank, blocks = A.shape[0], getattr(spec, "blocks", None)
    if name == "S":
        added = B.new_ones(len(factor), len(factor), rank)
    else:
        added = {"U": B, "V": A.mT}[name]
        added = added.unflatten(0, (blocks, -1)) if blocks else added
    return torch.cat((factor.double(), added), -1)


def raised(spec: Spec, rank: int) -> Spec:
    """The spec of a layer whose rank is larger by `rank`."""
    assert isinstance(spec, LowRankSpec | BlastSpec)
    return replace(spec, rank=spec.rank + rank)
