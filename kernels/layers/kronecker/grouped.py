"""Kronecker-sparse factor, batch-first, d > 1: one kernel, G neighbouring columns l a program.

The columns of one l are d apart, so a program loads [BN, BC, G] tiles whose last axis is
contiguous in memory (over all of (k, l) where G = d), splits them in registers into G matrices
[BN, BC] and multiplies each by the weight of its l with a 2-D dot. On sm_90 the parts reach wgmma
as register operands and on sm_80 mma.sync: no transposed copy of x exists anywhere. The G
results are joined in registers and stored in runs of G columns. A batched 3-D dot would compute
the same but always drops to mma.sync and reads x from shared memory one element at a time.
Source of the algorithm: "Fast Inference with Kronecker-Sparse Matrices", algorithm 2.
"""

from __future__ import annotations

from torch import Tensor

from blr.kernels.layers.kronecker.tiles import cdiv
from blr.kernels.layers.kronecker.triton import far, launch, program_tile

try:
    import triton
    import triton.language as tl
except ImportError as error:  # callers go through kernels.common.available
    raise ImportError("the kernels of Kronecker-sparse factors need triton") from error


@triton.jit
def split_columns(t, G: tl.constexpr):
    """[R, C, G] -> G tensors [R, C]."""
    if G == 1:
        return (tl.reshape(t, [t.shape[0], t.shape[1]]),)
    else:
        halves = tl.reshape(t, [t.shape[0], t.shape[1], 2, G // 2])
        low, high = tl.split(tl.permute(halves, 0, 1, 3, 2))
        return split_columns(low, G // 2) + split_columns(high, G // 2)


@triton.jit
def join_columns(ts, G: tl.constexpr):
    """G tensors [R, C] -> [R, C, G]."""
    if G == 1:
        return tl.expand_dims(ts[0], 2)
    else:
        low = join_columns(ts[: G // 2], G // 2)
        high = join_columns(ts[G // 2 :], G // 2)
        return tl.reshape(tl.permute(tl.join(low, high), 0, 1, 3, 2), [low.shape[0], low.shape[1], G])


@triton.jit
def zero_columns(G: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """G zero tensors [R, C] in fp32."""
    if G == 1:
        return (tl.zeros([R, C], tl.float32),)
    else:
        return zero_columns(G // 2, R, C) + zero_columns(G // 2, R, C)


@triton.jit
def multiply_columns(
    xs,
    w_at,
    mask,
    column,
    wd,
    accs,
    D: tl.constexpr,
    G: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """accs[g] + xs[g] w_g for the G columns l from `column` on; those from D on do not exist."""
    if G == 1:
        exists = tl.full([1, 1], 0, tl.int32) + column < D
        wt = tl.load(w_at, mask=mask & exists, other=0.0) if MASKED else tl.load(w_at)
        return (tl.dot(xs[0], wt, accs[0], input_precision=PRECISION),)
    else:
        H: tl.constexpr = G // 2
        low = multiply_columns(xs[:H], w_at, mask, column, wd, accs[:H], D, H, MASKED, PRECISION)
        w_at += far(tl.full([], H, tl.int32), wd)
        high = multiply_columns(xs[H:], w_at, mask, column + H, wd, accs[H:], D, H, MASKED, PRECISION)
        return low + high


@triton.jit
def grouped_kernel(
    x,
    w,
    bias,
    y,
    n,
    a,
    b,
    c,
    xn,
    xf,
    yn,
    yf,
    wa,
    wb,
    wc,
    wd,
    D: tl.constexpr,
    G: tl.constexpr,
    BN: tl.constexpr,
    BB: tl.constexpr,
    BC: tl.constexpr,
    GROUP_N: tl.constexpr,
    EVEN_B: tl.constexpr,
    EVEN_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y[n, a·b·D] = x[n, a·c·D] Kᵀ with w [a, b, c, D], columns l of one program: G neighbours."""
    EVEN_D: tl.constexpr = D % G == 0
    GROUPS: tl.constexpr = (D + G - 1) // G
    tiles_b = tl.cdiv(b, BB)
    tile_n, rest = program_tile(tl.cdiv(n, BN), tiles_b * GROUPS * a, GROUP_N)
    tile_b, i, group = rest % tiles_b, rest // tiles_b // GROUPS, rest // tiles_b % GROUPS
    rows = tile_n.to(tl.int64) * BN + tl.arange(0, BN)
    js = tile_b * BB + tl.arange(0, BB)
    ks = tl.arange(0, BC)
    ls = group * G + tl.arange(0, G)
    columns = (ks * D)[:, None] + ls[None, :]  # [BC, G]
    x_at = x + far(i * (c * D), xf) + rows[:, None, None] * xn + far(columns, xf)[None, :, :]
    w_at = w + far(i, wa) + far(group * G, wd) + far(js, wb)[None, :] + far(ks, wc)[:, None]
    x_step = far(tl.full([], BC * D, tl.int32), xf)
    w_step = far(tl.full([], BC, tl.int32), wc)
    in_n = (rows < n)[:, None, None]
    in_b = (js < b)[None, :]
    if not EVEN_D:
        in_n = in_n & (ls < D)[None, None, :]
    MASKED: tl.constexpr = not (EVEN_B and EVEN_C and EVEN_D)
    accs = zero_columns(G, BN, BB)
    for k in range(0, c, BC):
        in_c = ks < c - k
        x_mask = in_n if EVEN_C else in_n & in_c[None, :, None]
        parts = split_columns(tl.load(x_at, mask=x_mask, other=0.0), G)
        w_mask = in_b & in_c[:, None]
        accs = multiply_columns(parts, w_at, w_mask, group * G, wd, accs, D, G, MASKED, PRECISION)
        x_at += x_step
        w_at += w_step
    total = join_columns(accs, G)  # [BN, BB, G]
    columns = i * (b * D) + (js * D)[:, None] + ls[None, :]  # [BB, G]
    y_mask = in_n & (js < b)[None, :, None]
    if HAS_BIAS:
        inside = (js < b)[:, None] & (ls < D)[None, :]
        total += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)[None, :, :]
    y_at = y + rows[:, None, None] * yn + far(columns, yf)[None, :, :]
    tl.store(y_at, total.to(y.dtype.element_ty), mask=y_mask)


def grouped(
    x: Tensor, w: Tensor, out: Tensor, bias: Tensor | None, *, G: int, GROUP_N: int = 1,
    precision: str = "ieee", **tile: int,
) -> Tensor:  # fmt: skip
    """`launch`, G neighbouring columns l a program: G·BN·BB fp32 sums live in its registers."""
    (_, b, _, d), rows = w.shape, x.shape[0]
    programs = cdiv(rows, tile["BN"]) * cdiv(b, tile["BB"]) * cdiv(d, G)
    more = {"D": d, "G": G, "GROUP_N": GROUP_N, "PRECISION": precision}
    return launch(grouped_kernel, programs, x, w, out, bias, **more, **tile)
