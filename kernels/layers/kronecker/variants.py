"""Complete algorithms for Kronecker-sparse layers, and the choice between them for each factor.

All take x [n, i] (batch-first; `kronecker_factor` also batch-last), any strides, and canonical
factors [a, b, c, d] in any strides; they are fastest where the factors are stored [a, d, b, c].
Source: "Fast Inference with Kronecker-Sparse Matrices", algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from blr.kernels.layers.kronecker.choose import cached_choice
from blr.kernels.layers.kronecker.cost import A100, H200, Machine, Problem
from blr.kernels.layers.kronecker.products import (
    blocks_factor,
    bmm_factor,
    permute_factor,
    split_factor,
    torch_tf32,
)
from blr.kernels.layers.kronecker.reference import kronecker_factor as reference_factor
from blr.kernels.layers.kronecker.reference import kronecker_linear
from blr.kernels.layers.kronecker.tiles import fused_config

KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PRECISIONS = ("ieee", "tf32", "tf32x3")


def densify(w: Tensor, G: int) -> Tensor:
    """Weight of runs of G columns l as dense blocks: [a, b, c, d] -> [a, b·G, c·G, d/G].

    Column l = r·G + g of the factor becomes row j·G + g and column k·G + g of run r, zero elsewhere:
    G times the storage and the arithmetic, for rows of x that are contiguous over (k, g). The
    caller keeps the result and passes it as `prepared`.

    Raises:
        ValueError: G does not divide d.
    """
    a, b, c, d = w.shape
    if d % G:
        raise ValueError(f"densify: runs of {G} columns do not divide d = {d}; use a divisor of d")
    dense = w.new_zeros(a, d // G, b, G, c, G)
    diagonal = dense.diagonal(dim1=3, dim2=5)  # [a, d/G, b, c, G]
    diagonal.copy_(w.unflatten(3, (d // G, G)).permute(0, 3, 1, 2, 4))
    return dense.view(a, d // G, b * G, c * G).permute(0, 2, 3, 1)


def precision_of(tf32: bool | None, precision: str | None) -> str:
    """The arithmetic of fp32 products: `precision`, else by `tf32`, else torch's own setting."""
    if precision is not None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision is {precision!r}; use one of {', '.join(PRECISIONS)}")
        return precision
    enabled = torch_tf32() if tf32 is None else tf32
    return "tf32" if enabled else "ieee"


@cache
def machine_of(device: torch.device) -> Machine:
    """The rates and tile limits to plan with: of one Hopper for all Hoppers, of an A100 elsewhere."""
    return A100 if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9 else H200


def empty_output(x: Tensor, w: Tensor, batch_last: bool) -> Tensor:
    """Uninitialized [n, a·b·d], the batch contiguous if `batch_last`."""
    features = w.shape[0] * w.shape[1] * w.shape[3]
    return x.new_empty(features, x.shape[0]).t() if batch_last else x.new_empty(x.shape[0], features)


def laid_out(y: Tensor, batch_last: bool) -> Tensor:
    """y [n, o] with the batch contiguous if `batch_last`, else the features."""
    return y.t().contiguous().t() if batch_last else y.contiguous()


def run_weight(w: Tensor, G: int) -> Tensor:
    """`densify` on the fly, in one launch where the run is all of d."""
    from blr.kernels.layers.kronecker.densify import densify_all

    return densify_all(w).unsqueeze(3) if w.shape[3] == G else densify(w, G)


def fused_factor(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    path: str,
    precision: str = "ieee",
    prepared: Tensor | None = None,
    **tile: int,
) -> Tensor:
    """One kernel: path "plain", "grouped", "decode" or "dense", and its tile sizes."""
    from blr.kernels.layers.kronecker.grouped import grouped
    from blr.kernels.layers.kronecker.triton import decode, plain

    if path == "decode":
        return decode(x, w, out, bias, **tile)
    if path == "grouped":
        return grouped(x, w, out, bias, precision=precision, **tile)
    if path == "dense":
        w = run_weight(w, tile["G"]) if prepared is None else prepared
    return plain(x, w, out, bias, precision=precision, **tile)


