"""The algorithms for one Kronecker-sparse factor around the vendor's matrix products.

All compute ``out = x Kᵀ + bias`` from x [n, a·c·d], w [a, b, c, d] and out [n, a·b·d] in any strides
and return out:

    permute_factor  gather – bmm – scatter; no copies for d = 1
    blocks_factor   bmm with dense blocks of all d columns, d times the arithmetic, no permutation

Source: "Fast Inference with Kronecker-Sparse Matrices", algorithm 1.
"""

import torch
from torch import Tensor


def torch_tf32() -> bool:
    """Whether torch's own fp32 products use TF32, by either of its two ways to say so."""
    try:
        return torch.backends.cuda.matmul.allow_tf32
    except RuntimeError:  # the process has set fp32_precision, after which this may not be read
        return torch.backends.cuda.matmul.fp32_precision == "tf32"


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
