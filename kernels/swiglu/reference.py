"""The second half of low-rank MLP projections in plain torch: product, bias, activation, gate."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def known(act: str) -> str:
    """`act`, if it is in ACTIVATIONS; else ValueError."""
    if act not in ACTIVATIONS:
        raise ValueError(f"activation {act!r}: expected one of {', '.join(ACTIVATIONS)}")
    return act


def gated_projection(
    zg: Tensor,
    Ug: Tensor,
    bg: Tensor | None,
    zu: Tensor,
    Uu: Tensor,
    bu: Tensor | None,
    act: str = "silu",
    **config: int,
) -> Tensor:
    """``act(zg Ugᵀ + bg) ⊙ (zu Uuᵀ + bu)``: gate and up projection of a low-rank MLP after V.

    Args:
        zg: [n, rg], Ug: [f, rg], zu: [n, ru], Uu: [f, ru]; bg, bu: [f] or None.
        act: a key of ACTIVATIONS; "silu" makes it SwiGLU.
        config: block sizes, of no use here.

    Returns:
        [n, f] in the dtype of `zg`.

    Raises:
        ValueError: unknown `act`.
    """
    return activated_projection(zg, Ug, bg, act) * F.linear(zu, Uu, bu)


def activated_projection(
    z: Tensor, U: Tensor, b: Tensor | None, act: str = "gelu", **config: int
) -> Tensor:
    """``act(z Uᵀ + b)``; z [n, r], U [f, r], b [f] or None. As `gated_projection` otherwise."""
    return ACTIVATIONS[known(act)](F.linear(z, U, b))
