"""Statistics of experts: each has the tokens that chose it, and some have hardly any.

What few tokens tell of an expert is mixed with what all tokens of its layer tell: every expert's sums
get the mean of the layer as if it were some more tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.fitting.block_passes import Batch, captured_inputs, run_block
from blr.compressor.fitting.weighted import Moments, products

COUNT = "tokens of "  # begins the name of how many tokens an expert had
PRIOR = 0.25  # tokens of the layer's mean that an expert's moments get, a number of its input
FLOOR = 0.05  # share of the layer's mean that an expert's sensitivities get


def routed(
    block: nn.Module, heads: Sequence[str], batch: Batch, device: torch.device
) -> dict[str, Tensor]:
    """What a batch adds to the moments of the inputs of the layers `heads`, and to their tokens."""
    with captured_inputs(block, heads) as kept:
        run_block(block, batch.student.to(device), batch)
    found = dict[str, Tensor]()
    for name in heads:
        found[name] = gram_of(kept, name, block, batch)
        count = len(kept[name]) if name in kept else 0
        found[f"{COUNT}{name}"] = torch.tensor([float(count)], device=device)
    return found


def gram_of(kept: Mapping[str, Tensor], name: str, block: nn.Module, batch: Batch) -> Tensor:
    """Σ x xᵀ of the inputs of a layer that were kept; zeros for an expert that no token chose."""
    if name in kept:
        return products(batch.rows(kept[name]))["gram"]
    layer: Any = block.get_submodule(name)
    like = next(layer.parameters())
    return like.new_zeros(layer.in_features, layer.in_features)


def expert_moments(grams: list[Tensor], counts: list[int]) -> list[Moments]:
    """The moments of each expert of a layer, drawn towards the layer's mean."""
    mean = torch.zeros_like(grams[0])
    for gram in grams:
        mean += gram / max(sum(counts), 1)
    pairs = zip(grams, counts, strict=True)
    return [Moments(g.add_(mean, alpha=PRIOR * len(g)), tokens=count) for g, count in pairs]


def with_floor(sums: Sequence[Tensor]) -> list[Tensor]:
    """The sums of each expert of a layer with a small share of their mean added."""
    mean = torch.zeros_like(sums[0])
    for each in sums:
        mean += each
    return [each + FLOOR / len(sums) * mean for each in sums]
