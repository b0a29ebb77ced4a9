"""Complete algorithms for Kronecker-sparse layers, and the choice between them for each factor.

All take x [n, i] and canonical factors [a, b, c, d] in any strides; they are fastest where the factors
are stored [a, d, b, c]. Source: "Fast Inference with Kronecker-Sparse Matrices", algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from blr.kernels.common.available import TRAINED
from blr.kernels.layers.kronecker.choose import cached_choice
from blr.kernels.layers.kronecker.cost import A100, H200, Machine, Problem
from blr.kernels.layers.kronecker.products import (
    blocks_factor,
    permute_factor,
    split_factor,
    torch_tf32,
)
from blr.kernels.layers.kronecker.reference import kronecker_linear
from blr.kernels.layers.kronecker.tiles import fused_config


@cache
def machine_of(device: torch.device) -> Machine:
    """The rates and tile limits to plan with: of one Hopper for all Hoppers, of an A100 elsewhere."""
    return A100 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9 else H200


def fused_factor(
    x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None, *, path: str, **tile: Any
) -> Tensor:
    """One kernel: path "plain", "grouped", "decode" or "dense", and its tile sizes."""
    from blr.kernels.layers.kronecker import triton
    from blr.kernels.layers.kronecker.grouped import grouped

    if path == "decode":
        tile.pop("precision", None)  # sums are in fp32 whatever the setting of TF32
        return triton.decode(x, w, out, bias, **tile)
    if path == "grouped":
        return grouped(x, w, out, bias, **tile)
    w = triton.densify(w).unsqueeze(3) if path == "dense" else w
    return triton.plain(x, w, out, bias, **tile)


def kronecker_factor(
    x: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    variant: str | None = None,
    **config: Any,
) -> Tensor:
    """``x Kᵀ + bias`` for one factor, by the variant that `choose` expects to be fastest.

    TF32 follows the setting of torch. Where that is off, fp32 may be computed as sums of TF32 products
    ("split"), which stays within the error of fp32 sums.

    Args:
        x: [n, a·c·d], any strides.
        w: [a, b, c, d] in the dtype of `x`, any strides.
        bias: [a·b·d] or None.
        variant: "fused", "permute", "blocks", "split" (the same as "permute" but in fp32), or None to
            choose.
        config: tile sizes of the variant, for "fused" also `path`; what is chosen fills the gaps if both
            name the same path.

    Returns:
        [n, a·b·d], contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    (a, b, c, d), n = w.shape, x.shape[0]
    if x.dim() != 2 or x.shape[1] != a * c * d:
        found = f"x {list(x.shape)}, factor {list(w.shape)}"
        raise ValueError(f"Kronecker-sparse factor: {found}; expected x [n, a·c·d], factor [a, b, c, d]")
    if x.dtype != w.dtype:
        raise ValueError(f"x is {x.dtype}, the factor {w.dtype}; convert one of them")
    if x.dtype not in TRAINED or 0 in (n, *w.shape):
        return kronecker_linear(x, [w], bias).contiguous()
    kind = "half" if x.dtype != torch.float32 else "tf32" if torch_tf32() else "fp32"
    problem, machine = Problem(a, b, c, d, n, kind, bias is not None), machine_of(x.device)
    if variant is None:
        variant, chosen = cached_choice(problem, machine)
        config = {**dict(chosen), **config}
    elif variant == "fused":
        usual = fused_config(problem, machine)
        config = usual | config if config.get("path", usual["path"]) == usual["path"] else config
    x, w, bias = x.detach(), w.detach(), None if bias is None else bias.detach()
    out = x.new_empty(n, a * b * d)
    if variant == "fused":
        config["precision"] = "tf32" if kind == "tf32" else "ieee"
    run: dict[str, Callable[..., Tensor]] = {"fused": fused_factor, "blocks": blocks_factor}
    run["permute"], run["split"] = permute_factor, split_factor if kind == "fp32" else permute_factor
    return run[variant](x, w, out, bias, **config)


def kronecker_chain(
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    variant: str | None = None,
    **config: Any,
) -> Tensor:
    """``x (K_0 K_1 … K_{L-1})ᵀ + bias``, [n, o]; the rightmost factor comes first.

    Args:
        x: [n, i], any strides. factors: L tensors [a, b, c, d], the output side first.
        bias, variant, config: as in `kronecker_factor`, for all of them.
    """
    for at in range(len(factors) - 1, -1, -1):
        added = bias if at == 0 else None
        x = kronecker_factor(x, factors[at], bias=added, variant=variant, **config)
    return x


VARIANTS: dict[str, Callable[..., Tensor]] = {
    "auto": kronecker_chain,
    **{name: partial(kronecker_chain, variant=name) for name in ("fused", "permute", "blocks", "split")},
    "reference": kronecker_linear,
}