def check(x: Tensor, w: Tensor) -> None:
    """Raises ValueError unless x [n, i] and w [a, b, c, d] fit together."""
    if x.dim() != 2 or w.dim() != 4 or x.shape[1] != w.shape[0] * w.shape[2] * w.shape[3]:
        found = f"x {list(x.shape)}, factor {list(w.shape)}"
        raise ValueError(f"Kronecker-sparse factor: {found}; expected x [n, a·c·d], factor [a, b, c, d]")
    if x.dtype != w.dtype:
        raise ValueError(f"x is {x.dtype}, the factor {w.dtype}; convert one of them")


def kind_of(x: Tensor, precision: str) -> str:
    """The arithmetic of a Problem: "half", "tf32", "fp32" or "tf32x3"."""
    if x.dtype != torch.float32:
        return "half"
    return "fp32" if precision == "ieee" else precision


def planned(x: Tensor, w: Tensor, variant: str | None, **fields: Any) -> tuple[str, dict[str, Any]]:
    """(variant, configuration) for a problem; both decided once and kept."""
    a, b, c, d = w.shape
    problem, machine = Problem(a, b, c, d, x.shape[0], **fields), machine_of(x.device)
    if variant is None:
        variant, config = cached_choice(problem, machine)
        return variant, dict(config)
    return variant, fused_config(problem, machine) if variant == "fused" else {}


def multiply(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    *,
    out_batch_last: bool,
    variant: str | None,
    tf32: bool | None,
    precision: str | None,
    prepared: Tensor | None,
    config: dict[str, Any],
) -> Tensor:
    """One factor on a logical [n, i] view, the layout of x in its strides."""
    check(x, w)
    if variant == "reference" or x.dtype not in KERNEL_DTYPES or 0 in (x.shape[0], *w.shape):
        y = reference_factor(x, w)
        return laid_out(y if bias is None else y + bias, out_batch_last)
    arithmetic = precision_of(tf32, precision)
    kind = kind_of(x, arithmetic)
    library = None if kind == "half" else kind == "tf32"  # what `tf32` of products.py takes
    if variant == "bmm":
        return laid_out(bmm_factor(x, w, bias, tf32=kind == "tf32"), out_batch_last)
    variant, chosen = planned(
        x,
        w,
        variant,
        kind=kind,
        batch_last=x.stride(0) == 1 and out_batch_last,
        prepared=0 if prepared is None else w.shape[3] // prepared.shape[3],
        bias=bias is not None,
        exact=precision == "ieee",
    )
    x, w, bias = x.detach(), w.detach(), None if bias is None else bias.detach()
    out = empty_output(x, w, out_batch_last)
    if variant == "blocks":
        whole = prepared if prepared is not None and prepared.shape[3] == 1 else None
        return blocks_factor(x, w, out, bias, tf32=library, prepared=whole)
    if variant == "split" and kind != "half":
        return split_factor(x, w, out, bias, **config)
    if variant in ("permute", "split"):
        return permute_factor(x, w, out, bias, tf32=library, **config)
    return fused_factor(
        x, w, out, bias, precision=arithmetic, prepared=prepared, **merged(chosen, config)
    )


