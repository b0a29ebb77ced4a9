"""Norms that compute in float32, a stretch of tokens at a time. Shipped inside every checkpoint.

The RMS norms of transformers hold the whole input twice in float32: of a long prompt that is more than
attention and MLP need once these are bounded.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from blr.kernels.common.transient import chunks, tokens_within, transient_bytes

HELD = 8  # bytes a feature: two copies in float32


class BoundedNorm:
    """Mixin before a norm's class: `forward` in stretches of tokens if the whole is over the bound."""

    native: type[Any]

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As of the norm."""
        compute: Any = super().forward  # type: ignore[misc]
        whole = torch.is_grad_enabled() or args or kwargs or type(hidden_states) is not Tensor
        bound = None if whole else transient_bytes(hidden_states.device.type)
        width = HELD * hidden_states.shape[-1]
        if bound is None or hidden_states.numel() * HELD <= bound or torch.compiler.is_compiling():
            return compute(hidden_states, *args, **kwargs)
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        for start, stop in chunks(len(rows), tokens_within(bound, width)):
            out[start:stop] = compute(rows[start:stop])
        return out.view(hidden_states.shape)

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        """By the norm's own class, which pickle finds."""
        return _empty, (self.native,), self.__dict__


def bound_norms(model: nn.Module) -> None:
    """Let the RMS norms of `model` compute in stretches."""
    for module in model.modules():
        native: Any = type(module)
        if native.__name__.endswith("RMSNorm") and not isinstance(module, BoundedNorm):
            module.__class__ = bounded_class(native)


@cache
def bounded_class(native: Any) -> Any:
    """`native` with `BoundedNorm`, under its name."""
    return type(native.__name__, (BoundedNorm, native), {"__module__": __name__, "native": native})


def _empty(native: Any) -> Any:
    made: Any = bounded_class(native)
    return made.__new__(made)
