"""The algorithms for one Kronecker-sparse factor around the vendor's matrix products.

All compute ``out = x Kᵀ + bias`` from x [n, a·c·d], w [a, b, c, d] and out [n, a·b·d] in any strides
and return out:

    permute_factor  gather – bmm – scatter; no copies for d = 1
    blocks_factor   bmm with dense blocks of all d columns, d times the arithmetic, no permutation
    split_factor    permute_factor in fp32 on the TF32 tensor cores, three products in one

Source: "Fast Inference with Kronecker-Sparse Matrices", algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


def diagonal_blocks(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None) -> Tensor:
    """out [n, a·o] = x [n, a·i] diag(w)ᵀ + bias with w [a, o, i]; the library adds the bias of one."""
    a, o, i = w.shape
    if a == 1:
        w = w[0].t()
        return torch.mm(x, w, out=out) if bias is None else torch.addmm(bias, x, w, out=out)
    xs, ys = x.unflatten(1, (a, i)).transpose(0, 1), out.unflatten(1, (a, o)).transpose(0, 1)
    torch.bmm(xs, w.transpose(1, 2), out=ys)
    return out if bias is None else out.add_(bias)


def permute_factor(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None, **tile: int) -> Tensor:
    """Gather – cuBLAS – scatter with our permutation kernels, no copies for d = 1."""
    from blr.kernels.layers.kronecker.permute import gather, scatter

    a, b, _, d = w.shape
    if d == 1:
        return diagonal_blocks(x, w[..., 0], out, bias)
    xs, ws = gather(x, a, d, **tile), w.permute(0, 3, 2, 1).flatten(0, 1)  # [a·d, c, b]
    blocks = torch.bmm(xs, ws, out=x.new_empty(a * d, x.shape[0], b))
    return scatter(blocks, d, out, bias, **tile)


def blocks_factor(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """All d columns as one dense block: cuBLAS reads and writes strided views, nothing is permuted."""
    from blr.kernels.layers.kronecker.triton import densify

    return diagonal_blocks(x, w[..., 0] if w.shape[3] == 1 else densify(w), out, bias)


def split_factor(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None, **tile: int) -> Tensor:
    """fp32 by TF32 tensor cores: [x_hi, x_lo, x_hi] [w_hi, w_hi, w_lo]ᵀ, sums in fp32.

    The operands are exact in TF32, x_lo w_lo and the rounding of the low parts (2^-22 of each
    product) are lost: the error is that of fp32 sums. Differences from IEEE: an infinity (or a value
    within 2^-12 of the largest) gives NaN where other parts are not zero, and parts below 2^-126
    are subject to the tensor core's treatment of subnormals.
    """
    from blr.kernels.layers.kronecker.permute import HI_HI_LO, HI_LO_HI, gather_parts, scatter

    a, b, c, d = w.shape
    xs, rows = gather_parts(x, a, d, HI_LO_HI, **tile), w.permute(0, 3, 1, 2).reshape(a * d * b, c)
    ws = gather_parts(rows, 1, 1, HI_HI_LO).view(a * d, b, 3 * c).transpose(1, 2)
    with cublas_tf32(True):
        if d > 1:
            blocks = torch.bmm(xs, ws, out=x.new_empty(a * d, x.shape[0], b))
            return scatter(blocks, d, out, bias, **tile)
        torch.bmm(xs, ws, out=out.unflatten(1, (a, b)).transpose(0, 1))
    return out if bias is None else out.add_(bias)
