"""Complete algorithms for Kronecker-sparse layers, and the choice between them for each factor.

All take x [n, i] and canonical factors [a, b, c, d] in any strides; they are fastest where the factors
are stored [a, d, b, c]. Source: "Fast Inference with Kronecker-Sparse Matrices", algorithms 1 and 2.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from blr.kernels.common.available import HALF, TRAINED
from blr.kernels.layers.kronecker.reference import kronecker_linear

DECODE_ROWS = 2  # up to here CUDA cores keep up with the weights
# bcd / (b + c) up to which dense blocks are faster than permutations: their d times the arithmetic takes
# tensor cores as long as memory takes three times the activations
HIDDEN = 768
DENSE_BYTES = 64 << 20  # of dense blocks that are made at every call


def choose(pattern: Sequence[int], n: int, dtype: torch.dtype, tf32: bool = False) -> str:
    """The variant for n rows of one factor (a, b, c, d): measured on an H200, where the fused kernels of
    the paper are slower than the library and copies. tf32: whether fp32 uses tensor cores."""
    a, b, c, d = pattern
    if n <= DECODE_ROWS and (d > 1 or n == 1 or dtype not in HALF):
        return "decode"  # the library's own kernels for two rows side by side are faster
    small = a * b * c * d**2 * dtype.itemsize <= DENSE_BYTES
    hidden = d > 1 and b * c * d <= HIDDEN * (b + c) and (dtype in HALF or tf32)
    return "blocks" if small and hidden else "permute"


def kronecker_factor(
    x: Tensor, w: Tensor, *, bias: Tensor | None = None, variant: str | None = None
) -> Tensor:
    """``x Kᵀ + bias`` for one factor. TF32 follows the setting of torch.

    Args:
        x: [n, a·c·d], any strides.
        w: [a, b, c, d] in the dtype of `x`, any strides.
        bias: [a·b·d] or None.
        variant: "decode" (up to eight rows), "permute" or "blocks"; None: as `choose` says.

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
    variant = variant or choose(w.shape, n, x.dtype, torch_tf32())
    x, w, bias = x.detach(), w.detach(), None if bias is None else bias.detach()
    return FACTORS[variant](x, w, x.new_empty(n, a * b * d), bias)


def kronecker_chain(
    x: Tensor, factors: Sequence[Tensor], bias: Tensor | None = None, *, variant: str | None = None
) -> Tensor:
    """``x (K_0 K_1 … K_{L-1})ᵀ + bias``, [n, o]; the rightmost factor comes first.

    Args:
        x: [n, i], any strides. factors: L tensors [a, b, c, d], the output side first.
        bias, variant: as in `kronecker_factor`, the variant for all of them.
    """
    for at in range(len(factors) - 1, -1, -1):
        x = kronecker_factor(x, factors[at], bias=bias if at == 0 else None, variant=variant)
    return x


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


def permute_factor(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """Gather – cuBLAS – scatter with our permutation kernels, no copies for d = 1."""
    from blr.kernels.layers.kronecker.permute import gather, scatter

    a, b, _, d = w.shape
    if d == 1:
        return diagonal_blocks(x, w[..., 0], out, bias)
    xs, ws = gather(x, a, d), w.permute(0, 3, 2, 1).flatten(0, 1)  # [a·d, c, b]
    blocks = torch.bmm(xs, ws, out=x.new_empty(a * d, x.shape[0], b))
    return scatter(blocks, d, out, bias)


def blocks_factor(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """All d columns as one dense block: cuBLAS reads and writes strided views, nothing is permuted."""
    from blr.kernels.layers.kronecker.triton import densify

    return diagonal_blocks(x, w[..., 0] if w.shape[3] == 1 else densify(w), out, bias)


def _decode(x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    from blr.kernels.layers.kronecker.triton import decode_factor

    return decode_factor(x, w, out, bias)


FACTORS: dict[str, Callable[..., Tensor]] = {
    **{"decode": _decode, "permute": permute_factor, "blocks": blocks_factor}
}
VARIANTS: dict[str, Callable[..., Tensor]] = {
    "auto": kronecker_chain,
    **{name: partial(kronecker_chain, variant=name) for name in ("permute", "blocks")},
    "reference": kronecker_linear,
}
