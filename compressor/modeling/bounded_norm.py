"""Norms that compute in float32, a stretch of tokens at a time. Shipped inside every checkpoint.

The RMS norms of transformers hold the whole input twice in float32: of a long prompt that is more than
attention and MLP need once these are bounded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from blr.compressor.modeling.extended import Extension, extend
from blr.kernels.common.transient import bound_for, chunks, tokens_within

HELD = 8  # bytes a feature: two copies in float32


class BoundedNorm(Extension):
    """Mixin before a norm's class: `forward` in stretches of tokens if the whole is over the bound."""

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As of the norm."""
        compute: Any = super().forward  # type: ignore[misc]
        whole = torch.is_grad_enabled() or args or kwargs or type(hidden_states) is not Tensor
        whole = whole or torch.compiler.is_compiling()
        bound = None if whole else bound_for(hidden_states)
        width = HELD * hidden_states.shape[-1]
        if bound is None or hidden_states.numel() * HELD <= bound:
            return compute(hidden_states, *args, **kwargs)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for start, stop in chunks(len(rows), tokens_within(bound, width)):
            out[start:stop] = compute(rows[start:stop])
        return out.view(hidden_states.shape)


def bound_norms(model: nn.Module) -> None:
    """Let the RMS norms of `model` compute in stretches."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            extend(module, BoundedNorm)
