"""What the factors of a layer multiply: second moments of the inputs of each, from those of the layer's.

V sees x, in blocks where it has blocks. U sees z, which V makes of x, and, of BLAST, the couplings.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from blr.compressor.structures.specs import BlastSpec, LowRankSpec, MonarchSpec, Spec


def seen_by(name: str, spec: Spec, factors: Mapping[str, Tensor], gram: Tensor | None) -> Tensor | None:
    """H of the inputs of the factor `name`, [K, K] or [B, K, K] for its matrix [..., R, K]; None where
    errors of all columns cost the same, or what the structure has no such moments for.

    Args:
        factors: canonical, V and S as they are stored. gram: [i, i] of the layer's inputs, None for
            white ones.
    """
    if not isinstance(spec, LowRankSpec | MonarchSpec | BlastSpec) or getattr(spec, "groups", 1) > 1:
        return None
    if name == "V":
        return gram if gram is None or isinstance(spec, LowRankSpec) else _blocks(gram, spec.blocks)
    if name != "U":
        return None
    if isinstance(spec, LowRankSpec):
        return _moments(factors["V"], gram)
    return torch.stack([_moments(_row(spec, factors, k), gram) for k in range(spec.blocks)])


def _blocks(gram: Tensor, blocks: int) -> Tensor:
    """Those [b, p, p] on the diagonal."""
    at = torch.arange(blocks, device=gram.device)
    return gram.unflatten(0, (blocks, -1)).unflatten(2, (blocks, -1))[at, :, at]


def _row(spec: MonarchSpec | BlastSpec, factors: Mapping[str, Tensor], k: int) -> Tensor:
    """Z_k [i, r], with ``z = Z_kᵀ x`` what the block k of U multiplies."""
    V = factors["V"]
    if isinstance(spec, BlastSpec):
        return (V * factors["S"][k][:, None]).flatten(0, 1)
    return torch.block_diag(*V.unflatten(-1, (spec.blocks, -1))[:, :, k])


def _moments(makes: Tensor, gram: Tensor | None) -> Tensor:
    return makes.mT @ (makes if gram is None else gram.to(makes) @ makes)