def merged(chosen: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The explicit `config`; the chosen values fill the gaps if both name the same path."""
    if config.get("path", chosen["path"]) == chosen["path"]:
        return {**chosen, **config}
    return config


def kronecker_factor(
    x: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    batch_last: bool = False,
    tf32: bool | None = None,
    precision: str | None = None,
    variant: str | None = None,
    prepared: Tensor | None = None,
    **config: Any,
) -> Tensor:
    """``x Kᵀ + bias`` for one factor, by the variant that `choose` expects to be fastest.

    With TF32 off, fp32 may be computed as sums of TF32 products ("split"), which stays within the
    error of fp32 sums; ``precision="ieee"`` insists on products in fp32.

    Args:
        x: [n, a·c·d], or [a·c·d, n] if `batch_last`; any strides.
        w: [a, b, c, d] in the dtype of `x`, any strides.
        bias: [a·b·d] or None.
        batch_last: layout of input and output.
        tf32: TF32 for fp32 products; None follows torch.backends.cuda.matmul.allow_tf32.
        precision: "ieee" (plain fp32), "tf32" or "tf32x3" (three TF32 products, nearly fp32; by
            "split" or a fused kernel); overrides `tf32`.
        variant: "fused", "permute", "blocks", "split" (in half precision the same as "permute"),
            "bmm", "reference" or None to choose.
        prepared: ``densify(w, G)``, for path "dense" with the same G, and for "blocks" if G = d.
        config: tile sizes of the variant, for "fused" also `path`.

    Returns:
        [n, a·b·d], or [a·b·d, n] if `batch_last`.

    Raises:
        ValueError: shapes, dtypes or `precision` do not fit.
    """
    y = multiply(
        x.t() if batch_last else x,
        w,
        bias,
        out_batch_last=batch_last,
        variant=variant,
        tf32=tf32,
        precision=precision,
        prepared=prepared,
        config=config,
    )
    return y.t() if batch_last else y


def kronecker_chain(
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None = None,
    *,
    variant: str | None = None,
    tf32: bool | None = None,
    precision: str | None = None,
    prepared: Sequence[Tensor | None] | None = None,
    intermediate: str = "batch_first",
    configs: Sequence[dict[str, Any]] | None = None,
    **config: Any,
) -> Tensor:
    """``x (K_0 K_1 … K_{L-1})ᵀ + bias``, batch-first outside; the rightmost factor comes first.

    Args:
        x: [n, i], any strides.
        factors: L tensors [a, b, c, d], the output side first.
        intermediate: "batch_first" or "batch_last", the layout between factors.
        prepared, configs: one entry a factor in the order of `factors`; `config` holds for all.
        bias, variant, tf32, precision: as in `kronecker_factor`.

    Returns:
        [n, o].
    """
    last = len(factors) - 1
    for at in range(last, -1, -1):
        x = multiply(
            x,
            factors[at],
            bias if at == 0 else None,
            out_batch_last=intermediate == "batch_last" and at > 0,
            variant=variant,
            tf32=tf32,
            precision=precision,
            prepared=None if prepared is None else prepared[at],
            config={**config, **(configs[at] if configs else {})},
        )
    return x


def fused(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None, **config: Any) -> Tensor:
    """One fused kernel a factor; arguments as for `kronecker_chain`."""
    return kronecker_chain(x, factors, bias, variant="fused", **config)


def permute(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None, **config: Any) -> Tensor:
    """Our permutations around cuBLAS a factor; arguments as for `kronecker_chain`."""
    return kronecker_chain(x, factors, bias, variant="permute", **config)


def blocks(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None, **config: Any) -> Tensor:
    """cuBLAS on dense blocks of all d columns; arguments as for `kronecker_chain`."""
    return kronecker_chain(x, factors, bias, variant="blocks", **config)


def split(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None, **config: Any) -> Tensor:
    """fp32 as TF32 products of high and low parts; arguments as for `kronecker_chain`."""
    return kronecker_chain(x, factors, bias, variant="split", **config)


def bmm(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None, **config: Any) -> Tensor:
    """Algorithm 1 in plain torch, differentiable; arguments as for `kronecker_chain`."""
    return kronecker_chain(x, factors, bias, variant="bmm", **config)


def reference(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None, **_: Any) -> Tensor:
    """The definition in plain torch."""
    return kronecker_linear(x, factors, bias)


VARIANTS: dict[str, Callable[..., Tensor]] = {
    "auto": kronecker_chain,
    "fused": fused,
    "permute": permute,
    "blocks": blocks,
    "split": split,
    "bmm": bmm,
    "reference": reference,
}
