"""The algorithms for one Kronecker-sparse factor around the vendor's matrix products.

All compute ``out = x Kᵀ + bias`` from x [n, a·c·d], w [a, b, c, d] and out [n, a·b·d] in any strides
and return out:

    permute_factor  gather – bmm – scatter; no copies for d = 1 and batch-last views
    blocks_factor   bmm with dense blocks of all d columns, d times the arithmetic, no permutation
    split_factor    permute_factor in fp32 on the TF32 tensor cores, three products in one
    bmm_factor      algorithm 1 with torch's copies (returns a new tensor)

`tf32` is None for half precision, where the setting of torch plays no part.
Source: "Fast Inference with Kronecker-Sparse Matrices", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def torch_tf32() -> bool:
    """Whether torch's own fp32 products use TF32, by either of its two ways to say so."""
    try:
        return torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # the process has set fp32_precision, after which this may not be read
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


@contextmanager
def cublas_tf32(enabled: bool) -> Iterator[None]:
    """Products of torch inside use TF32 or not; the process-wide setting is put back."""
    if torch_tf32() == enabled:
        yield
        return
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "tf32" if enabled else "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def bmm(xs: Tensor, ws: Tensor, out: Tensor, tf32: bool | None) -> Tensor:
    """out [s, n, o] = xs [s, n, k] ws [s, k, o], written in place into any strides."""
    if tf32 is None or torch_tf32() == tf32:
        return torch.bmm(xs, ws, out=out)
    with cublas_tf32(tf32):
        return torch.bmm(xs, ws, out=out)


def block_views(x: Tensor, out: Tensor, w: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Batches of (x [s, n, c], wᵀ [s, c, b], out [s, n, b]) that are strided views, s = a or d."""
    a, b, c, d = w.shape
    xs = x.unflatten(1, (a, c, d)).permute(1, 3, 0, 2)  # [a, d, n, c]
    ys = out.unflatten(1, (a, b, d)).permute(1, 3, 0, 2)
    ws = w.permute(0, 3, 2, 1)
    if d <= a:
        xs, ys, ws = xs.transpose(0, 1), ys.transpose(0, 1), ws.transpose(0, 1)
    return zip(xs, ws, ys, strict=True)


def one_block(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, tf32: bool | None) -> Tensor:
    """out [n, o] = x [n, i] wᵀ + bias with w [o, i]; the library adds the bias."""
    if tf32 is None or torch_tf32() == tf32:
        return torch.mm(x, w.t(), out=out) if bias is None else torch.addmm(bias, x, w.t(), out=out)
    with cublas_tf32(tf32):
        return one_block(x, w, out, bias, tf32)


def diagonal_blocks(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, tf32: bool | None) -> Tensor:
    """out [n, a·o] = x [n, a·i] diag(w)ᵀ + bias with w [a, o, i]."""
    a, o, i = w.shape
    if a == 1:
        return one_block(x, w[0], out, bias, tf32)
    xs, ys = x.unflatten(1, (a, i)).transpose(0, 1), out.unflatten(1, (a, o)).transpose(0, 1)
    bmm(xs, w.transpose(1, 2), ys, tf32)
    return out if bias is None else out.add_(bias)


def permute_factor(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    tf32: bool | None = None,
    **tile: Any,
) -> Tensor:
    """Gather – cuBLAS – scatter with our permutation kernels.

    No copy is made where the blocks are views cuBLAS can read and write: d = 1, or a batch that is
    contiguous in both x and out.
    """
    from blr.kernels.layers.kronecker.permute import gather, scatter

    a, b, _, d = w.shape
    if d == 1:
        return diagonal_blocks(x, w[..., 0], out, bias, tf32)
    if x.stride(0) == 1 and out.stride(0) == 1:
        for xs, ws, ys in block_views(x, out, w):
            bmm(xs, ws, ys, tf32)
        return out if bias is None else out.add_(bias)
    xs, ws = gather(x, a, d, **tile), w.permute(0, 3, 2, 1).flatten(0, 1)  # [a·d, c, b]
    blocks = bmm(xs, ws, x.new_empty(a * d, x.shape[0], b), tf32)
    return scatter(blocks, d, out, bias, **tile)


def blocks_factor(
    x: Tensor,
    w: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    tf32: bool | None = None,
    prepared: Tensor | None = None,
) -> Tensor:
    """All d columns as one dense block: cuBLAS reads and writes strided views, nothing is permuted.

    Args:
        prepared: ``densify(w, d)``, made anew in one launch if None.
    """
    from blr.kernels.layers.kronecker.densify import densify_all

    if prepared is not None:
        dense = prepared[..., 0]
    else:
        dense = w[..., 0] if w.shape[3] == 1 else densify_all(w)
    return diagonal_blocks(x, dense, out, bias, tf32)


def split_weights(w: Tensor) -> Tensor:
    """TF32 parts (hi, hi, lo) of w [a, b, c, d] as [a·d, b, 3·c]."""
    from blr.kernels.layers.kronecker.permute import HI_HI_LO, gather_parts

    a, b, c, d = w.shape
    rows = w.permute(0, 3, 1, 2).reshape(a * d * b, c)
    return gather_parts(rows, 1, 1, HI_HI_LO).view(a * d, b, 3 * c)


def split_factor(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None, **tile: int) -> Tensor:
    """fp32 by TF32 tensor cores: [x_hi, x_lo, x_hi] [w_hi, w_hi, w_lo]ᵀ, sums in fp32.

    The operands are exact in TF32, x_lo w_lo and the rounding of the low parts (2^-22 of each
    product) are lost: the error is that of fp32 sums. Differences from IEEE: an infinity (or a value
    within 2^-12 of the largest) gives NaN where other parts are not zero, and parts below 2^-126
    are subject to the tensor core's treatment of subnormals.
    """
    from blr.kernels.layers.kronecker.permute import HI_LO_HI, gather_parts, scatter

    a, b, _, d = w.shape
    xs, ws = gather_parts(x, a, d, HI_LO_HI, **tile), split_weights(w).transpose(1, 2)
    if d > 1:
        blocks = bmm(xs, ws, x.new_empty(a * d, x.shape[0], b), True)
        return scatter(blocks, d, out, bias, **tile)
    bmm(xs, ws, out.unflatten(1, (a, b)).transpose(0, 1), True)
    return out if bias is None else out.add_(bias)


def bmm_factor(x: Tensor, w: Tensor, bias: Tensor | None = None, *, tf32: bool = False) -> Tensor:
    """Algorithm 1 with torch's copies: permute, one bmm, permute; differentiable."""
    a, b, c, d = w.shape
    with cublas_tf32(tf32):
        xs = x.unflatten(1, (a, c, d)).transpose(2, 3).flatten(1, 2).transpose(0, 1)  # [ad, n, c]
        blocks = torch.bmm(xs, w.permute(0, 3, 2, 1).flatten(0, 1))
    y = blocks.transpose(0, 1).unflatten(1, (a, d)).transpose(2, 3).reshape(x.shape[0], a * b * d)
    return y if bias is None else y + bias
